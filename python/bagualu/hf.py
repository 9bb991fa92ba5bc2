"""Hugging Face names and layout of every parameter, and loading from such files.

Mixtral and Qwen3-MoE are named as transformers' save_pretrained writes them; any other model uses
Qwen3-MoE's names plus `mlp.shared_experts`. Every Hugging Face tensor is a run of rows of one of
our parameters, so both directions are plain copies of contiguous views.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from bagualu.errors import InvalidInput
from bagualu.json_file import read_json_object
from bagualu.layout import Layout
from bagualu.model_spec import ModelSpec, hf_family
from bagualu.safetensors_io import WEIGHT_DTYPES, TensorFile

if TYPE_CHECKING:
    import torch

MODEL = "model"
OPTIMIZER = "optimizer"


@dataclass(frozen=True)
class Piece:
    """Tensor `hf` is rows [begin, end) of parameter `native`, of expert `expert` if not None."""

    hf: str
    native: str
    begin: int
    end: int
    expert: int | None = None  # global number
    layer: int | None = None  # None: embedding, final norm, head

    def view(self, tensors: dict[str, "torch.Tensor"], first_expert: int, prefix: str = ""
             ) -> "torch.Tensor":
        tensor = tensors[prefix + self.native]
        if self.expert is not None:
            tensor = tensor[self.expert - first_expert]
        return tensor[self.begin:self.end]


def _gated(hf: str, native: str, width: int, hidden: int, names: tuple[str, str, str],
           expert: int | None = None) -> Iterator[Piece]:
    gate, up, down = names
    yield Piece(f"{hf}.{gate}.weight", f"{native}_fc1", 0, width, expert)
    yield Piece(f"{hf}.{up}.weight", f"{native}_fc1", width, 2 * width, expert)
    yield Piece(f"{hf}.{down}.weight", f"{native}_fc2", 0, hidden, expert)


def _attention(spec: ModelSpec, hf: str, native: str) -> Iterator[Piece]:
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    yield Piece(f"{hf}.input_layernorm.weight", f"{native}.attn_norm", 0, spec.hidden)
    yield Piece(f"{hf}.self_attn.q_proj.weight", f"{native}.qkv", 0, q)
    yield Piece(f"{hf}.self_attn.k_proj.weight", f"{native}.qkv", q, q + kv)
    yield Piece(f"{hf}.self_attn.v_proj.weight", f"{native}.qkv", q + kv, q + 2 * kv)
    if spec.qk_norm:
        yield Piece(f"{hf}.self_attn.q_norm.weight", f"{native}.q_norm", 0, spec.head_dim)
        yield Piece(f"{hf}.self_attn.k_norm.weight", f"{native}.k_norm", 0, spec.head_dim)
    yield Piece(f"{hf}.self_attn.o_proj.weight", f"{native}.attn_proj", 0, spec.hidden)
    yield Piece(f"{hf}.post_attention_layernorm.weight", f"{native}.mlp_norm", 0, spec.hidden)


def _mlp(spec: ModelSpec, layer: int, hf: str, native: str) -> Iterator[Piece]:
    mixtral = hf_family(spec) == "mixtral"
    names = ("gate_proj", "up_proj", "down_proj")
    if not spec.is_moe(layer):
        yield from _gated(f"{hf}.mlp", f"{native}.mlp", spec.dense_ffn, spec.hidden, names)
        return
    block = f"{hf}.block_sparse_moe" if mixtral else f"{hf}.mlp"
    yield Piece(f"{block}.gate.weight", f"{native}.router", 0, spec.experts)
    for expert in range(spec.experts):
        yield from _gated(f"{block}.experts.{expert}", f"{native}.expert", spec.expert_ffn,
                          spec.hidden, ("w1", "w3", "w2") if mixtral else names, expert)
    if spec.shared_ffn:
        yield from _gated(f"{block}.shared_experts", f"{native}.shared", spec.shared_ffn,
                          spec.hidden, names)


def pieces(spec: ModelSpec) -> Iterator[Piece]:
    """Every tensor of the model, in order of execution."""
    yield Piece("model.embed_tokens.weight", "embed_tokens", 0, spec.vocab)
    for layer in range(spec.layers):
        hf, native = f"model.layers.{layer}", f"layers.{layer}"
        for piece in (*_attention(spec, hf, native), *_mlp(spec, layer, hf, native)):
            yield replace(piece, layer=layer)
    yield Piece("model.norm.weight", "final_norm", 0, spec.hidden)
    if not spec.tied_embeddings:
        yield Piece("lm_head.weight", "lm_head", 0, spec.vocab)


@dataclass(frozen=True)
class Shard:
    """What a rank holds: experts [first, first + count) of its layers, and its layers' rest."""

    first: int
    count: int
    layers: frozenset[int]
    embedding: bool = True
    head: bool = True  # final norm and output matrix
    tied_copy: bool = False  # of the embedding, beside a head that is tied to it

    @staticmethod
    def of(spec: ModelSpec, layout: Layout, rank: int) -> "Shard":
        count = spec.experts // layout.ep
        return Shard(layout.ep_rank(rank) * count, count, frozenset(layout.layers_of(rank)),
                     layout.has_embedding(rank), layout.has_head(rank),
                     spec.tied_embeddings and layout.has_head(rank)
                     and not layout.has_embedding(rank))

    @staticmethod
    def whole(spec: ModelSpec) -> "Shard":
        return Shard(0, spec.experts, frozenset(range(spec.layers)))

    def holds(self, piece: Piece) -> bool:
        if piece.layer is None:
            if piece.native == "embed_tokens":
                return self.embedding or self.tied_copy
            return self.head
        return piece.layer in self.layers and (
            piece.expert is None or self.first <= piece.expert < self.first + self.count)


