"""Traced steps in the Chrome trace: one process per rank, executed tracks above scheduled ones."""

from typing import Any

from bagualu import report_steps
from bagualu.report_log import RunLog
from bagualu.report_steps import SIDES, TRACKS, Span

_NAMES = {"stages": "comm between stages"}


def step_events(log: RunLog, starts_us: dict[int, float], first_pid: int, named: bool
                ) -> list[dict[str, Any]]:
    """Events of a log's traced steps, executed and scheduled aligned at the step's start.

    starts_us: of the log's steps; first_pid: rank r is process first_pid + r; named: whether the
    processes' names carry the log's label
    """
    tracks = _Tracks(first_pid, f"{log.label}, " if named else "")
    events: list[dict[str, Any]] = []
    for step in log.traced.steps:
        start_us = starts_us.get(step["step"])
        if start_us is None:
            continue
        for rank in step["ranks"]:
            for side in SIDES:
                for lane, span in _in_lanes(list(report_steps.spans(step, rank, side))):
                    at = tracks.place(rank["rank"], side, span.track, lane)
                    events += _span_events(at, span, start_us, f"{side}, step {step['step']}")
    return tracks.names + events


class _Tracks:
    """Processes and threads of the trace; `names` are the events that name those in use."""

    def __init__(self, first_pid: int, prefix: str) -> None:
        self._first_pid, self._prefix = first_pid, prefix
        self._known: set[tuple[int, int]] = set()
        self.names: list[dict[str, Any]] = []

    def place(self, rank: int, side: str, track: str, lane: int) -> dict[str, int]:
        pid = self._first_pid + rank
        # The viewer sorts by this number: all executed tracks first.
        tid = 1 + 1000 * SIDES.index(side) + 100 * TRACKS.index(track) + min(lane, 99)
        if (pid, 0) not in self._known:
            self._name(pid, 0, "process", f"{self._prefix}rank {rank}", pid)
        if (pid, tid) not in self._known:
            more = f" {lane + 1}" if lane else ""
            self._name(pid, tid, "thread", f"{side}: {_NAMES.get(track, track)}{more}", tid)
        return {"pid": pid, "tid": tid}

    def _name(self, pid: int, tid: int, kind: str, name: str, order: int) -> None:
        self._known.add((pid, tid))
        for what, args in (("name", {"name": name}), ("sort_index", {"sort_index": order})):
            self.names.append({"ph": "M", "pid": pid, "tid": tid, "name": f"{kind}_{what}",
                               "args": args})


def _in_lanes(spans: list[Span]) -> list[tuple[int, Span]]:
    """Spans of a track that run side by side get lanes of their own: slices of one must nest."""
    free_ns: dict[str, list[int]] = {}
    placed = []
    for span in sorted(spans, key=lambda s: (s.start_ns, s.end_ns)):
        lanes = free_ns.setdefault(span.track, [])
        lane = next((i for i, end in enumerate(lanes) if end <= span.start_ns), len(lanes))
        lanes[lane:lane + 1] = [span.end_ns]
        placed.append((lane, span))
    return placed


def _span_events(at: dict[str, int], span: Span, start_us: float, side: str
                 ) -> list[dict[str, Any]]:
    begin_us, length_us = start_us + span.start_ns / 1e3, (span.end_ns - span.start_ns) / 1e3
    args: dict[str, Any] = {"stage": span.stage, "microbatch": span.microbatch}
    if span.bytes is not None:
        args = {"bytes": span.bytes, "key": span.key}
    events = [{**at, "ph": "X", "ts": begin_us, "dur": length_us, "name": span.name,
               "cat": span.kind, "args": args}]
    if span.wait_ns:
        events.append({**at, "ph": "X", "ts": begin_us, "dur": span.wait_ns / 1e3, "name": "wait",
                       "cat": "wait"})
    if span.key and span.by in ("send", "post"):
        # An arrow from the sender's slice to the receiver's; the id joins its ends. The last
        # nanosecond is inside a slice, its end is not.
        ends = {"send": {"ph": "s", "ts": begin_us},
                "post": {"ph": "f", "bp": "e", "ts": begin_us + max(0.0, length_us - 1e-3)}}
        events.append({**at, **ends[span.by], "name": "between stages", "cat": "stages",
                       "id": f"{side}, {span.key}"})
    return events
