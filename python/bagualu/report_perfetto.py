"""Run logs as a Chrome trace (JSON) for ui.perfetto.dev or chrome://tracing.

One process per log; thread 0 holds the steps, thread 1 + r belongs to rank r. Steps follow each
other without the pauses between them (checkpoints, validation): a log has durations, not clocks.
Ranks of traced steps are processes of their own (report_perfetto_steps.py).
"""

import json
from typing import Any

from bagualu.report_log import RunLog
from bagualu.report_perfetto_steps import step_events
from bagualu.report_summary import describe_oom, what


def trace_json(logs: list[RunLog]) -> str:
    """The trace as JSON text. Times in microseconds, as the format asks."""
    events: list[dict[str, Any]] = []
    rank_pid = len(logs) + 1
    for pid, log in enumerate(logs, 1):
        starts = _starts_us(log)
        events += _run_events(pid, log, starts)
        events += step_events(log, starts, rank_pid, len(logs) > 1)
        rank_pid += log.run["world_size"]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":"),
                      allow_nan=False)


def _starts_us(log: RunLog) -> dict[int, float]:
    """Of every step. One that is scheduled to take longer than it took gets that room."""
    scheduled = {step["step"]: step["predicted_ns"] for step in log.traced.steps}
    starts, now_us = {}, 0.0
    for step in log.steps:
        starts[step["step"]] = now_us
        now_us += max(step["step_ns"], scheduled.get(step["step"], 0)) / 1e3
    return starts


def _run_events(pid: int, log: RunLog, starts: dict[int, float]) -> list[dict[str, Any]]:
    events = [_name(pid, 0, "process_name", log.label), _name(pid, 0, "thread_name", "steps")]
    ranks = sorted({r["rank"] for s in log.steps for r in s["ranks"]}
                   | {m["rank"] for m in log.mitigations} | {o["rank"] for o in log.ooms})
    events += [_name(pid, 1 + rank, "thread_name", f"rank {rank}") for rank in ranks]
    now_us = 0.0
    for step in log.steps:
        events += _step_events(pid, step, starts[step["step"]])
        now_us = starts[step["step"]] + step["step_ns"] / 1e3
    for record in log.memory:
        start = starts.get(record["step"])
        if start is None:
            continue
        events += [{"ph": "C", "pid": pid, "name": f"live bytes, rank {record['rank']}",
                    "ts": start + p[0] / 1e3, "args": {"bytes": p[1]}} for p in record["points"]]
    for record in log.mitigations:
        events.append({
            "ph": "i", "s": "t", "pid": pid, "tid": 1 + record["rank"],
            "ts": starts.get(record["step"], now_us), "name": f"mitigate step {record['step']}",
            "args": {"what": what(record), "layer": record.get("layer"),
                     "microbatch": record.get("microbatch"),
                     "load_imbalance": record.get("load_imbalance"),
                     "needed_bytes": record.get("needed_bytes"),
                     "cost_ns": record.get("cost_ns")}})
    for oom in log.ooms:
        events.append({"ph": "i", "s": "p", "pid": pid, "tid": 1 + oom["rank"],
                       "ts": starts.get(oom["step"], now_us), "name": "out of memory",
                       "args": {"where": describe_oom(oom),
                                "wanted_bytes": oom.get("wanted_bytes"),
                                "left_bytes": oom.get("left_bytes")}})
    return events


def _step_events(pid: int, step: dict[str, Any], now_us: float) -> list[dict[str, Any]]:
    base = {"ph": "X", "pid": pid, "ts": now_us, "dur": step["step_ns"] / 1e3,
            "name": f"step {step['step']}"}
    events = [dict(base, tid=0, args={"loss": step["loss"], "tokens_per_s": step["tokens_per_s"],
                                      "imbalance": step["imbalance"]})]
    for rank in step["ranks"]:
        args = {key: rank[key] for key in ("peak_bytes", "predicted_peak_bytes", "residencies",
                                           "wait_ns", "comm_ns") if key in rank}
        events.append(dict(base, tid=1 + rank["rank"], args=args))
        events.append({"ph": "C", "pid": pid, "name": f"peak bytes, rank {rank['rank']}",
                       "ts": now_us, "args": {"bytes": rank["peak_bytes"]}})
    return events


def _name(pid: int, tid: int, kind: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": {"name": name}}
