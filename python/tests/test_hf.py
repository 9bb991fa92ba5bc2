"""Safetensors and Hugging Face names, against the safetensors package and transformers."""

import json
import logging

import numpy as np
import pytest
import torch
from fake_site import fake_runtime
from safetensors.torch import load_file, save_file

from bagualu import hf
from bagualu.errors import InvalidInput
from bagualu.json_file import write_synced
from bagualu.layout import make_layout
from bagualu.model_spec import ModelSpec, hf_family, model_from_file, to_hf_config
from bagualu.safetensors_io import TensorFile, write_tensors

SIZES = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 256,
         "experts": 4, "top_k": 2, "expert_ffn": 16}
SPECS = {
    "mixtral": ModelSpec(**SIZES),
    "qwen3_moe": ModelSpec(**SIZES, qk_norm=True, norm_topk_prob=False, dense_layers=[1],
                           dense_ffn=48),
    "tied": ModelSpec(**SIZES, tied_embeddings=True),
    "native": ModelSpec(**SIZES, shared_ffn=16, dense_layers=[0], dense_ffn=32),
}


def random_tensors(spec, experts=None):
    generator = torch.Generator().manual_seed(1)
    shapes = fake_runtime._shapes(json.loads(spec.to_json()), experts or spec.experts)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def save(folder, spec, tensors):
    folder.mkdir(exist_ok=True)
    write_tensors(folder / "model.safetensors",
                  [(p.hf, p.view(tensors, 0).numpy()) for p in hf.pieces(spec)])
    if hf_family(spec):
        write_synced(folder / "config.json", json.dumps(to_hf_config(spec, 64)).encode())
    else:
        write_synced(folder / "config.json", spec.to_json().encode())


def transformers_class(family):
    transformers = pytest.importorskip("transformers")
    return {"mixtral": transformers.MixtralForCausalLM,
            "qwen3_moe": transformers.Qwen3MoeForCausalLM}[family]


