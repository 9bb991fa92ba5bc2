"""config.json files of transformers with the number of parameters transformers counts.

`python python/tests/hf_golden.py` writes tests/data/hf_configs, which the C++ tests read;
test_hf_golden.py makes the same again and compares. One JSON object a line: `name`, `parameters`,
`active` (as if one token's experts alone were there), `config` (what save_pretrained writes).
"""

import json
import random
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import torch
import transformers as hf

FOLDER = Path(__file__).resolve().parents[2] / "tests" / "data" / "hf_configs"

_DEEPSEEK = dict(hidden_size=7168, intermediate_size=18432, moe_intermediate_size=2048,
                 num_hidden_layers=61, q_lora_rank=1536, kv_lora_rank=512, num_experts_per_tok=8,
                 rope_parameters={"rope_type": "yarn", "factor": 40.0, "rope_theta": 10000.0,
                                  "original_max_position_embeddings": 4096},
                 max_position_embeddings=163840)
_LLAMA3 = dict(num_key_value_heads=8, vocab_size=128256, rms_norm_eps=1e-5,
               rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
               max_position_embeddings=8192)
_LLAMA4 = dict(use_qk_norm=True, rope_parameters={"rope_type": "default", "rope_theta": 500000.0})

# Shapes of the published config.json files; names are those of configs/models.
PUBLISHED = {
    "mixtral-8x7b": hf.MixtralConfig(max_position_embeddings=32768),
    "mixtral-8x22b": hf.MixtralConfig(
        hidden_size=6144, intermediate_size=16384, num_hidden_layers=56, num_attention_heads=48,
        vocab_size=32000, max_position_embeddings=65536),
    "qwen1.5-moe-a2.7b": hf.Qwen2MoeConfig(
        max_window_layers=21, max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "qwen2-57b-a14b": hf.Qwen2MoeConfig(
        hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4, moe_intermediate_size=2560, num_experts=64, num_experts_per_tok=8,
        shared_expert_intermediate_size=20480,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "qwen3-30b-a3b": hf.Qwen3MoeConfig(
        num_hidden_layers=48, head_dim=128, norm_topk_prob=True, max_position_embeddings=40960,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "qwen3-235b-a22b": hf.Qwen3MoeConfig(
        num_hidden_layers=94, hidden_size=4096, intermediate_size=12288, num_attention_heads=64,
        moe_intermediate_size=1536, head_dim=128, norm_topk_prob=True,
        max_position_embeddings=40960,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "deepseek-v2": hf.DeepseekV2Config(
        hidden_size=5120, intermediate_size=12288, moe_intermediate_size=1536,
        num_hidden_layers=60, num_attention_heads=128, n_routed_experts=160, n_shared_experts=2,
        num_experts_per_tok=6, first_k_dense_replace=1, n_group=8, topk_group=3,
        topk_method="group_limited_greedy", routed_scaling_factor=16.0,
        max_position_embeddings=163840),
    "deepseek-v2-lite": hf.DeepseekV2Config(
        hidden_size=2048, intermediate_size=10944, moe_intermediate_size=1408,
        num_hidden_layers=27, num_attention_heads=16, q_lora_rank=None, n_routed_experts=64,
        n_shared_experts=2, num_experts_per_tok=6, first_k_dense_replace=1, n_group=1,
        topk_group=1, max_position_embeddings=163840),
    "deepseek-v3": hf.DeepseekV3Config(**_DEEPSEEK),
    "kimi-k2": hf.DeepseekV3Config(**_DEEPSEEK | dict(
        num_attention_heads=64, num_key_value_heads=64, n_routed_experts=384, n_group=1,
        topk_group=1, first_k_dense_replace=1, vocab_size=163840, num_mtp_layers=0,
        routed_scaling_factor=2.827, max_position_embeddings=131072,
        rope_parameters={"rope_type": "yarn", "factor": 32.0, "rope_theta": 50000.0,
                         "original_max_position_embeddings": 4096})),
    "glm-4.5": hf.Glm4MoeConfig(
        hidden_size=5120, intermediate_size=12288, moe_intermediate_size=1536,
        num_hidden_layers=92, head_dim=128, attention_bias=True, n_routed_experts=160,
        first_k_dense_replace=3, use_qk_norm=True, routed_scaling_factor=2.5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6,
                         "partial_rotary_factor": 0.5}),
    "glm-4.5-air": hf.Glm4MoeConfig(
        head_dim=128, attention_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6,
                         "partial_rotary_factor": 0.5}),
    "gpt-oss-20b": hf.GptOssConfig(num_hidden_layers=24, num_local_experts=32),
    "gpt-oss-120b": hf.GptOssConfig(),
    "llama-4-scout": hf.Llama4Config(text_config=hf.Llama4TextConfig(
        **_LLAMA4, max_position_embeddings=10485760)),
    "llama-4-maverick": hf.Llama4Config(text_config=hf.Llama4TextConfig(
        **_LLAMA4 | dict(use_qk_norm=False), interleave_moe_layer_step=2, num_local_experts=128,
        max_position_embeddings=1048576)),
    "olmoe-1b-7b": hf.OlmoeConfig(intermediate_size=1024),
    "granite-3.0-1b-a400m": hf.GraniteMoeConfig(
        hidden_size=1024, intermediate_size=512, num_hidden_layers=24, num_attention_heads=16,
        num_key_value_heads=8, num_local_experts=32, num_experts_per_tok=8, vocab_size=49155,
        tie_word_embeddings=True, max_position_embeddings=4096),
    "granite-3.0-3b-a800m": hf.GraniteMoeConfig(
        hidden_size=1536, intermediate_size=512, num_hidden_layers=32, num_attention_heads=24,
        num_key_value_heads=8, num_local_experts=40, num_experts_per_tok=8, vocab_size=49155,
        tie_word_embeddings=True, max_position_embeddings=4096),
    "llama-2-70b": hf.LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8, rms_norm_eps=1e-5, max_position_embeddings=4096),
    "llama-3-70b": hf.LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
        **_LLAMA3),
    "llama-3-405b": hf.LlamaConfig(
        hidden_size=16384, intermediate_size=53248, num_hidden_layers=126,
        num_attention_heads=128, **_LLAMA3),
    "qwen2.5-7b": hf.Qwen2Config(
        hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4, vocab_size=152064,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "qwen3-8b": hf.Qwen3Config(
        intermediate_size=12288, num_hidden_layers=36, num_key_value_heads=8,
        max_position_embeddings=40960,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "mistral-7b": hf.MistralConfig(
        rms_norm_eps=1e-5, max_position_embeddings=32768),
}

# Class and what a variation may change beside the common sizes, as (key, choices).
_YES_NO = (False, True)
_ROPE = ("rope_parameters", (
    {"rope_type": "default", "rope_theta": 5e5},
    {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0,
     "original_max_position_embeddings": 4096},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}))
_WINDOW = (("use_sliding_window", _YES_NO), ("sliding_window", (512, 4096)),
           ("max_window_layers", (0, 1, 3, 28)))
_LATENT = (("q_lora_rank", (None, 48, 64)), ("kv_lora_rank", (32, 64)),
           ("qk_nope_head_dim", (16, 32)), ("qk_rope_head_dim", (16, 32)),
           ("v_head_dim", (16, 48)), ("n_routed_experts", (8, 16)), ("n_shared_experts", (1, 2)),
           ("num_experts_per_tok", (1, 4)), ("moe_intermediate_size", (48, 64, 65)),
           ("first_k_dense_replace", (0, 1, 2)), ("attention_bias", _YES_NO),
           ("n_group", (1, 4)), ("topk_group", (1,)))
VARIED = {
    "mixtral": (hf.MixtralConfig, ("num_local_experts", (4, 8)), ("num_experts_per_tok", (1, 2)),
                ("head_dim", (None, 32)), ("sliding_window", (None, 512))),
    "qwen2_moe": (hf.Qwen2MoeConfig, ("num_experts", (8, 12)), ("num_experts_per_tok", (1, 4)),
                  ("moe_intermediate_size", (48, 64)),
                  ("shared_expert_intermediate_size", (96, 160)), ("qkv_bias", _YES_NO),
                  ("decoder_sparse_step", (1, 2)), ("mlp_only_layers", ([], [0], [1, 2])),
                  *_WINDOW),
    "qwen3_moe": (hf.Qwen3MoeConfig, ("num_experts", (8, 12)), ("num_experts_per_tok", (1, 4)),
                  ("moe_intermediate_size", (48, 64)), ("head_dim", (32, 64)),
                  ("attention_bias", _YES_NO), ("decoder_sparse_step", (1, 2)),
                  ("mlp_only_layers", ([], [0], [1, 2])), *_WINDOW[:2]),
    "deepseek_v2": (hf.DeepseekV2Config, *_LATENT),
    "deepseek_v3": (hf.DeepseekV3Config, *_LATENT, ("num_mtp_layers", (0, 1, 2))),
    "glm4_moe": (hf.Glm4MoeConfig, ("head_dim", (16, 32)), ("attention_bias", _YES_NO),
                 ("use_qk_norm", _YES_NO), ("n_routed_experts", (8, 16)),
                 ("n_shared_experts", (1, 2)), ("moe_intermediate_size", (48, 64)),
                 ("num_experts_per_tok", (2, 4)), ("first_k_dense_replace", (0, 1, 3)),
                 ("num_mtp_layers", (0, 1))),
    "gpt_oss": (hf.GptOssConfig, ("num_local_experts", (4, 8)), ("num_experts_per_tok", (1, 4)),
                ("head_dim", (16, 64)), ("attention_bias", _YES_NO),
                ("sliding_window", (64, 128))),
    "llama4_text": (hf.Llama4TextConfig, ("num_local_experts", (4, 8)), ("head_dim", (16, 32)),
                    ("intermediate_size_mlp", (160, 192)), ("interleave_moe_layer_step", (1, 2)),
                    ("moe_layers", (None, [0, 2])), ("attention_bias", _YES_NO),
                    ("use_qk_norm", _YES_NO), ("attention_chunk_size", (None, 128))),
    "olmoe": (hf.OlmoeConfig, ("num_experts", (4, 8)), ("num_experts_per_tok", (1, 4)),
              ("attention_bias", _YES_NO), ("clip_qkv", (None, 8.0))),
    "granitemoe": (hf.GraniteMoeConfig, ("num_local_experts", (4, 8)),
                   ("num_experts_per_tok", (1, 4)), ("attention_bias", _YES_NO),
                   ("embedding_multiplier", (1.0, 12.0))),
    "llama": (hf.LlamaConfig, ("attention_bias", _YES_NO), ("mlp_bias", _YES_NO),
              ("head_dim", (None, 32))),
    "qwen2": (hf.Qwen2Config, *_WINDOW),
    "qwen3": (hf.Qwen3Config, ("attention_bias", _YES_NO), ("head_dim", (32, 64)), *_WINDOW),
    "mistral": (hf.MistralConfig, ("head_dim", (None, 32)), ("sliding_window", (None, 512))),
}
_VARIATIONS = 6


def _counts(config: hf.PreTrainedConfig) -> tuple[int, int]:
    """All parameters, and those of one token."""
    text = getattr(config, "text_config", config)
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(text)
    total = sum(parameter.numel() for parameter in model.parameters())
    routed = sum(parameter.numel() for name, parameter in model.named_parameters()
                 if ".experts." in name)
    if routed == 0:
        return total, total
    experts = next(getattr(text, key) for key in ("n_routed_experts", "num_local_experts",
                                                  "num_experts") if hasattr(text, key))
    active = total - routed + Fraction(routed) * text.num_experts_per_tok / experts
    assert active.denominator == 1
    return total, int(active)


def _row(name: str, config: hf.PreTrainedConfig, whole: bool = False) -> dict:
    total, active = _counts(config)
    written = json.loads(config.to_json_string(use_diff=not whole))
    if name == "kimi-k2":
        written["model_type"] = "kimi_k2"
    return {"name": name, "parameters": total, "active": active, "config": written}


def _older(row: dict) -> dict:
    """The same file as transformers 4 wrote it: RoPE at the top, the families' own key names."""
    config = dict(row["config"])
    rope = dict(config.pop("rope_parameters"))
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    partial = rope.pop("partial_rotary_factor", None)
    if partial is not None:
        config["partial_rotary_factor"] = partial
    config["rope_scaling"] = rope | {"type": kind} if kind != "default" else None
    config["torch_dtype"] = "bfloat16"
    config["transformers_version"] = "4.46.0"
    config.pop("layer_types", None)
    if config["model_type"] in ("qwen3_moe", "olmoe") and "num_local_experts" in config:
        config["num_experts"] = config.pop("num_local_experts")
    if config["model_type"].startswith("deepseek") or config["model_type"] == "kimi_k2":
        for key in ("head_dim", "qk_head_dim", "rope_interleave", "output_router_logits"):
            config.pop(key, None)
        config |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "seq_aux": True,
                   "aux_loss_alpha": 0.001, "ep_size": 1, "moe_layer_freq": 1}
    return row | {"name": row["name"] + ", older", "config": config}


