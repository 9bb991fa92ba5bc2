"""Checkpoints: Hugging Face safetensors, optimizer moments and JSON; never pickle.

A folder step-000123 is written as step-000123.tmp-NONCE, fsynced, and renamed; then `latest` is
replaced. So a process killed at any moment leaves `latest` naming a whole checkpoint. Of every
pipeline rank, each rank of the first expert-parallel group writes the experts it holds, the first
of them the rest of its stages. Names are those of the whole model; a reader takes the tensors it
needs from whatever shards there are, so the layout may change on resume.
"""

import hashlib
import json
import os
import re
import secrets
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bagualu import __version__
from bagualu.distributed import Comm
from bagualu.errors import InvalidInput
from bagualu.hf import MODEL, OPTIMIZER, Shard, TensorFolder, pieces
from bagualu.json_file import lock, read_json_object, sync_directory, write_atomic, write_synced
from bagualu.layout import Layout
from bagualu.model_spec import ModelSpec, hf_family, model_from_dict, to_hf_config
from bagualu.safetensors_io import TensorFile, file_digest, write_tensors

if TYPE_CHECKING:
    import torch

FORMAT_VERSION = 1
MOMENTS = ("exp_avg.", "exp_avg_sq.")
_STATE = "state.json"
_TENSORS = "state.safetensors"
_FOLDER = re.compile(r"step-(\d{6,})(?:-\d+)?")


@dataclass
class Position:
    """Where a run stands besides its weights."""

    step: int  # steps done; the next one to run
    seed: int
    domain_slots: int
    world_size: int
    ep_size: int
    flags: dict[str, Any]  # train_args.resumed_values
    pp_size: int = 1

    @property
    def dp_size(self) -> int:
        return self.world_size // self.pp_size


@dataclass
class Loaded:
    """A checkpoint whose structure was checked; tensors are read later."""

    path: Path
    spec: ModelSpec
    position: Position
    files: dict[str, dict[str, Any]]

    def history(self) -> tuple[list[float], list[float]]:
        """Losses and gradient norms of all steps so far."""
        file = TensorFile(self.path / _TENSORS)
        return file.numpy("losses").tolist(), file.numpy("grad_norms").tolist()


def _array(tensor: "torch.Tensor") -> np.ndarray:
    array: np.ndarray = tensor.detach().cpu().contiguous().numpy()
    return array


def _shard_tensors(stem: str, trainer: Any, spec: ModelSpec, shard: Shard, with_dense: bool
                   ) -> list[tuple[str, np.ndarray]]:
    tensors = trainer.parameters() if stem == MODEL else trainer.optimizer_state()
    prefixes = ("",) if stem == MODEL else MOMENTS
    shard = replace(shard, tied_copy=False)  # the first stage writes the original
    return [(prefix + piece.hf, _array(piece.view(tensors, shard.first, prefix)))
            for prefix in prefixes for piece in pieces(spec)
            if shard.holds(piece) and (with_dense or piece.expert is not None)]


def _shard_name(stem: str, index: int, count: int) -> str:
    return f"{stem}.safetensors" if count == 1 else \
        f"{stem}-{index + 1:05}-of-{count:05}.safetensors"


def _write_shards(folder: Path, trainer: Any, spec: ModelSpec, layout: Layout, rank: int
                  ) -> dict[str, Any]:
    """This rank's files and router biases; {} of a rank whose tensors another one writes.

    {"files": ..., "tensors": {stem: {tensor: [file, bytes]}}, "buffers": {name: floats}}.
    """
    if layout.dp_rank(rank) >= layout.ep:
        return {}
    written: dict[str, Any] = {"files": {}, "tensors": {MODEL: {}, OPTIMIZER: {}}, "buffers": {}}
    shard, first = Shard.of(spec, layout, rank), layout.dp_rank(rank) == 0
    index = layout.pp_rank(rank) * layout.ep + layout.ep_rank(rank)
    for stem in (MODEL, OPTIMIZER):
        tensors = _shard_tensors(stem, trainer, spec, shard, with_dense=first)
        if tensors:
            file = _shard_name(stem, index, layout.pp * layout.ep)
            written["files"][file] = write_tensors(folder / file, tensors)
            written["tensors"][stem] = {name: [file, array.nbytes] for name, array in tensors}
    if first:  # fp32 values are exact as JSON numbers
        written["buffers"] = {name: _array(t).tolist() for name, t in trainer.buffers().items()}
    return written


