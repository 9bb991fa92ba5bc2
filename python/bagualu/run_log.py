"""The run log (JSON lines, docs/formats.md) and the summary that ends it. Rank 0 only."""

import contextlib
import hashlib
import json
import math
import os
import sys
from array import array
from io import FileIO
from pathlib import Path
from typing import Any

from bagualu import __version__
from bagualu.errors import InvalidInput
from bagualu.json_file import lock, write_atomic

LOG_VERSION = 1
SPIKE_IMBALANCE = 1.2  # rows of the hottest rank over the mean
_KEPT_ON_RESUME = ("run", "start", "step", "mitigation", "memory", "validation", "checkpoint")
# Keys of Trainer.step's answer that speak of the job and not of the rank.
_GLOBAL_KEYS = ("loss", "grad_norm", "aux_loss", "z_loss", "imbalance", "mitigations", "stop",
                "repeated",
                "memory")
# Of step.ranks, where there are several stages or pairs of passes; the summary has their sums.
PIPELINE_FIELDS = ("overlapped_segments", "serialised_segments", "deferred_passes",
                   "undeferred_passes", "compute_ns", "comm_ns", "comm_beside_ns", "comm_wait_ns",
                   "copy_ns", "copy_beside_ns", "copy_wait_ns", "p2p_wait_ns", "bubble_ns")


def trace_file(log: str | Path, rank: int) -> Path:
    """Where a rank writes the steps of --trace-step: run.jsonl's are run.trace-0.jsonl and so on."""
    path = Path(log)
    return path.with_name(f"{path.stem}.trace-{rank}.jsonl")


def check_writable(path: Path) -> None:
    """Throws InvalidInput; leaves no file behind that was not there."""
    try:
        existed = path.exists()
        if path.is_fifo():  # opening one waits for a reader
            raise InvalidInput(path, "file", "a pipe", "a file that can be written")
        with open(path, "ab", buffering=0) as file:
            lock(file.fileno(), path, "file")
        if not existed:
            path.unlink()
    except OSError as error:
        raise InvalidInput(path, "file", error.strerror, "a file that can be written") from None


def _keep_until(path: Path, first_step: int) -> None:
    """Drops what a resumed run will write again, and a half line that a kill left."""
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
            kind, step = record["type"], record.get("step", -1)
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
        # A checkpoint's step is the number of steps done, so that of first_step stays.
        last = first_step if kind == "checkpoint" else first_step - 1
        if kind in _KEPT_ON_RESUME and step <= last:
            kept.append(line + "\n")
    write_atomic(path, "".join(kept).encode())


def _finite(value: Any) -> Any:
    """JSON has no NaN or infinity: they become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


class RunLog:
    """One JSON object per line, written whole or not at all. Without a path, records go nowhere.

    Owns: the file, locked against a second run that would write into it.
    """

    def __init__(self, path: Path | None, run: dict[str, Any], first_step: int) -> None:
        """Throws InvalidInput if the file is another run's or cannot be written."""
        self._file: FileIO | None = None
        if path is None:
            return
        self._path = path
        resumed = first_step > 0 and path.is_file()
        try:
            if resumed:
                with self._open():
                    _keep_until(path, first_step)
            self._file = self._open()
            resumed = resumed and path.stat().st_size > 0
            if not resumed and path.is_file():
                self._file.truncate(0)
        except OSError as error:
            raise InvalidInput(path, "log", error.strerror, "a file that can be written") from None
        if not resumed:
            self.write("run", version=LOG_VERSION, bagualu=__version__, **run)

    def _open(self) -> FileIO:
        file = open(self._path, "ab", buffering=0)
        lock(file.fileno(), self._path, "log")
        return file

    @property
    def on(self) -> bool:
        return self._file is not None

    def write(self, kind: str, **fields: Any) -> None:
        """Throws InvalidInput, once, if the disk is full; later records go nowhere."""
        if self._file is None:
            return
        data = memoryview(json.dumps(_finite({"type": kind, **fields})).encode() + b"\n")
        whole = os.fstat(self._file.fileno()).st_size
        try:
            while data:
                data = data[self._file.write(data):]
        except OSError as error:
            with contextlib.suppress(OSError):  # a device has no length
                self._file.truncate(whole)
            self._file.close()
            self._file = None
            raise InvalidInput(self._path, "log", error.strerror, "a disk with room for the log; "
                               "its records so far are whole") from None

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # a device cannot be synced
                os.fsync(self._file.fileno())
            self._file.close()
            self._file = None


