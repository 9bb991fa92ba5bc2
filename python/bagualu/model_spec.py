"""ModelSpec for Python: the native JSON schema and Hugging Face's config.json.

The C++ room model/ is the authority; this copy exists because bad input must be found before torch
and the C++ module are loaded. `to_json` gives what `_runtime.Trainer` takes.
"""

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from bagualu.errors import InvalidInput
from bagualu.json_file import read_json_object

_FAMILIES = ("native", "mixtral", "qwen3_moe")
_MAX_DIMENSION = 2**31 - 1
_SCHEMA_VERSION = 1


@dataclass
class ModelSpec:
    """Fields as bagualu/model/model_spec.h; dense_layers in place of moe_layer, as in the file."""

    name: str = ""
    family: str = "native"
    layers: int = 0
    hidden: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    vocab: int = 0
    dense_ffn: int = 0
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    dense_layers: list[int] = field(default_factory=list)
    qk_norm: bool = False
    norm_topk_prob: bool = True
    tied_embeddings: bool = False  # the head multiplies by the embedding's matrix
    rms_eps: float = 1e-6
    rope_theta: float = 10000.0
    dropout: float = 0.0
    aux_loss_coef: float = 0.0
    z_loss_coef: float = 0.0
    router_bias_rate: float = 0.0

    def is_moe(self, layer: int) -> bool:
        return layer not in self.dense_layers

    def moe_layers(self) -> list[int]:
        return [layer for layer in range(self.layers) if self.is_moe(layer)]

    def to_dict(self) -> dict[str, Any]:
        """The native schema."""
        return {"version": _SCHEMA_VERSION, **asdict(self)}

    def to_json(self) -> str:
        return json.dumps(self.to_dict())


_REQUIRED = ("layers", "hidden", "heads", "kv_heads", "head_dim", "vocab", "experts", "top_k",
             "expert_ffn")
_OPTIONAL_SIZES = ("dense_ffn", "shared_ffn")
# Keys of models that `bagualu plan` knows and the runtime does not, with what they stand for.
_PLANNED_ONLY = dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim",
                               "qk_rope_head_dim", "v_head_dim"), "latent attention (MLA)") | {
    "layer_norm": "LayerNorm",
    "qkv_bias": "biases of attention", "attn_out_bias": "biases of attention",
    "mlp_bias": "biases of MLPs", "router_bias": "a trained bias of the router",
    "qk_norm_full_width": "a query norm over all heads",
    "qk_norm_weightless": "a query norm without weights", "attn_sinks": "attention sinks",
    "shared_gate": "a gate on the shared expert", "mtp_layers": "multi-token prediction",
    "learned_positions": "learned positions", "attention_window": "windowed attention",
    "windowed_layers": "windowed attention",
}
_PLANNED_ONLY_WHY = "such models are planned for, the runtime has no operators for them"
_PLANNED_ONLY_RULE = f"none: {_PLANNED_ONLY_WHY}"
_FLOATS = {"rms_eps": (0.0, 1.0), "rope_theta": (1.0, 1e12), "dropout": (0.0, 1.0),
           "aux_loss_coef": (0.0, 1e6), "z_loss_coef": (0.0, 1e6), "router_bias_rate": (0.0, 1e6)}


