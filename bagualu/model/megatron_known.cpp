// Names of Megatron-LM's training arguments, Megatron-Core 0.13 to 0.19, main and dev of 2026-08,
// and what they mean here. Source: megatron/training/arguments.py and the configuration classes it
// makes arguments of.

#include "bagualu/model/megatron_known.h"

#include <algorithm>
#include <array>
#include <map>

#include "bagualu/base/nearest.h"

namespace bagualu {
namespace {

// Separated by white space, so that a name more is a word more.
constexpr std::string_view kRead = R"(
account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split
accumulate-allreduce-grads-in-fp32 activation-offload-fraction add-qkv-bias
apply-query-key-layer-scaling attention-backend attention-dropout bf16 context-parallel-size
cp-comm-type cross-entropy-fusion-impl cross-entropy-loss-fusion decoder-first-pipeline-num-layers
decoder-last-pipeline-num-layers disable-bias-linear disable-pad-vocab-size
distribute-saved-activations encoder-seq-length exp-avg-dtype exp-avg-sq-dtype
expert-model-parallel-size expert-tensor-parallel-size ffn-hidden-size
fine-grained-activation-offloading fp16 fp8-format fp8-param-gather fp8-recipe global-batch-size
grad-reduce-in-bf16 group-query-attention hidden-dropout hidden-size kv-channels kv-lora-rank
main-grads-dtype main-params-dtype make-vocab-size-divisible-by max-position-embeddings
micro-batch-size microbatch-group-size-per-virtual-pipeline-stage min-offloaded-tensor-size
moe-aux-loss-coeff moe-enable-deepep moe-expert-capacity-factor moe-ffn-hidden-size
moe-flex-dispatcher-backend moe-layer-freq moe-layer-recompute moe-pad-expert-input-to-capacity
moe-permute-fusion moe-router-bias-update-rate moe-router-dtype moe-router-enable-expert-bias
moe-router-load-balancing-type moe-router-padding-for-fp8 moe-router-padding-for-quantization
moe-router-pre-softmax moe-router-score-function moe-router-topk moe-shared-expert-gate
moe-shared-expert-intermediate-size moe-shared-expert-overlap moe-token-dispatcher-type
moe-z-loss-coeff mtp-num-layers multi-latent-attention no-bias-gelu-fusion no-bias-swiglu-fusion
no-gradient-accumulation-fusion no-masked-softmax-fusion no-overlap-p2p-communication
no-pad-vocab-size no-position-embedding norm-epsilon normalization num-attention-heads
num-distributed-optimizer-instances num-experts num-layers num-layers-per-virtual-pipeline-stage
num-query-groups num-virtual-stages-per-pipeline-rank offload-modules optimizer
overlap-grad-reduce overlap-moe-expert-parallel-comm overlap-param-gather padded-vocab-size
pipeline-model-parallel-layout pipeline-model-parallel-size position-embedding-type q-lora-rank
qk-head-dim qk-l2-norm qk-layernorm qk-pos-emb-head-dim quick-geglu recompute-activations
recompute-granularity recompute-method recompute-modules recompute-num-layers rotary-base
seq-length sequence-parallel sgd-momentum softmax-type squared-relu swiglu
tensor-model-parallel-size tp-comm-overlap transformer-impl untie-embeddings-and-output-weights
use-distributed-optimizer use-precision-aware-optimizer use-rotary-position-embeddings v-head-dim
vocab-size window-attn-skip-freq window-size
)";

// Change bytes or time in a way that no Job expresses; `name=value`: not with this value.
constexpr std::string_view kUnmodelled = R"(
apply-residual-connection-post-layernorm attention-output-gate batch-invariant-mode
chunked-optimizer-state-offload cpu-offloading-num-layers=0 cuda-graph-impl=none
ddp-param-name-patterns-for-fp32-local-accumulation ddp-reduce-scatter-with-fp32-accumulation
decoder-num-layers decoder-seq-length defer-embedding-wgrad-compute delay-wgrad-compute
delta-offload-bytes-across-pp-ranks=0 dense-grouped-gemm disable-fp8-wgrad
dynamic-context-parallel enable-cuda-graph enable-gpt-oss enable-hyper-connections
enable-mhc-connections encoder-num-layers encoder-pipeline-model-parallel-size=0
encoder-tensor-model-parallel-size=0 ep-overlap-early-attn-memory-release
experimental-attention-variant expert-tensor-parallel-num-weight-shards external-cuda-graph
fallback-to-eager-attn first-last-layers-bf16 fp16-lm-cross-entropy fp32-residual-connection
fp4-format fp8-output-proj fp8-quantizer-factory freeze-all-layers freeze-base-for-mtp
fused-residual-rmsnorm gtp-remat-opt-in-modules gtp-remat-reduce-scatter-with-fp32-accumulation
head-wise-attn-gate heterogeneous-layers-config-encoded-json heterogeneous-layers-config-path
hierarchical-context-parallel-sizes hybrid-attention-ratio=0.0 hybrid-context-parallel
hybrid-layer-pattern hybrid-mlp-ratio=0.0 hybrid-override-pattern is-hybrid-model
keep-fp8-transpose-cache keep-fp8-transpose-cache-when-using-custom-fsdp kitchen-config-file
kitchen-recipe-number linear-attention-freq linear-attention-type mla-down-proj-fusion
mlp-chunks-for-training moe-apply-probs-on-input moe-combine-bwd-dtype=bf16
moe-dispatch-fwd-dtype=bf16 moe-expert-rank-capacity-factor moe-extended-tp
moe-hybridep-pad-variable-tokens moe-latent-size moe-n-hash-layers moe-paged-stash
moe-permute-fusion-into-hybridep moe-single-grouped-bias moe-single-grouped-weight
moe-use-grouped-tensor moe-use-legacy-grouped-gemm moe-use-upcycling mtp-hsm mtp-standalone
mtp-use-repeated-layer no-bias-dropout-fusion no-fp8-wgrad o-lora-rank offload-optimizer-states
optimizer-cpu-offload optimizer-cuda-graph optimizer-state-offload-fraction=0.0 output-logit-dtype
overlap-dispatch-backward-with-experts-wgrad overlap-param-gather-with-optimizer-step
perform-rl-step pipeline-model-parallel-split-rank retro-add-retriever retro-project-dir
reuse-grad-buf-for-mxfp8-param-ag sequence-packing-scheduler sft spec te-precision-config-file
tensor-parallel-num-weight-shards use-custom-fsdp use-grouped-gemm-for-dense-mlp
use-grouped-gemm-for-shared-expert use-kitchen-attention use-legacy-models use-megatron-fsdp
use-nccl-ub use-te-activation-func use-torch-fsdp2 use-transformer-engine-op-fuser
use-varlen-dataset yaml-cfg
)";