def step_record(step: int, answers: list[dict[str, Any]], lr: float, domains: list[str],
                tokens: int, step_ns: int) -> dict[str, Any]:
    """The "step" line. answers: Trainer.step's, by rank."""
    first = answers[0]
    # A rank knows the imbalance of its own stages' layers; the others' are 1.
    imbalance = [max(layer) for layer in zip(*(answer["imbalance"] for answer in answers))]
    ranks = [{key: value for key, value in answer.items() if key not in _GLOBAL_KEYS}
             for answer in answers]
    return {"step": step, "loss": first["loss"], "lr": lr, "grad_norm": first["grad_norm"],
            "aux_loss": first["aux_loss"], "z_loss": first["z_loss"], "domain": domains,
            "tokens": tokens, "step_ns": step_ns, "tokens_per_s": tokens * 1e9 / step_ns,
            "imbalance": imbalance, "spike": any(x > SPIKE_IMBALANCE for x in imbalance),
            "repeated": first.get("repeated", False), "ranks": ranks}


def _digest(values: list[float]) -> str:
    """SHA-256 over little-endian float64 bytes."""
    doubles = array("d", values)
    if sys.byteorder == "big":
        doubles.byteswap()
    return hashlib.sha256(doubles.tobytes()).hexdigest()


def _quantile(sorted_values: list[int], fraction: float) -> int:
    """Nearest rank, as the report's percentile(); 0 where there is nothing."""
    if not sorted_values:
        return 0
    return sorted_values[max(0, math.ceil(fraction * len(sorted_values)) - 1)]


class Totals:
    """What the summary needs from all steps. history: losses and grad norms before this start."""

    def __init__(self, world: int, history: tuple[list[float], list[float]]) -> None:
        self.losses, self.grad_norms = array("d", history[0]), array("d", history[1])
        self.step_peaks = array("q")
        self.peaks, self.predicted = [0] * world, [0] * world
        self.spikes = 0
        self._step_ns: list[int] = []
        self._decisions = array("q")
        self._per_step_max = self._hits = self._recomputed = self._offloaded = self._tokens = 0
        self._pipeline: dict[str, list[int]] = {}

    def add(self, record: dict[str, Any]) -> None:
        self.losses.append(record["loss"])
        self.grad_norms.append(record["grad_norm"])
        self.spikes += record["spike"]
        self._tokens = record["tokens"]
        self._step_ns.append(record["step_ns"])
        for rank, entry in enumerate(record["ranks"]):
            self.peaks[rank] = max(self.peaks[rank], entry["peak_bytes"])
            self.predicted[rank] = max(self.predicted[rank], entry["predicted_peak_bytes"])
            decisions = entry.get("decision_ns", [])
            self._decisions.extend(decisions)
            self._per_step_max = max(self._per_step_max, sum(decisions))
            self._hits += entry.get("cache_hits", 0)
            self._recomputed += entry.get("bytes_recomputed", 0)
            self._offloaded += entry.get("bytes_offloaded", 0)
            if "compute_ns" in entry and len(self._step_ns) > 1:  # the first step warms caches
                self._add_pipeline(rank, entry)
        self.step_peaks.append(max(entry["peak_bytes"] for entry in record["ranks"]))

    def _add_pipeline(self, rank: int, entry: dict[str, Any]) -> None:
        for name in PIPELINE_FIELDS:
            if name in entry:
                self._pipeline.setdefault(name, [0] * len(self.peaks))[rank] += entry[name]

    def summary(self, policy: str, budget_bytes: int | None, oom: bool) -> dict[str, Any]:
        """The fields of docs/formats.md. Rates leave the first step out: it warms caches."""
        times = self._step_ns[1:] or self._step_ns
        decisions = sorted(self._decisions)
        return {
            "policy": policy, "world_size": len(self.peaks),
            "steps_completed": len(self.losses), "oom_count": int(oom), "restarts": 0,
            "tokens_per_s": self._tokens * 1e9 * len(times) / sum(times) if times else 0.0,
            "budget_bytes": budget_bytes, "peak_bytes": self.peaks,
            "predicted_peak_bytes": self.predicted,
            "loss_first": self.losses[0] if self.losses else None,
            "loss_last": self.losses[-1] if self.losses else None,
            "loss_digest": _digest(list(self.losses)),
            "grad_digest": _digest(list(self.grad_norms)),
            "spikes": self.spikes + int(oom), "spikes_survived": self.spikes,
            "decision_ns": {"p50": _quantile(decisions, 0.5), "p99": _quantile(decisions, 0.99),
                            "max": decisions[-1] if decisions else 0,
                            "total_per_step_max": self._per_step_max},
            "plan_cache_hit_fraction": self._hits / len(decisions) if decisions else 0.0,
            "bytes_recomputed": self._recomputed, "bytes_offloaded": self._offloaded,
            **({"pipeline": self._pipeline} if self._pipeline else {}),
        }