def _integer(value: Any, where: str, key: str, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise InvalidInput(where, key, json.dumps(value), f"an integer from {low} to {high}")
    return value


def _number(value: Any, where: str, key: str, low: float, high: float) -> float:
    if type(value) not in (int, float) or not low <= value <= high:
        raise InvalidInput(where, key, json.dumps(value), f"a number from {low:g} to {high:g}")
    return float(value)


def validate(spec: ModelSpec, where: str) -> None:
    """Throws InvalidInput if a field is out of range or fields contradict each other."""
    for key in _REQUIRED:
        _integer(getattr(spec, key), where, key, 1, _MAX_DIMENSION)
    for key in _OPTIONAL_SIZES:
        _integer(getattr(spec, key), where, key, 0, _MAX_DIMENSION)
    for key, (low, high) in _FLOATS.items():
        _number(getattr(spec, key), where, key, low, high)
    for key in ("qk_norm", "norm_topk_prob", "tied_embeddings"):
        if type(getattr(spec, key)) is not bool:
            raise InvalidInput(where, key, json.dumps(getattr(spec, key)), "true or false")
    if spec.family not in _FAMILIES:
        raise InvalidInput(where, "family", spec.family,
                           f"{', '.join(_FAMILIES)}; {_PLANNED_ONLY_WHY}")
    if spec.top_k > spec.experts:
        raise InvalidInput(where, "top_k", spec.top_k, f"at most experts ({spec.experts})")
    if spec.heads % spec.kv_heads:
        raise InvalidInput(where, "heads", spec.heads, f"a multiple of kv_heads ({spec.kv_heads})")
    for key in ("hidden", "head_dim", "expert_ffn", *_OPTIONAL_SIZES):
        if getattr(spec, key) % 16:
            raise InvalidInput(where, key, getattr(spec, key), "a multiple of 16")
    if spec.rms_eps in (0.0, 1.0):
        raise InvalidInput(where, "rms_eps", spec.rms_eps, "a number between 0 and 1")
    if spec.dropout >= 1.0:
        raise InvalidInput(where, "dropout", spec.dropout, "at least 0 and below 1")
    _validate_layers(spec, where)
    if spec.family != "native" and hf_family(spec) != spec.family:
        raise InvalidInput(where, "family", spec.family, "native for a model of this shape")


def _validate_layers(spec: ModelSpec, where: str) -> None:
    if not isinstance(spec.dense_layers, list):
        raise InvalidInput(where, "dense_layers", json.dumps(spec.dense_layers), "a list")
    for layer in spec.dense_layers:
        _integer(layer, where, "dense_layers", 0, spec.layers - 1)
    if len(set(spec.dense_layers)) != len(spec.dense_layers):
        raise InvalidInput(where, "dense_layers", spec.dense_layers, "each layer once")
    if len(spec.dense_layers) == spec.layers:
        raise InvalidInput(where, "dense_layers", "every layer", "at least one layer with experts")
    if bool(spec.dense_layers) != (spec.dense_ffn > 0):
        raise InvalidInput(where, "dense_ffn", spec.dense_ffn,
                           "above 0 if and only if there are dense layers")


def model_from_dict(value: dict[str, Any], where: str) -> ModelSpec:
    """The native schema. Unknown and missing keys are errors; `version`, if there, must be 1."""
    value = dict(value)
    version = value.pop("version", _SCHEMA_VERSION)
    if version != _SCHEMA_VERSION:
        raise InvalidInput(where, "version", json.dumps(version), str(_SCHEMA_VERSION))
    for key, feature in _PLANNED_ONLY.items():
        if value.pop(key, 0) not in (0, None, False, []):
            raise InvalidInput(where, key, feature, _PLANNED_ONLY_RULE)
    if value.pop("gated_mlp", True) is not True:
        raise InvalidInput(where, "gated_mlp", "MLPs that are not gated", _PLANNED_ONLY_RULE)
    if value.get("experts") == 0:
        raise InvalidInput(where, "experts", "a model without experts", _PLANNED_ONLY_RULE)
    known = {entry.name for entry in fields(ModelSpec)}
    for key in value:
        if key not in known:
            raise InvalidInput(where, key, "an unknown key", ", ".join(sorted(known)))
    for key in _REQUIRED:
        if key not in value:
            raise InvalidInput(where, key, "nothing", "an integer above 0")
    spec = ModelSpec(**value)
    validate(spec, where)
    return spec


# Keys of a Hugging Face config that change the mathematics, with the only values implemented.
_HF_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",), "attention_bias": (False, None), "attention_dropout": (0, 0.0, None),
    "router_jitter_noise": (0, 0.0, None),
}


def _refuse_window(config: dict[str, Any], where: str) -> None:
    """A window as long as the positions is none."""
    window = config.get("sliding_window")
    if window is None or not config.get("use_sliding_window", True):
        return
    positions = config.get("max_position_embeddings")
    if type(window) is not int or type(positions) is not int or window < positions:
        raise InvalidInput(where, "sliding_window", json.dumps(window),
                           "null, or at least max_position_embeddings")


def _hf_rope_theta(config: dict[str, Any], where: str, default: float) -> float:
    theta = config.get("rope_theta", default)
    for key in ("rope_parameters", "rope_scaling"):
        rope = config.get(key)
        if rope is None:
            continue
        if not isinstance(rope, dict) or \
                rope.get("rope_type", rope.get("type", "default")) != "default" or \
                rope.get("partial_rotary_factor", 1) != 1:
            raise InvalidInput(where, key, json.dumps(rope), "rope_type default")
        theta = rope.get("rope_theta", theta)
    return _number(theta, where, "rope_theta", 1.0, 1e12)


def _hf_common(config: dict[str, Any], where: str, need: Any, rms_eps: float) -> dict[str, Any]:
    heads = need("num_attention_heads")
    head_dim = config.get("head_dim")
    if head_dim is None:
        if need("hidden_size") % heads:
            raise InvalidInput(where, "num_attention_heads", heads, "a divisor of hidden_size")
        head_dim = need("hidden_size") // heads
    coefficient = 0.0
    if config.get("output_router_logits"):  # as in transformers: no logits, no balancing loss
        coefficient = config.get("router_aux_loss_coef", 0.001)
    return {"layers": need("num_hidden_layers"), "hidden": need("hidden_size"), "heads": heads,
            "kv_heads": need("num_key_value_heads", "num_attention_heads"), "head_dim": head_dim,
            "vocab": need("vocab_size"), "top_k": need("num_experts_per_tok"),
            "rms_eps": config.get("rms_norm_eps", rms_eps), "aux_loss_coef": coefficient,
            "tied_embeddings": config.get("tie_word_embeddings") or False}