def _write_json(path: Path, value: dict[str, Any]) -> dict[str, Any]:
    """As write_tensors."""
    data = json.dumps(value, indent=1).encode()
    write_synced(path, data)
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _write_rest(folder: Path, parts: list[dict[str, Any]], spec: ModelSpec, position: Position,
                history: tuple[list[float], list[float]]) -> None:
    files: dict[str, Any] = {}
    buffers: dict[str, Any] = {}
    for part in parts:
        files |= part["files"]
        buffers |= part["buffers"]
    arrays = [(name, np.array(values, "float32")) for name, values in sorted(buffers.items())]
    arrays += [("losses", np.array(history[0], "float64")),
               ("grad_norms", np.array(history[1], "float64"))]
    files[_TENSORS] = write_tensors(folder / _TENSORS, arrays)
    if len(parts) > 1:
        for stem in (MODEL, OPTIMIZER):
            merged = {name: place for part in parts
                      for name, place in part["tensors"][stem].items()}
            index = {"metadata": {"total_size": sum(size for _, size in merged.values())},
                     "weight_map": {name: file for name, (file, _) in sorted(merged.items())}}
            name = f"{stem}.safetensors.index.json"
            files[name] = _write_json(folder / name, index)
    config = to_hf_config(spec, int(position.flags["seq"])) if hf_family(spec) else \
        spec.to_dict()
    files["config.json"] = _write_json(folder / "config.json", config)
    state = {"version": FORMAT_VERSION, "bagualu": __version__, **asdict(position),
             "model": spec.to_dict(), "rng": "counter-based: (seed, step, micro-batch, layer)",
             "data_position": position.step, "files": files}
    write_synced(folder / _STATE, json.dumps(state, indent=1).encode())
    sync_directory(folder)


def _free_name(root: Path, step: int) -> str:
    """A run resumed from an older step meets its own later folders; those stay until pruned."""
    names = [f"step-{step:06}"] + [f"step-{step:06}-{n}" for n in range(2, 10_000)]
    return next(name for name in names if not (root / name).exists())


def _publish(root: Path, beside: Path, step: int, keep: int) -> Path:
    final = root / _free_name(root, step)
    os.rename(beside, final)
    sync_directory(root)
    write_atomic(root / "latest", final.name.encode() + b"\n")
    found = [p for p in root.iterdir() if _FOLDER.fullmatch(p.name) and p != final]
    found.sort(key=lambda p: p.stat().st_mtime_ns)
    for old in found[:max(0, len(found) - (keep - 1))]:
        shutil.rmtree(old)
    return final


def _disk_error(root: Path, text: str) -> InvalidInput:
    return InvalidInput(root, "checkpoint", text, "a folder with room for the checkpoint; "
                        "nothing was left half-written")


def save(root: Path, trainer: Any, spec: ModelSpec, layout: Layout, position: Position,
         history: tuple[list[float], list[float]], comm: Comm, keep: int) -> Path:
    """Collective. Throws InvalidInput on every rank if any could not write (disk full)."""
    beside, error = Path(), ""
    if comm.rank == 0:
        beside = root / f"step-{position.step:06}.tmp-{secrets.token_hex(4)}"
        try:
            root.mkdir(parents=True, exist_ok=True)
            for stale in root.glob("step-*.tmp-*"):  # of a killed run
                shutil.rmtree(stale, ignore_errors=True)
            for stale in root.glob(".latest.tmp-*"):
                stale.unlink()
            beside.mkdir()
        except OSError as failure:
            error = failure.strerror or str(failure)
    beside = Path(comm.broadcast(str(beside)))
    mine: dict[str, Any] = {}
    if not error:
        try:
            mine = _write_shards(beside, trainer, spec, layout, comm.rank)
        except OSError as failure:
            error = failure.strerror or str(failure)
    answers = [json.loads(text) for text in comm.gather(json.dumps({"error": error, **mine}))]
    outcome = {"error": error, "path": ""}
    if comm.rank == 0:
        outcome["error"] = next((a["error"] for a in answers if a["error"]), "")
        try:
            if not outcome["error"]:
                parts = [a for a in answers if "files" in a]
                _write_rest(beside, parts, spec, position, history)
                outcome["path"] = str(_publish(root, beside, position.step, keep))
        except OSError as failure:
            outcome["error"] = failure.strerror or str(failure)
        if outcome["error"]:
            shutil.rmtree(beside, ignore_errors=True)
    outcome = json.loads(comm.broadcast(json.dumps(outcome)))
    if outcome["error"]:
        raise _disk_error(root, outcome["error"])
    return Path(outcome["path"])