def published_rows() -> Iterator[dict]:
    for name, config in PUBLISHED.items():
        yield _row(name, config)


def varied_rows(family: str) -> Iterator[dict]:
    """Small models, drawn with a seed of the family."""
    kind, *choices = VARIED[family]
    draw = random.Random(family)
    for number in range(_VARIATIONS):
        heads = draw.choice((4, 8))
        keys = dict(hidden_size=draw.choice((64, 128)), num_attention_heads=heads,
                    num_key_value_heads=draw.choice((heads, heads // 2)),
                    num_hidden_layers=draw.choice((3, 4, 5)), vocab_size=draw.choice((255, 512)),
                    intermediate_size=draw.choice((96, 112)), max_position_embeddings=8192,
                    tie_word_embeddings=draw.choice(_YES_NO))
        if family.startswith("deepseek"):
            keys["num_key_value_heads"] = heads
        for key, values in (*choices, _ROPE):
            keys[key] = draw.choice(values)
        # One of them with every key of the class, as to_dict() gives them.
        row = _row(f"{family} {number}", kind(**keys), whole=number == 1)
        yield row
        if number == 0:
            yield _older(row)


def files() -> dict[str, list[dict]]:
    """File name -> rows."""
    return {"published": list(published_rows())} | \
        {family: list(varied_rows(family)) for family in VARIED}


def text_of(rows: list[dict]) -> str:
    return "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)


def main() -> int:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, rows in files().items():
        (FOLDER / f"{name}.jsonl").write_text(text_of(rows), encoding="utf-8")
    print(f"{FOLDER}: {len(list(FOLDER.glob('*.jsonl')))} files")
    return 0


if __name__ == "__main__":
    hf.logging.set_verbosity_error()
    sys.exit(main())