class TensorFolder:
    """All tensors of `stem`.safetensors, or of the shards that its index lists."""

    def __init__(self, folder: Path, stem: str = MODEL) -> None:
        self.folder = folder
        single = folder / f"{stem}.safetensors"
        index = folder / f"{stem}.safetensors.index.json"
        self._files: dict[str, TensorFile] = {}
        if index.is_file():
            weight_map = read_json_object(index).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise InvalidInput(index, "weight_map", json.dumps(weight_map)[:80],
                                   "an object: tensor name to file name")
            opened: dict[str, TensorFile] = {}
            for name, file in weight_map.items():
                if not isinstance(file, str) or Path(file).name != file:
                    raise InvalidInput(index, name, json.dumps(file), "a file of this folder")
                if file not in opened:
                    opened[file] = TensorFile(folder / file)
                if name not in opened[file]:
                    raise InvalidInput(folder / file, name, "no such tensor", f"as {index} says")
                self._files[name] = opened[file]
        else:
            whole = TensorFile(single)
            self._files = dict.fromkeys(whole.names(), whole)

    def check(self, spec: ModelSpec, prefixes: Iterable[str] = ("",)) -> None:
        """Throws InvalidInput naming the tensor that is missing, unknown or of another shape."""
        known: set[str] = set()
        for prefix in prefixes:
            for piece in pieces(spec):
                name = prefix + piece.hf
                known.add(name)
                if name not in self._files:
                    raise InvalidInput(self.folder, name, "no such tensor", "one for this model")
                file, wanted = self._files[name], shape_of(spec, piece)
                if file.shape(name) != wanted:
                    raise InvalidInput(file.path, name, list(file.shape(name)),
                                       f"{list(wanted)}, the shape in this model")
                if file.dtype(name) not in WEIGHT_DTYPES:
                    raise InvalidInput(file.path, name, file.dtype(name), ", ".join(WEIGHT_DTYPES))
        for name in self._files:
            copy = spec.tied_embeddings and name.endswith("lm_head.weight")
            if name not in known and not copy and not name.endswith("rotary_emb.inv_freq"):
                raise InvalidInput(self._files[name].path, name, "an unknown tensor",
                                   "the tensors of this model only")

    def copy_into(self, tensors: dict[str, "torch.Tensor"], spec: ModelSpec, shard: Shard,
                  prefix: str = "") -> None:
        """Requires: check() passed. Fills this rank's tensors, converting the type if needed."""
        for piece in pieces(spec):
            if shard.holds(piece):
                source = self._files[prefix + piece.hf].tensor(prefix + piece.hf)
                piece.view(tensors, shard.first, prefix).copy_(source)


def shape_of(spec: ModelSpec, piece: Piece) -> tuple[int, ...]:
    """Shape of the Hugging Face tensor."""
    kind = piece.native.rsplit(".", 1)[-1]
    if kind.endswith("norm"):
        return (piece.end - piece.begin,)
    columns = {"attn_proj": spec.heads * spec.head_dim, "expert_fc2": spec.expert_ffn,
               "shared_fc2": spec.shared_ffn, "mlp_fc2": spec.dense_ffn}
    return (piece.end - piece.begin, columns.get(kind, spec.hidden))
