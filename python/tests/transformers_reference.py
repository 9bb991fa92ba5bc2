"""Models of transformers beside ours: the same weights, and gradients under our names.

Weights and gradients cross over in files, as save_pretrained writes them and bagualu.hf reads them,
so these tests cover the names and layout of both families too.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    logging,
)

from bagualu.hf import Shard, TensorFolder, pieces
from bagualu.model_spec import ModelSpec, model_from_file
from bagualu.runtime_module import lone_trainer

logging.disable_progress_bar()

VOCAB = 128
BATCH, SEQ = 4, 32
_COMMON = {"vocab_size": VOCAB, "hidden_size": 64, "num_attention_heads": 4,
           "num_key_value_heads": 2, "num_experts_per_tok": 2, "max_position_embeddings": SEQ}
_QWEN3 = _COMMON | {"head_dim": 32, "num_experts": 8, "intermediate_size": 96,
                    "moe_intermediate_size": 48}

# Every branch of the two families: both normalisations of gate values, dense layers from
# decoder_sparse_step and from mlp_only_layers, widths that are no multiple of a cache line.
CONFIGS = {
    "mixtral": MixtralConfig(**_COMMON, intermediate_size=80, num_local_experts=8,
                             num_hidden_layers=3),
    "qwen3_moe": Qwen3MoeConfig(**_QWEN3, num_hidden_layers=2, norm_topk_prob=True),
    "qwen3_moe_dense": Qwen3MoeConfig(**_QWEN3, num_hidden_layers=4, norm_topk_prob=False,
                                      decoder_sparse_step=2, mlp_only_layers=[3]),
}


def make_reference(name, experts="eager", attention="sdpa"):
    """A model with random weights, norms included, large enough that routing has no ties."""
    config = CONFIGS[name]
    kind = MixtralForCausalLM if config.model_type == "mixtral" else Qwen3MoeForCausalLM
    config._attn_implementation = attention
    config._experts_implementation = experts
    model = kind(config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            std = 0.5 if ".gate." in key or "norm" in key else 0.1
            parameter.normal_(1.0 if "norm" in key else 0.0, std, generator=generator)
    return model


def random_tokens(sequences=BATCH, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (sequences, SEQ + 1), generator=generator)


def cross_entropy(model, tokens):
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1),
                                             tokens[:, 1:].flatten())


def save(model, folder):
    model.save_pretrained(folder)
    return Path(folder)


def spec_of(folder, **changes):
    spec = model_from_file(Path(folder) / "config.json")
    return ModelSpec(**vars(spec) | changes)


def copy_into(folder, spec, tensors):
    """Requires: `tensors` are the whole model's, by our names."""
    files = TensorFolder(Path(folder))
    files.check(spec)
    files.copy_into(tensors, spec, Shard.whole(spec))


def reference_gradients(model, folder, spec, like):
    """The gradients of `model`, in tensors shaped as those of `like` (one rank's)."""
    with torch.no_grad():
        saved = [p.clone() for p in model.parameters()]
        for parameter in model.parameters():
            # an expert that saw no token has none in the eager implementation
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None
                            else parameter.grad)
        save(model, folder)
        for parameter, value in zip(model.parameters(), saved, strict=True):
            parameter.copy_(value)
    gradients = {name: torch.full_like(tensor, torch.nan) for name, tensor in like.items()}
    copy_into(folder, spec, gradients)
    return gradients


@dataclass
class Worst:
    """The tensor that is furthest from its reference."""

    name: str
    difference: float


def worst_difference(found, wanted):
    """max |found - wanted| / max |wanted| of every tensor, and the largest of these."""
    assert found.keys() == wanted.keys()
    worst = Worst("", -1.0)
    for name, reference in wanted.items():
        scale = reference.abs().max().item()
        assert scale > 0.0, f"{name}: the reference is zero"
        difference = (found[name] - reference).abs().max().item() / scale
        if not difference <= worst.difference:  # a NaN is the worst
            worst = Worst(name, difference)
    return worst


def trainer_for(folder, spec, **options):
    """One rank with the weights of `folder`."""
    defaults = {"micro_batch_size": BATCH, "seq": SEQ, "chunk_rows": 24}
    trainer = lone_trainer(spec, **defaults | options)
    copy_into(folder, spec, trainer.parameters())
    trainer.parameters_changed()
    return trainer


def step(trainer, tokens, number=0, lr=0.0):
    """tokens [sequences, S + 1], cut into micro-batches of BATCH."""
    shaped = tokens.reshape(-1, min(BATCH, len(tokens)), SEQ + 1)
    return json.loads(trainer.step(shaped, number, lr))


def every_tensor(spec):
    """Our names of all parameters that a file must fill."""
    return {piece.native for piece in pieces(spec)}
