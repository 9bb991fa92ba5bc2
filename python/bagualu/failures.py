"""From an exception of a rank to what the user reads and the exit code."""

from typing import Any

from bagualu.distributed import FailureNote
from bagualu.errors import EXIT_BAD_INPUT, EXIT_INFEASIBLE, EXIT_JOB_FAILED, BagualuError
from bagualu.units import format_bytes

_OOM_FIELDS = ("microbatch", "layer", "op", "wanted_bytes", "left_bytes", "budget_bytes")


def _is(error: BaseException, name: str) -> bool:
    """By name: the C++ module's exceptions are not ours, and tests use another module."""
    return any(cls.__name__ == name for cls in type(error).__mro__)


def _oom_note(error: BaseException, rank: int, step: int) -> FailureNote:
    oom: dict[str, Any] = {"step": step, "rank": rank}
    oom |= {name: getattr(error, name, None) for name in _OOM_FIELDS}
    text = f"out of memory on rank {rank}, step {step}"
    if oom["wanted_bytes"] is not None:
        if oom["microbatch"] >= 0:
            text += f", micro-batch {oom['microbatch']}, layer {oom['layer']}"
        text += (f", {oom['op']}: wanted "
                 f"{format_bytes(oom['wanted_bytes'])}, left {format_bytes(oom['left_bytes'])} of "
                 f"budget {format_bytes(oom['budget_bytes'])}")
    else:
        text += f": {first_line(error)}"
    return FailureNote(rank, text, EXIT_JOB_FAILED, oom)


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _host_full(error: BaseException) -> bool:
    """The host arena's own exception reaches Python as a RuntimeError."""
    return isinstance(error, RuntimeError) and "host memory full" in str(error)


def is_expected(error: BaseException) -> bool:
    """The cause is this rank itself, and its text says all."""
    return isinstance(error, BagualuError) or _host_full(error) or any(
        _is(error, name) for name in ("OverBudget", "InvalidInput", "Infeasible",
                                      "OutOfMemoryError"))


def is_echo(error: BaseException) -> bool:
    """A collective failed: mostly because another rank ended."""
    return any(_is(error, name) for name in ("PeerLost", "DeadlineExceeded", "DistError"))


def note_of(error: BaseException, rank: int, step: int | None) -> FailureNote:
    """step: the one being computed, None before training began."""
    if isinstance(error, BagualuError):
        return FailureNote(rank, str(error), error.exit_code)
    if _is(error, "OverBudget") or _is(error, "OutOfMemoryError"):
        if step is not None:
            return _oom_note(error, rank, step)
        return FailureNote(rank, "infeasible: the budget does not even hold weights, gradients and "
                           f"optimizer state: {first_line(error)}", EXIT_INFEASIBLE)
    if _host_full(error) and step is None:
        return FailureNote(rank, "infeasible: --host-budget is too small for one copy: "
                           f"{first_line(error)}", EXIT_INFEASIBLE)
    if _is(error, "InvalidInput"):
        return FailureNote(rank, first_line(error), EXIT_BAD_INPUT)
    if _is(error, "Infeasible"):
        return FailureNote(rank, first_line(error), EXIT_INFEASIBLE)
    return FailureNote(rank, f"rank {rank} failed: {type(error).__name__}: {first_line(error)}")
