"""Traced steps of a run (docs/formats.md, Step trace): as executed, and as their lists predict.

The program replays the traces (`bagualu schedule --replay`); here it is asked, and its answer cut
into what pages draw. Times are ns from the step's first start.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bagualu.run_log import trace_file

SIDES = ("executed", "scheduled")
HEADER = ("step", "rank", "time, predicted", "prediction off", "compute", "communication", "hidden",
          "exposed", "copies", "hidden", "exposed")
TRACKS = ("compute", "comm", "stages", "d2h", "h2d")
_TIMEOUT_S = 300  # a replay takes ms; reading hundreds of MB of traces does not
# What the compute thread does in an action, its waiting aside.
_KINDS = {"forward": "forward", "forward_end": "forward", "backward": "backward",
          "backward_end": "backward", "input_grad": "backward", "weight_grad": "weight gradient",
          "recompute": "rebuild", "encode": "rebuild", "decode": "rebuild",
          "post": "messages", "receive": "messages", "send": "messages", "sent": "messages"}


@dataclass
class TracedSteps:
    """The program's answer. `note` says why there is none, or what is missing; "" = nothing."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    median_error_fraction: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Span:
    """One thing on a track. kind: colour; by: the action of the compute thread that issued it."""

    track: str
    kind: str
    name: str
    start_ns: int
    wait_ns: int  # at its start, of the compute thread
    end_ns: int
    stage: int = -1
    microbatch: int = -1
    bytes: int | None = None
    key: str = ""
    by: str = ""


def find_program() -> str | None:
    """The bagualu program of this source tree or Python, else of PATH."""
    root = Path(__file__).resolve().parents[2]
    places = [root / folder / "bin" / "bagualu" for folder in ("build", "build-core")]
    places.append(Path(sys.executable).with_name("bagualu"))
    return next((found for place in (*places, "bagualu") if (found := shutil.which(place))), None)


def read_steps(log: Path, run: dict[str, Any], program: str | None = None) -> TracedSteps:
    """The traces beside a log. A log is of use without them, so what is wrong is a note."""
    wanted = run.get("trace_step")
    if not wanted:
        return TracedSteps()
    files = [path for rank in range(run["world_size"]) if (path := trace_file(log, rank)).is_file()]
    if not files:
        return TracedSteps(note=f"no step trace {trace_file(log, 0).name} beside the log")
    program = program or find_program()
    if program is None:
        return TracedSteps(note="step traces left out: no program bagualu to replay them with")
    try:
        done = subprocess.run([program, "schedule", "--replay", *map(str, files), "--json", "-"],
                              capture_output=True, timeout=_TIMEOUT_S, check=False)
        if done.returncode != 0:
            reason = done.stderr.decode("utf-8", "replace").strip()
            return TracedSteps(note=f"step traces left out: {reason}")
        answer = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        return TracedSteps(note=f"step traces left out: {program}: {error}")
    left_out = [str(step) for step in answer["left_out_steps"] if step in wanted]
    note = f"traces of step(s) {', '.join(left_out)} are not whole" if left_out else ""
    return TracedSteps(answer["steps"], answer["median_error_fraction"], note)


def off_fraction(step: dict[str, Any]) -> float:
    """Of the measured time: 0.02 = the prediction is 2 % too long."""
    return step["predicted_ns"] / step["measured_ns"] - 1 if step["measured_ns"] else 0.0


def spans(step: dict[str, Any], rank: dict[str, Any], side: str) -> Iterator[Span]:
    """What a rank did in a step, or was to do. side: one of SIDES.

    A receive between stages is posted long before anybody sends: it counts from its sending.
    """
    for event in rank["events"]:
        start, wait, end = event[side]
        yield Span("compute", _KINDS.get(event["action"], "other"),
                   f"{event['action']} {event['name']}".rstrip(), start, wait, end, event["stage"],
                   event["microbatch"])
    sent = {transfer["key"]: transfer[side][0] for other in step["ranks"]
            for transfer in other["transfers"] if transfer["issued_by"] == "send"}
    for transfer in rank["transfers"]:
        by, key = transfer["issued_by"], transfer["key"]
        start, end = transfer[side]
        if by == "post":
            start = min(end, max(start, sent.get(key, start)))
        track = "stages" if by in ("send", "post") else transfer["stream"]
        kind = "copy" if transfer["stream"] != "comm" else "communication"
        yield Span(track, kind, transfer["name"], start, 0, end, bytes=transfer["bytes"], key=key,
                   by=by)


def _both(rank: dict[str, Any], part: str, whole: str) -> str:
    """A share, executed and scheduled."""
    texts = []
    for side in SIDES:
        total = rank[side]
        span = total["end_ns"] - total["start_ns"] if whole == "span" else total[whole]
        texts.append(f"{total[part] / span:.1%}" if span else "-")
    return " / ".join(texts)


def _ms(executed_ns: int, scheduled_ns: int) -> str:
    return f"{executed_ns / 1e6:,.1f} / {scheduled_ns / 1e6:,.1f} ms"


def rows(steps: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Cells under HEADER, executed / scheduled: the step as a whole, then by rank.

    Hidden: of the time that transfers are under way, what runs beside compute. Exposed: waits for
    them, of the rank's time.
    """
    lines = []
    for step in steps:
        lines.append((str(step["step"]), "all", _ms(step["measured_ns"], step["predicted_ns"]),
                      f"{off_fraction(step):+.1%}") + ("",) * 7)
        for rank in step["ranks"]:
            done, planned = (rank[side] for side in SIDES)
            lines.append((
                "", str(rank["rank"]),
                _ms(*(side["end_ns"] - side["start_ns"] for side in (done, planned))), "",
                _both(rank, "compute_ns", "span"), _ms(done["comm_ns"], planned["comm_ns"]),
                _both(rank, "comm_beside_ns", "comm_ns"), _both(rank, "comm_wait_ns", "span"),
                _ms(done["copy_ns"], planned["copy_ns"]),
                _both(rank, "copy_beside_ns", "copy_ns"), _both(rank, "copy_wait_ns", "span")))
    return lines


def text_lines(traced: TracedSteps) -> list[str]:
    """For a terminal, indented."""
    lines = [f"  step {step['step']}: {step['measured_ns'] / 1e6:,.1f} ms, predicted "
             f"{step['predicted_ns'] / 1e6:,.1f} ms ({off_fraction(step):+.1%})"
             for step in traced.steps]
    if len(lines) > 1:
        lines.append(f"  prediction off by {traced.median_error_fraction:.1%}, median of "
                     f"{len(lines)} steps")
    return lines