// Data, logging, checkpoints, learning rates, initialisation, inference, reinforcement learning,
// other model kinds, tuning of collectives; and details of a flag above, which alone do nothing.
constexpr std::string_view kIgnored = R"(
activation-func-clamp-value adam-beta1 adam-beta2 adam-eps adlr-autoresume
adlr-autoresume-interval allow-ambiguous-pad-tokens app-tag-run-name app-tag-run-version
apply-layernorm-1p apply-wd-to-qk-layernorm async-ckpt-cpu-priority async-ckpt-io-priority
async-ckpt-use-cpu-shm async-save async-strategy attention-softmax-in-fp32 auto-detect-ckpt-format
batch-invariant-backend bert-embedder-type bert-load bert-no-binary-head biencoder-projection-dim
biencoder-shared-query-context-model block-data-path cache-mla-latents calc-ft-timeouts
calculate-per-token-loss chat-template check-for-large-grads check-for-spiky-loss
check-weight-hash-across-dp-replicas-interval ckpt-assume-constant-structure ckpt-convert-format
ckpt-convert-save ckpt-convert-update-legacy-dist-opt-format ckpt-drop-redundant-extra-state
ckpt-format ckpt-fully-parallel-load ckpt-fully-parallel-load-exchange-algo
ckpt-fully-parallel-load-per-rank-objects ckpt-fully-parallel-load-process-group
ckpt-fully-parallel-save ckpt-fully-parallel-save-process-group ckpt-pg-tensors-cache-create
ckpt-pg-tensors-cache-path ckpt-step classes-fraction clip-grad config-logger-dir
cp-partition-mode cpu-offloading-retain-pinned-cpu-buffers create-all-gather-group
csa-compress-ratios csa-compress-rotary-base csa-dense-mode csa-window-size
cuda-graph-dynamic-microbatches cuda-graph-modules cuda-graph-scope cuda-graph-warmup-steps
data-args-path data-cache-path data-parallel-random-init data-parallel-sharding-strategy data-path
data-per-class-fraction dataloader-defer-npy-index-mmap dataloader-fast-cache-load
dataloader-inter-document-masking dataloader-type ddp-average-in-collective ddp-bucket-size
ddp-num-buckets ddp-pad-buckets-for-high-nccl-busbw decode-only-cuda-graphs decoupled-lr
decoupled-min-lr decrease-batch-size-if-needed delay-offload-until-cuda-graph deterministic-mode
dino-bottleneck-size dino-freeze-last-layer dino-head-hidden-size dino-local-crops-number
dino-local-img-size dino-norm-last-layer dino-teacher-temp dino-warmup-teacher-temp
dino-warmup-teacher-temp-epochs disable-align-grad-reduce
disable-async-tensor-model-parallel-allreduce disable-bf16-reduced-precision-matmul
disable-chunked-prefill disable-ckpt-fully-parallel-save
disable-ckpt-load-validate-sharding-integrity disable-clone-scatter-output-in-embedding
disable-dsa-indexer-rotate-activation disable-dsa-indexer-scoring-relu
disable-flight-recorder-dump-on-timeout disable-flight-recorder-extra-dump-on-exec
disable-flight-recorder-include-only-active disable-gloo-process-groups
disable-grad-buffers-cpu-backup disable-jit-fuser disable-log-loss-scale-to-tensorboard
disable-mamba-mem-eff-path disable-manual-gc-eval disable-msc disable-param-buffers-cpu-backup
disable-save-tokenizer-assets disable-straggler-on-startup disable-stream-ckpt-dequant
disable-strict-fsdp-dtensor-load disable-symmetric-registration
disable-tokenizer-sentencepiece-ignore-extra-whitespaces disable-tp-comm-bulk-dgrad
disable-tp-comm-bulk-wgrad disable-tp-comm-overlap-ag disable-tp-comm-overlap-rs
disable-tp-comm-split-ag disable-tp-comm-split-rs disable-use-tokenizer-model-from-checkpoint-args
dist-ckpt-format dist-ckpt-optim-fully-reshardable dist-ckpt-save-pre-mcore-014
dist-ckpt-strictness dist-ckpt-workers distrib-optim-fully-reshardable-mem-efficient
distributed-backend distributed-timeout-minutes distributed-timeout-seconds-after-init
dsa-indexer-head-dim dsa-indexer-k-norm-epsilon dsa-indexer-k-norm-fp32 dsa-indexer-loss-coeff
dsa-indexer-n-heads dsa-indexer-rope-interleaved dsa-indexer-skip-topk-offset dsa-indexer-topk
dsa-indexer-topk-freq dsa-indexer-use-sparse-loss dsa-kernel-backend dump-param-to-param-group-map
embedding-init-method-std embedding-path empty-unused-memory-level enable-chunked-prefill
enable-experimental enable-ft-package enable-full-sharding-in-hsdp enable-msc end-weight-decay
eod-mask-loss error-injection-rate error-injection-type eval-global-batch-size eval-interval
eval-iters eval-micro-batch-size evidence-data-path exit-duration-in-mins exit-interval
exit-on-missing-checkpoint exit-signal exit-signal-handler exit-signal-handler-for-dataloader
exit-signal-handler-for-training export-default-te-spec export-draft-vocab-size
export-eagle-algorithm export-force-local-attention export-freeze-mtp export-kd-cfg
export-kd-teacher-ckpt-format export-kd-teacher-load export-kd-teacher-model-config
export-kv-cache-quant export-legacy-megatron export-model-type export-moe-apply-probs-on-input
export-num-eagle-layers export-num-medusa-heads export-num-mtp export-offline-model
export-qk-l2-norm export-quant-cfg export-real-quant-cfg export-te-mcore-model fake-process-group
fim-data fim-eod-token fim-fragment-rate fim-middle-token fim-no-prefix fim-pad-token
fim-prefix-token fim-rate fim-split-sample fim-spm-rate fim-suffix-token
fine-grained-offloading-max-inflight-offloads finetune finetune-data-files finetune-data-split
finetune-hf-dataset flash-attention-version flash-decode flight-recorder-dump-path
flight-recorder-include-stack-trace flight-recorder-trace-buffer-size fp4-param-gather
fp4-quantizer-factory fp4-recipe fp8-amax-compute-algo fp8-amax-history-len fp8-interval
fp8-margin fsdp-db-use-persist-buf-on-alloc-fail fsdp-double-buffer fsdp-manual-registration
ft-num-warmup-iters full-validation gdn-conv-pad-alignment gdn-pre-gated-delta-rule-fusion
gdp-cutedsl-kernel gdp-num-chunk-states-to-recompute gdp-num-householder glu-linear-offset
gpu-sniff-test-interval grpo-clamp-eps-lower grpo-clamp-eps-upper grpo-default-temperature
grpo-default-top-p grpo-entropy-term-weight grpo-filter-groups-with-same-reward grpo-group-size
grpo-iterations grpo-kl-beta grpo-prompts-per-step gtp-expert-remat-nccl-ub gtp-remat-nccl-ub
head-lr-mult high-priority-a2a-comm-stream high-priority-stream-groups hysteresis ict-head-size
ict-load img-h img-w indexer-batch-size indexer-log-interval
inference-batch-times-seqlen-threshold inference-coordinator-port
inference-cuda-graph-all-prefills inference-cuda-graph-max-tokens inference-cuda-graph-scope
inference-disable-ep-consensus inference-disable-triton-nvls-kernels inference-dynamic-batching
inference-dynamic-batching-async-sched-mode inference-dynamic-batching-block-size
inference-dynamic-batching-buffer-guaranteed-fraction
inference-dynamic-batching-buffer-overflow-factor inference-dynamic-batching-buffer-size-gb
inference-dynamic-batching-chunk-size inference-dynamic-batching-cuda-graph-max-tokens
inference-dynamic-batching-cuda-graph-mixed-prefill-count
inference-dynamic-batching-cuda-graph-sizing-distribution inference-dynamic-batching-logprobs-mode
inference-dynamic-batching-mamba-memory-ratio inference-dynamic-batching-max-requests
inference-dynamic-batching-max-requests-override inference-dynamic-batching-max-tokens
inference-dynamic-batching-max-tokens-override inference-dynamic-batching-num-cuda-graphs
inference-dynamic-batching-paused-buffer-size-gb inference-dynamic-batching-prefix-caching
inference-dynamic-batching-prefix-caching-coordinator-policy
inference-dynamic-batching-prefix-caching-eviction-policy
inference-dynamic-batching-prefix-caching-mamba-gb
inference-dynamic-batching-prefix-caching-routing-alpha
inference-dynamic-batching-sampling-backend
inference-dynamic-batching-track-generated-token-events
inference-dynamic-batching-track-paused-request-events
inference-dynamic-batching-unified-memory-level inference-fuse-tp-communication
inference-grouped-gemm-backend inference-logging-step-interval inference-max-batch-size
inference-max-requests inference-max-seq-length inference-moe-disable-fused-quant-kernels
inference-moe-token-dispatcher-type inference-rng-tracker inference-shards
inference-text-gen-server-logging inference-use-synchronous-zmq-collectives
inference-wandb-logging init-method-std init-method-xavier-uniform init-model-with-meta-device
initial-loss-scale inprocess-active-world-size inprocess-barrier-timeout
inprocess-completion-timeout inprocess-empty-cuda-cache inprocess-granularity
inprocess-hard-timeout inprocess-heartbeat-interval inprocess-heartbeat-timeout
inprocess-last-call-wait inprocess-max-iterations inprocess-monitor-process-interval
inprocess-monitor-thread-interval inprocess-progress-watchdog-interval inprocess-restart
inprocess-soft-timeout inprocess-termination-grace-time iter-per-epoch iterations-to-skip
kitchen-attention-backend langrl-env-config langrl-external-server
langrl-inference-server-conversation-template langrl-inference-server-type lazy-mpu-init
legacy-tokenizer linear-conv-kernel-dim linear-cp-mode linear-key-head-dim linear-num-key-heads
linear-num-value-heads linear-value-head-dim lion-beta1 lion-beta2 load load-main-params-from-ckpt
load-model-opt-format local-rank log-device-memory-used log-energy log-interval
log-max-attention-logit log-memory-interval log-memory-to-tensorboard log-moe-overload-factor
log-num-zeros-in-grad log-params-norm log-progress log-straggler log-throughput
log-timers-to-tensorboard log-validation-ppl-to-tensorboard log-world-size-to-tensorboard
logging-level logits-load-decode-threads logits-load-dir logits-load-ignore-errors
logits-load-kd-loss-alpha logits-load-msc-prefetch-depth logits-load-prefetch-factor
logits-save-dir logits-save-dtype logits-save-top-k logits-save-top-p logits-save-top-p-min-k
loss-scale loss-scale-window lr lr-decay-iters lr-decay-samples lr-decay-steps lr-decay-style
lr-warmup-fraction lr-warmup-init lr-warmup-iters lr-warmup-samples lr-warmup-steps
lr-wsd-decay-iters lr-wsd-decay-samples lr-wsd-decay-style mamba-head-dim
mamba-inference-conv-states-dtype mamba-inference-ssm-states-dtype mamba-num-groups
mamba-num-heads mamba-state-dim mamba-training-ssm-states-dtype manual-gc manual-gc-interval
mask-factor mask-prob mask-type max-seqlen-per-dp-cp-rank max-tokens-to-oom
megatron-fsdp-cache-param-bucket-views megatron-fsdp-enable-fine-grained-param-gather
megatron-fsdp-grad-comm-dtype megatron-fsdp-main-grads-dtype megatron-fsdp-main-params-dtype
megatron-fsdp-max-pool-double-buffer megatron-fsdp-prefetch-recompute-forward-weights
megatron-fsdp-version memory-snapshot-path merge-file mhc-init-gating-factor
mhc-num-residual-streams mhc-recompute-layer-num mhc-sinkhorn-iterations mid-level-dataset-surplus
min-dynamic-context-parallel-size min-loss-scale min-lr mlp-chunks-for-prefill mock-data
model-provider modelopt-enabled moe-deepep-num-sms moe-enable-routing-replay
moe-flex-dispatcher-num-sms moe-grouped-gemm moe-hybridep-num-blocks-permute
moe-hybridep-num-blocks-unpermute moe-hybridep-num-sms moe-hybridep-num-sms-preprocessing
moe-hybridep-pad-uneven-dispatch-inputs moe-input-jitter-eps moe-mlp-glu-interleave-size
moe-ncclep-static-shape moe-ncclep-use-symm-mem moe-ncclep-zero-copy
moe-pad-experts-for-cuda-graph-inference moe-paged-stash-buffer-size-factor-cpu
moe-paged-stash-buffer-size-factor-cuda moe-paged-stash-page-size moe-per-layer-logging
moe-router-force-biased moe-router-force-load-balancing moe-router-fusion moe-router-group-topk
moe-router-num-groups moe-router-quantile-balancing-ema moe-router-topk-scaling-factor
moe-routing-trace-capture-hidden-states moe-routing-trace-capture-logits
moe-routing-trace-dump-weights moe-routing-trace-max-training-iters moe-routing-trace-path
moe-shared-expert-glu-interleave-size moe-token-drop-policy moe-upcycling-granularity
mrope-interleaved mrope-section mscale mscale-all-dim mtp-detach-heads mtp-hybrid-override-pattern
mtp-loss-scaling-factor multiple-validation-sets muon-coefficient-type muon-extra-scale-factor
muon-fp32-matmul-prec muon-momentum muon-nesterov muon-no-split-qkv muon-num-ns-steps
muon-scalar-optimizer muon-scale-mode muon-tp-mode muon-use-nesterov muon-use-syrk
mup-attn-scale-power mup-base-head-dim mup-base-hidden-size mup-embedding-mult mup-output-mult
mup-width-mult nccl-all-reduce-for-prefill nccl-communicator-config-path no-align-grad-reduce
no-align-param-gather no-async-tensor-model-parallel-allreduce no-barrier-with-level-1-timing
no-check-for-nan-in-loss-and-grad no-ckpt-fully-parallel-save
no-ckpt-load-validate-sharding-integrity no-clone-scatter-output-in-embedding
no-create-attention-mask-in-dataloader no-data-sharding no-dsa-indexer-rotate-activation
no-dsa-indexer-scoring-relu no-dsa-kernel-fusion no-flight-recorder-dump-on-timeout
no-flight-recorder-extra-dump-on-exec no-flight-recorder-include-only-active
no-gradient-reduce-div-fusion no-initialization no-load-optim no-load-rng
no-log-loss-scale-to-tensorboard no-manual-gc-eval no-mmap-bin-files no-one-logger
no-persist-layer-norm no-pin-cpu-grads no-pin-cpu-params no-rope-freq no-rope-fusion no-save-optim
no-save-rng no-save-tokenizer-assets no-scatter-gather-tensors-in-pipeline no-stream-ckpt-dequant
no-strict-fsdp-dtensor-load no-tokenizer-sentencepiece-ignore-extra-whitespaces
no-tp-comm-bulk-dgrad no-tp-comm-bulk-wgrad no-tp-comm-overlap-ag no-tp-comm-overlap-rs
no-tp-comm-split-ag no-tp-comm-split-rs no-use-layer-wise-param-layout
no-use-tokenizer-model-from-checkpoint-args no-weight-decay-cond-type
no-yarn-correction-range-round-to-int non-persistent-ckpt-type non-persistent-global-ckpt-dir
non-persistent-local-ckpt-algo non-persistent-local-ckpt-dir non-persistent-save-interval
null-tokenizer-eod-id null-tokenizer-pad-id num-channels num-classes num-dataset-builder-threads
num-layers-at-end-in-bf16 num-layers-at-start-in-bf16 num-residual-streams num-speculative-tokens
num-workers nvtx-ranges o-groups object-storage-cache-path one-logger-async one-logger-project
one-logger-run-name onnx-safe openai-gelu optimizer-offload-fraction
optimizer-state-offload-chunk-size-mb original-max-position-embeddings otel-enabled
otel-service-name otel-span-groups outer-dp-sharding-strategy output-bert-embeddings
overlap-cpu-optimizer-d2h-h2d overlap-p2p-communication-warmup-flush override-ckpt-iteration
override-opt-param-scheduler override-opt_param-scheduler pad-packed-seq-alignment patch-dim
per-dataset-sequences-path per-split-data-args-path persistent-save-interval
phase-transition-iterations pipeline-model-parallel-comm-backend pretrained-checkpoint profile
profile-ranks profile-step-end profile-step-start pytorch-profiler-collect-callstack
pytorch-profiler-collect-chakra pytorch-profiler-collect-shapes qad-train-target qk-clip
qk-clip-alpha qk-clip-threshold query-in-block-prob rampup-batch-size record-memory-history
record-shapes refit-method relative-attention-max-distance relative-attention-num-buckets
replication replication-factor replication-jump rerun-mode reset-attention-mask reset-position-ids
result-rejected-tracker-filename retriever-report-topk-accuracies retriever-score-scaling
retriever-seq-length retro-attention-gate retro-cyclic-train-iters retro-encoder-attention-dropout
retro-encoder-hidden-dropout retro-encoder-layers retro-no-verify-neighbor-count
retro-num-neighbors retro-num-retrieved-chunks rl-calculate-intra-group-similarity
rl-consumption-granularity rl-default-temperature rl-default-top-k rl-default-top-p
rl-durable-rollout-bank rl-generation-batch-size rl-generation-lag
rl-importance-sampling-truncation-coef rl-inference-expert-model-parallel-size
rl-inference-expert-tensor-model-parallel-size rl-inference-logprobs-is-correction
rl-inference-model-unified-memory-level rl-inference-parsers
rl-inference-pipeline-model-parallel-size rl-inference-tensor-model-parallel-size
rl-kv-cache-management-mode rl-max-inflight-requests rl-num-parallel-generation-batches
rl-num-parallel-generations rl-offload-inference-model-weights-when-idle
rl-offload-kv-cache-during-training rl-offload-optimizer-during-inference
rl-parallel-generation-tasks rl-partial-rollouts rl-persist-cuda-graphs rl-profile rl-profile-dir
rl-prompts-per-eval rl-remove-kv-cache-during-training rl-reset-cuda-graphs rl-rollout-bank-dir
rl-rollout-bank-max-bytes rl-sequence-packing-algo rl-sequence-packing-bin-size
rl-sequence-packing-max-sequences-per-bin rl-skip-bos-token rl-submission-granularity
rl-training-cuda-graphs rl-use-sequence-packing rl-verify-model-weights-swap rope-scaling-factor
rope-type rotary-base-per-layer rotary-interleaved rotary-percent rotary-scaling-factor
rotary-seq-len-interpolation-factor run-workload-inspector-server sample-rate save
save-activations-interval save-dgrads-interval save-interval save-params-interval
save-retain-interval save-tokens-per-expert-interval save-wgrads-interval seed
sft-mock-dataset-config-json sft-tokenizer-prompt-format sharp-enabled-group short-seq-prob
skip-train split start-eval-at-iter start-weight-decay step-batch-size-schedule
straggler-ctrlr-port straggler-minmax-count suggested-communication-unit-size swin-backbone-type
symmetric-ar-type te-rng-tracker teacher-model-config tensorboard-dir tensorboard-log-interval
tensorboard-queue-size test-data-path test-mode thd-max-packed-sequences thd-tail-padding-policy
tiktoken-num-special-tokens tiktoken-pattern tiktoken-special-tokens timing-log-level
timing-log-option titles-data-path tokenizer-hf-include-special-tokens
tokenizer-hf-no-include-special-tokens tokenizer-hf-no-use-fast tokenizer-hf-use-fast
tokenizer-metadata tokenizer-model tokenizer-sentencepiece-legacy tokenizer-special-tokens
tokenizer-type torch-fsdp2-no-reshard-after-forward tp-comm-bootstrap-backend tp-comm-overlap-cfg
tp-comm-overlap-rs-dgrad train-data-path train-iters train-samples train-sync-interval
trust-remote-code use-checkpoint-args use-checkpoint-opt-param-scheduler
use-checkpoint-opt_param-scheduler use-cpu-initialization use-dist-ckpt use-flash-attn
use-fused-mhc use-fused-weighted-squared-relu use-gigatoken use-layer-wise-param-layout
use-legacy-static-engine use-mcore-models use-mp-args-from-checkpoint-args use-mup
use-one-sent-docs use-persistent-ckpt-worker use-pytorch-profiler use-ring-exchange-p2p
use-rope-scaling use-same-sampling-seed-across-dp-ranks use-sharp
use-torch-optimizer-for-cpu-offload use-tp-pp-dp-mapping valid-data-path validation-set-names
varlen-mock-dataset-config-json varlen-sbhd-validation verify-integrity vision-backbone-type
vision-pretraining vision-pretraining-type vocab-extra-ids vocab-file wandb-entity wandb-exp-name
wandb-project wandb-save-dir wd-incr-steps weight-decay weight-decay-incr-style
wgrad-deferral-limit wsd-decay-steps yarn-beta-fast yarn-beta-slow
yarn-correction-range-round-to-int yarn-original-max-position-embeddings
)";