def claim(root: Path) -> int:
    """Makes the folder and locks it for this run; the descriptor that holds the lock.

    Two runs in one folder would remove each other's checkpoints. Throws InvalidInput.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise InvalidInput(root, "checkpoint", error.strerror,
                           "a folder that can be written") from None
    try:
        lock(descriptor, root, "checkpoint")
    except InvalidInput:
        os.close(descriptor)
        raise
    return descriptor


def find(path: Path) -> Path:
    """The checkpoint itself, or the one that `latest` in this folder names."""
    if (path / _STATE).is_file():
        return path
    pointer = path / "latest"
    try:
        name = pointer.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        raise InvalidInput(path, "checkpoint", "neither state.json nor latest",
                           "a checkpoint folder or a folder of checkpoints") from None
    if not _FOLDER.fullmatch(name):
        raise InvalidInput(pointer, "text", repr(name)[:60], "the name of a step folder")
    return path / name


def load(path: Path, verify_data: bool) -> Loaded:
    """Checks version, structure, sizes and shapes; with verify_data also every file's digest.

    Throws InvalidInput naming the file. Loads no torch.
    """
    path = find(path)
    where = path / _STATE
    state = read_json_object(where)
    if state.get("version") != FORMAT_VERSION:
        raise InvalidInput(where, "version", json.dumps(state.get("version")), str(FORMAT_VERSION))
    try:
        position = Position(**{key: state[key] for key in Position.__annotations__
                               if key in state or key != "pp_size"})  # older ones have none
        files: dict[str, dict[str, Any]] = dict(state["files"])
        sizes = {name: int(entry["bytes"]) for name, entry in files.items()}
        numbers = (position.step, position.seed, position.domain_slots, position.world_size,
                   position.ep_size, position.pp_size)
        if not all(type(n) is int and n >= 0 for n in numbers):
            raise ValueError("a negative or fractional number")
        if position.pp_size < 1 or position.world_size % position.pp_size:
            raise ValueError("world_size is no multiple of pp_size")
        if not isinstance(position.flags, dict) or not isinstance(state["model"], dict):
            raise ValueError("flags or model is not an object")
        for key in ("seq", "micro_batches", "micro_batch_size"):
            if type(position.flags[key]) is not int or position.flags[key] < 1:
                raise ValueError(f"flags.{key} is not a count")
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise InvalidInput(where, "contents", error, "a state.json of this version") from None
    for name, size in sizes.items():
        file = path / name
        found = file.stat().st_size if Path(name).name == name and file.is_file() else -1
        if found != size:
            raise InvalidInput(file, "size", f"{found} bytes" if found >= 0 else "no file",
                               f"{size} bytes")
        if verify_data and file_digest(file) != files[name].get("sha256"):
            raise InvalidInput(file, "contents", "another SHA-256 than state.json has",
                               "an unchanged file")
    loaded = Loaded(path, model_from_dict(state["model"], str(where)), position, files)
    TensorFolder(path, MODEL).check(loaded.spec)
    TensorFolder(path, OPTIMIZER).check(loaded.spec, MOMENTS)
    if not {"losses", "grad_norms"} <= set(TensorFile(path / _TENSORS).names()):
        raise InvalidInput(path / _TENSORS, "losses", "no such tensor", "losses and grad_norms")
    return loaded


def _restore_buffers(path: Path, trainer: Any) -> None:
    file = TensorFile(path / _TENSORS)
    for name, tensor in trainer.buffers().items():
        if name not in file or file.shape(name) != tuple(tensor.shape):
            raise InvalidInput(file.path, name, "nothing of its shape", str(list(tensor.shape)))
        tensor.copy_(file.tensor(name))


def restore(loaded: Loaded, trainer: Any, shard: Shard) -> None:
    """Weights, moments and router biases into a trainer of any layout."""
    restore_weights(loaded.path, trainer, loaded.spec, shard)
    moments = TensorFolder(loaded.path, OPTIMIZER)
    for prefix in MOMENTS:
        moments.copy_into(trainer.optimizer_state(), loaded.spec, shard, prefix)
    trainer.parameters_changed()


def restore_weights(path: Path, trainer: Any, spec: ModelSpec, shard: Shard) -> None:
    """Weights, and router biases where the folder has them (a Hugging Face folder has none)."""
    folder = TensorFolder(path, MODEL)
    folder.check(spec)
    folder.copy_into(trainer.parameters(), spec, shard)
    if (path / _TENSORS).is_file():
        _restore_buffers(path, trainer)
    trainer.parameters_changed()