def model_from_hf_config(config: dict[str, Any], where: str) -> ModelSpec:
    """Mixtral and Qwen3-MoE. Throws InvalidInput where the config asks for other mathematics."""
    family = config.get("model_type")
    if family not in ("mixtral", "qwen3_moe"):
        raise InvalidInput(where, "model_type", json.dumps(family), "mixtral, qwen3_moe")
    for key, allowed in _HF_FIXED.items():
        if key in config and config[key] not in allowed:
            raise InvalidInput(where, key, json.dumps(config[key]), json.dumps(allowed[0]))

    def need(*keys: str) -> int:
        for key in keys:
            if config.get(key) is not None:
                return _integer(config[key], where, key, 1, _MAX_DIMENSION)
        raise InvalidInput(where, keys[0], "nothing", "an integer above 0")

    # Absent keys mean the defaults of transformers' class, which differ by family.
    common = _hf_common(config, where, need, 1e-5 if family == "mixtral" else 1e-6)
    _refuse_window(config, where)
    if family == "mixtral":
        spec = ModelSpec(**common, name="mixtral", family=family,
                         experts=need("num_local_experts"), expert_ffn=need("intermediate_size"),
                         norm_topk_prob=True, rope_theta=_hf_rope_theta(config, where, 1e6))
    else:
        sparse_step = config.get("decoder_sparse_step", 1)
        only_dense = config.get("mlp_only_layers") or []
        _integer(sparse_step, where, "decoder_sparse_step", 1, _MAX_DIMENSION)
        if not isinstance(only_dense, list):
            raise InvalidInput(where, "mlp_only_layers", json.dumps(only_dense), "a list")
        dense = [i for i in range(common["layers"])
                 if i in only_dense or (i + 1) % sparse_step != 0]
        spec = ModelSpec(**common, name="qwen3_moe", family=family, dense_layers=dense,
                         dense_ffn=need("intermediate_size") if dense else 0,
                         experts=need("num_local_experts", "num_experts"),
                         expert_ffn=need("moe_intermediate_size"), qk_norm=True,
                         norm_topk_prob=config.get("norm_topk_prob", False),
                         rope_theta=_hf_rope_theta(config, where, 1e4))
    validate(spec, where)
    return spec


def hf_family(spec: ModelSpec) -> str | None:
    """The family of transformers that can load this model, or None."""
    if spec.shared_ffn:
        return None
    if spec.qk_norm:
        return "qwen3_moe"
    return "mixtral" if not spec.dense_layers and spec.norm_topk_prob else None


def to_hf_config(spec: ModelSpec, max_positions: int) -> dict[str, Any]:
    """Requires: hf_family(spec) is not None."""
    family = hf_family(spec)
    config: dict[str, Any] = {
        "model_type": family, "dtype": "float32", "hidden_act": "silu",
        "vocab_size": spec.vocab, "hidden_size": spec.hidden,
        "num_hidden_layers": spec.layers, "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads, "head_dim": spec.head_dim,
        "num_local_experts": spec.experts, "num_experts_per_tok": spec.top_k,
        "rms_norm_eps": spec.rms_eps, "max_position_embeddings": max_positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta},
        "router_aux_loss_coef": spec.aux_loss_coef,
        "output_router_logits": spec.aux_loss_coef > 0,
        "tie_word_embeddings": spec.tied_embeddings, "attention_dropout": 0.0, "sliding_window": None,
        "bos_token_id": None, "eos_token_id": None,
    }
    if family == "mixtral":
        config |= {"architectures": ["MixtralForCausalLM"], "intermediate_size": spec.expert_ffn}
    else:
        config |= {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": spec.experts,
                   "moe_intermediate_size": spec.expert_ffn,
                   "intermediate_size": spec.dense_ffn or spec.expert_ffn,
                   "mlp_only_layers": spec.dense_layers, "decoder_sparse_step": 1,
                   "norm_topk_prob": spec.norm_topk_prob, "attention_bias": False}
    return config


def model_from_file(path: Path) -> ModelSpec:
    """Reads a native or a Hugging Face file; "model_type" in it makes the difference."""
    value = read_json_object(path)
    if "model_type" in value:
        return model_from_hf_config(value, str(path))
    return model_from_dict(value, str(path))


def model_folders() -> list[Path]:
    """Where named models are looked for: package data, then configs/models of a source tree."""
    here = Path(__file__).resolve().parent
    return [here / "configs" / "models", here.parents[1] / "configs" / "models"]


def resolve_model(name: str) -> ModelSpec:
    """NAME of configs/models or a path. Throws InvalidInput listing the known names."""
    path = Path(name)
    if path.suffix == ".json" or path.is_file() or "/" in name:
        return model_from_file(path)
    for folder in model_folders():
        if (folder / f"{name}.json").is_file():
            return model_from_file(folder / f"{name}.json")
    known = sorted({p.stem for folder in model_folders() for p in folder.glob("*.json")})
    raise InvalidInput("command line", "--model", name,
                       "a JSON file or one of: " + (", ".join(known) or "(none installed)"))