constexpr std::array<std::pair<std::string_view, std::string_view>, 4> kRemoved = {
    {{"batch-size", "micro-batch-size"},
     {"warmup", "lr-warmup-fraction"},
     {"model-parallel-size", "tensor-model-parallel-size"},
     {"checkpoint-activations", "recompute-activations"}}};

// Both spellings of torchrun's own arguments.
constexpr std::string_view kLauncher = R"(
nnodes nproc-per-node nproc_per_node node-rank node_rank master-addr master_addr master-port
master_port rdzv-backend rdzv_backend rdzv-endpoint rdzv_endpoint rdzv-id rdzv_id rdzv-conf
rdzv_conf standalone max-restarts max_restarts monitor-interval monitor_interval start-method
start_method role log-dir log_dir redirects tee local-ranks-filter local_ranks_filter local-addr
local_addr no-python no_python run-path run_path module
)";

using Table = std::map<std::string_view, KnownMegatronFlag>;

void add_names(std::string_view names, MegatronFlagKind kind, Table* table) {
  constexpr std::string_view kSpace = " \n";
  for (size_t begin = names.find_first_not_of(kSpace); begin != std::string_view::npos;) {
    const size_t end = std::min(names.find_first_of(kSpace, begin), names.size());
    const std::string_view word = names.substr(begin, end - begin);
    const size_t equals = word.find('=');
    KnownMegatronFlag flag{kind, {}, {}};
    if (equals != std::string_view::npos) flag.harmless = word.substr(equals + 1);
    table->emplace(word.substr(0, equals), flag);
    begin = names.find_first_not_of(kSpace, end);
  }
}

const Table& table() {
  static const Table all = [] {
    Table made;
    add_names(kRead, MegatronFlagKind::kRead, &made);
    add_names(kUnmodelled, MegatronFlagKind::kUnmodelled, &made);
    add_names(kIgnored, MegatronFlagKind::kIgnored, &made);
    add_names(kLauncher, MegatronFlagKind::kLauncher, &made);
    for (const auto& [name, replacement] : kRemoved) {
      made.emplace(name, KnownMegatronFlag{MegatronFlagKind::kRemoved, {}, replacement});
    }
    return made;
  }();
  return all;
}

}  // namespace

KnownMegatronFlag known_megatron_flag(std::string_view name) {
  const auto found = table().find(name);
  return found == table().end() ? KnownMegatronFlag{} : found->second;
}

std::string nearest_megatron_flag(std::string_view name) {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> made;
    for (const auto& [known, flag] : table()) {
      const bool given_up =
          flag.kind == MegatronFlagKind::kRemoved || flag.kind == MegatronFlagKind::kLauncher;
      if (!given_up) made.emplace_back(known);
    }
    return made;
  }();
  return nearest_name(name, names);
}

}  // namespace bagualu