@pytest.mark.parametrize("family", SPECS)
def test_pieces_cover_every_element_once(family):
    spec = SPECS[family]
    covered = {name: torch.zeros_like(t) for name, t in random_tensors(spec).items()}
    for piece in hf.pieces(spec):
        view = piece.view(covered, 0)
        assert tuple(view.shape) == hf.shape_of(spec, piece) and view.is_contiguous()
        view += 1
    assert all(bool((t == 1).all()) for t in covered.values())


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "tied"])
def test_transformers_loads_what_we_save(tmp_path, name, caplog):
    spec, tensors = SPECS[name], random_tensors(SPECS[name])
    family = hf_family(spec)
    save(tmp_path, spec, tensors)
    with caplog.at_level(logging.WARNING, logger="transformers"):
        model, info = transformers_class(family).from_pretrained(
            tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    model.save_pretrained(tmp_path / "again")
    ours, theirs = (load_file(d / "model.safetensors") for d in (tmp_path, tmp_path / "again"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    again = model_from_file(tmp_path / "again" / "config.json")
    for key in ("name", "family"):
        setattr(again, key, getattr(spec, key))
    assert again == spec


def test_a_tied_head_in_a_file_is_not_read(tmp_path):
    spec = SPECS["tied"]
    tensors = random_tensors(spec)
    assert "lm_head" not in tensors
    named = [(p.hf, p.view(tensors, 0).numpy()) for p in hf.pieces(spec)]
    write_tensors(tmp_path / "model.safetensors",
                  named + [("lm_head.weight", tensors["embed_tokens"].numpy())])
    folder = hf.TensorFolder(tmp_path)
    folder.check(spec)
    loaded = {name: torch.zeros_like(t) for name, t in tensors.items()}
    folder.copy_into(loaded, spec, hf.Shard.whole(spec))
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("shard_size", ["5GB", "20KB"])
def test_we_load_what_transformers_saves(tmp_path, family, shard_size):
    spec = SPECS[family]
    save(tmp_path / "config", spec, random_tensors(spec))
    cls = transformers_class(family)
    model = cls(cls.config_class.from_pretrained(tmp_path / "config"))
    model.save_pretrained(tmp_path / "hf", max_shard_size=shard_size)
    read = model_from_file(tmp_path / "hf" / "config.json")
    folder = hf.TensorFolder(tmp_path / "hf")
    folder.check(read)
    for rank in range(2):  # each of two expert-parallel ranks gets its half
        shard = hf.Shard.of(read, make_layout(read.layers, 2, ep=2), rank)
        tensors = random_tensors(read, experts=2)
        folder.copy_into(tensors, read, shard)
        state = model.state_dict()
        experts = state["model.layers.0.mlp.experts.gate_up_proj"]
        assert torch.equal(tensors["layers.0.expert_fc1"], experts[2 * rank:2 * rank + 2])
        assert torch.equal(tensors["layers.1.qkv"][:64],
                           state["model.layers.1.self_attn.q_proj.weight"])
        assert torch.equal(tensors["lm_head"], state["lm_head.weight"])


def test_bf16_files_become_fp32(tmp_path):
    save_file({"x": torch.tensor([1.5, -2.0], dtype=torch.bfloat16)}, tmp_path / "a.safetensors")
    out = torch.zeros(2)
    out.copy_(TensorFile(tmp_path / "a.safetensors").tensor("x"))
    assert out.tolist() == [1.5, -2.0]


def test_writer_against_the_package(tmp_path):
    arrays = {"a": np.arange(6, dtype="float32").reshape(2, 3), "b": np.zeros((0, 4), "float32"),
              "c": np.array([1, 2], "int64"), "d": np.array([0.5], "float64")}
    entry = write_tensors(tmp_path / "a.safetensors", list(arrays.items()))
    assert entry["bytes"] == (tmp_path / "a.safetensors").stat().st_size
    found = load_file(tmp_path / "a.safetensors")
    assert all(np.array_equal(found[name].numpy(), array) for name, array in arrays.items())
    assert TensorFile(tmp_path / "a.safetensors").tensor("b").shape == (0, 4)


def damaged(kind, good):
    header = int.from_bytes(good[:8], "little")
    return {"empty": b"", "short": good[:5], "no data": good[:-4], "cut header": good[:20],
            "extra data": good + b"1234", "huge header": b"\xff" * 8 + good[8:],
            "not JSON": good[:8] + b"x" * header + good[8 + header:],
            "pickle": b"\x80\x04\x95" + good, "not an object": (2).to_bytes(8, "little") + b"[]",
            }[kind]


@pytest.mark.parametrize("kind", ["empty", "short", "no data", "cut header", "extra data",
                                  "huge header", "not JSON", "pickle", "not an object"])
def test_damaged_file_is_named(tmp_path, kind):
    path = tmp_path / "model.safetensors"
    write_tensors(path, [("a", np.ones((2, 2), "float32"))])
    path.write_bytes(damaged(kind, path.read_bytes()))
    with pytest.raises(InvalidInput, match="model.safetensors"):
        TensorFile(path)


@pytest.mark.parametrize("entry", [
    {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]},
    {"dtype": "F31", "shape": [2], "data_offsets": [0, 8]},
    {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]},
    {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]},
    {"dtype": "F32", "shape": [2], "data_offsets": [0.0, 8.0]},
    {"dtype": "F32", "shape": [2]}, "text"])
def test_header_that_lies(tmp_path, entry):
    text = json.dumps({"a": entry}).encode()
    path = tmp_path / "m.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 8)
    with pytest.raises(InvalidInput, match="a: found"):
        TensorFile(path)


def test_other_shape_names_tensor_found_and_expected(tmp_path):
    save(tmp_path, SPECS["mixtral"], random_tensors(SPECS["mixtral"]))
    wider = ModelSpec(**SIZES | {"expert_ffn": 32})
    with pytest.raises(InvalidInput, match=r"w1.weight: found \[16, 32\]; allowed \[32, 32\]"):
        hf.TensorFolder(tmp_path).check(wider)
    with pytest.raises(InvalidInput, match="no such tensor"):
        hf.TensorFolder(tmp_path).check(ModelSpec(**SIZES | {"layers": 3}))
    with pytest.raises(InvalidInput, match="unknown tensor"):
        hf.TensorFolder(tmp_path).check(ModelSpec(**SIZES | {"layers": 1}))


@pytest.mark.parametrize("weight_map", [{}, None, {"a": "../x.safetensors"}, {"a": 3}])
def test_bad_index(tmp_path, weight_map):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(InvalidInput, match="index.json"):
        hf.TensorFolder(tmp_path)
