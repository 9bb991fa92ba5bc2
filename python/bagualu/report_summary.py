"""What a report says of each run in numbers: one RunSummary per log, and the same as plain text."""

import math
from dataclasses import dataclass
from typing import Any

from bagualu import report_pipeline, report_steps
from bagualu.report_log import RunLog

MIB = 1024 * 1024
_MAX_LINES = 20  # mitigations that the text lists per run


@dataclass(frozen=True)
class RunSummary:
    """One row of the comparison. `losses_equal` is text: it says how far the comparison reaches.

    Units: *_bytes int, *_ns nanoseconds. None where the log does not tell.
    """

    label: str
    policy: str
    file: str
    finished: bool
    outcome: str
    oom_at: str
    steps_completed: int
    steps_planned: int
    tokens_per_s: float | None
    peak_bytes: int | None
    budget_bytes: int | None
    losses_equal: str
    loss_last: float | None
    spike_steps: int
    mitigations: int
    decision_p50_ns: float | None
    decision_p99_ns: float | None
    decision_max_ns: float | None
    plan_cache_hit_fraction: float | None  # None: a policy that never searches
    notes: tuple[str, ...]


def format_mib(value: float | None) -> str:
    """ "96.0 MiB", or "-" for None."""
    return "-" if value is None else f"{value / MIB:,.1f} MiB"


def format_ms(ns: float | None) -> str:
    """ "1.25 ms", in microseconds below a millisecond, or "-" for None."""
    if ns is None:
        return "-"
    return f"{ns / 1e6:,.2f} ms" if ns >= 1e6 else f"{ns / 1e3:,.1f} us"


def percentile(values: list[float], fraction: float) -> float | None:
    """Nearest-rank percentile: a value that really occurred; None for no values."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)]


def hottest_rank(step: dict[str, Any]) -> dict[str, Any] | None:
    """The rank entry with the highest peak, the lowest rank on a tie."""
    return max(step["ranks"], key=lambda r: (r["peak_bytes"], -r["rank"]), default=None)


def primary(logs: list[RunLog]) -> RunLog:
    """The run that the page describes in detail: the one that mitigated most, else the longest."""
    return max(logs, key=lambda log: (len(log.mitigations), log.run["policy"] == "adaptive",
                                      len(log.steps)))


def reference(logs: list[RunLog]) -> RunLog:
    """The run whose losses the others must repeat: without a budget if there is one, complete."""
    return max(logs, key=lambda log: (_complete(log), log.run["budget_bytes"] is None,
                                      len(log.steps)))


def summarise(logs: list[RunLog]) -> list[RunSummary]:
    """One row per log, in the order given."""
    base = reference(logs) if len(logs) > 1 else None
    return [_summarise(log, base) for log in logs]


def describe_oom(oom: dict[str, Any]) -> str:
    """ "step 20, rank 2, layer 3 expert_fc1" as far as the record tells."""
    text = f"step {oom['step']}, rank {oom['rank']}"
    if oom.get("layer") is not None:
        text += f", layer {oom['layer']}"
    return f"{text} {oom['op']}" if oom.get("op") else text


def _complete(log: RunLog) -> bool:
    return log.summary is not None and log.summary["steps_completed"] >= log.run["steps"]


def _summarise(log: RunLog, base: RunLog | None) -> RunSummary:
    summary = log.summary or {}
    completed = summary.get("steps_completed", len(log.steps))
    decision = summary.get("decision_ns") or {}
    ranks = [rank for step in log.steps for rank in step["ranks"]]
    measured = [ns for rank in ranks for ns in rank.get("decision_ns") or []]
    peaks = [rank["peak_bytes"] for rank in ranks]
    peaks += [int(value) for value in summary.get("peak_bytes") or []]
    losses = [step["loss"] for step in log.steps if step["loss"] is not None]
    spikes = sum(1 for step in log.steps if step.get("spike"))
    return RunSummary(
        label=log.label, policy=log.run["policy"], file=str(log.path), finished=_complete(log),
        outcome=_outcome(log, completed),
        oom_at=describe_oom(log.ooms[0]) if log.ooms else "",
        steps_completed=completed, steps_planned=log.run["steps"],
        tokens_per_s=_tokens_per_s(log), peak_bytes=max(peaks, default=None),
        budget_bytes=log.run["budget_bytes"], losses_equal=_compare(log, base) if base else "-",
        loss_last=losses[-1] if losses else None, spike_steps=spikes,
        mitigations=len(log.mitigations),
        decision_p50_ns=decision.get("p50", percentile(measured, 0.50)),
        decision_p99_ns=decision.get("p99", percentile(measured, 0.99)),
        decision_max_ns=decision.get("max", max(measured, default=None)),
        plan_cache_hit_fraction=_hit_fraction(log, ranks, len(measured)), notes=_notes(log))


def _hit_fraction(log: RunLog, ranks: list[dict[str, Any]], decisions: int) -> float | None:
    """Decisions that needed no search, of all. Only adaptive searches during a run."""
    if log.run["policy"] != "adaptive":
        return None
    stated = (log.summary or {}).get("plan_cache_hit_fraction")
    if stated is not None or not decisions:
        return stated
    return sum(rank.get("cache_hits") or 0 for rank in ranks) / decisions


def _outcome(log: RunLog, completed: int) -> str:
    planned = log.run["steps"]
    if _complete(log):
        return f"yes, {completed} steps"
    if log.ooms:
        return f"no, out of memory after {completed} of {planned}"
    if log.summary is not None:
        return f"no, stopped after {completed} of {planned}"
    return f"no, log ends after {completed} of {planned}"


def _tokens_per_s(log: RunLog) -> float | None:
    stated = (log.summary or {}).get("tokens_per_s")
    if stated is not None:
        return stated
    total_ns = sum(step["step_ns"] for step in log.steps)
    tokens = sum(step.get("tokens") or 0 for step in log.steps)
    return tokens / (total_ns / 1e9) if total_ns > 0 and tokens else None


def _compare(log: RunLog, base: RunLog) -> str:
    """Digests where both runs are complete, else the losses of the steps both have."""
    if log is base:
        return "reference"
    mine, other = log.summary or {}, base.summary or {}
    if _complete(log) and _complete(base) and mine.get("loss_digest") and other.get("loss_digest"):
        return "equal" if mine["loss_digest"] == other["loss_digest"] else "different"
    theirs = {step["step"]: step["loss"] for step in base.steps}
    common = [step for step in log.steps if step["step"] in theirs]
    if not common:
        return "-"
    for step in common:
        if step["loss"] != theirs[step["step"]]:
            return f"different from step {step['step']}"
    return f"equal to step {common[-1]['step']}"


def _notes(log: RunLog) -> tuple[str, ...]:
    notes = []
    if log.torn_lines:
        notes.append(f"{log.torn_lines} torn line(s) left out")
    if log.ignored_records:
        notes.append(f"{log.ignored_records} record(s) of unknown type left out")
    if log.resumes:
        notes.append(f"resumed {log.resumes} time(s)")
    if log.summary is None:
        notes.append("no summary: the run was cut off or is still going")
    if log.traced.note:
        notes.append(log.traced.note)
    return tuple(notes)


def peak_of_budget(row: RunSummary) -> str:
    """ "94.1 MiB of 96.0 MiB (98.0 %)", or the peak alone without a budget."""
    if row.peak_bytes is None:
        return "-"
    if row.budget_bytes is None:
        return f"{format_mib(row.peak_bytes)}, no limit"
    fraction = row.peak_bytes / row.budget_bytes if row.budget_bytes else 0.0
    return f"{format_mib(row.peak_bytes)} of {format_mib(row.budget_bytes)} ({fraction:.1%})"


COMPARISON_HEADER = ("policy", "finished?", "OOM at", "tokens/s", "peak / budget",
                     "losses equal?")


def comparison_cells(row: RunSummary) -> tuple[str, ...]:
    """The cells under COMPARISON_HEADER."""
    speed = "-" if row.tokens_per_s is None else f"{row.tokens_per_s:,.0f}"
    return (row.label, row.outcome, row.oom_at or "-", speed, peak_of_budget(row),
            row.losses_equal)


def headline(log: RunLog, row: RunSummary) -> str:
    """One sentence: how the run ended."""
    text = f"{row.label}: {row.steps_completed} of {row.steps_planned} steps"
    if row.budget_bytes is not None and row.peak_bytes is not None:
        inside = "within" if row.peak_bytes <= row.budget_bytes else "OVER"
        text += f", peak {format_mib(row.peak_bytes)} {inside} {format_mib(row.budget_bytes)}"
    text += f", {len(log.ooms)} out of memory" if log.ooms else ", never out of memory"
    summary = log.summary or {}
    if summary.get("spikes"):
        text += f", {summary.get('spikes_survived', 0)} of {summary['spikes']} spikes survived"
    return text


def why(record: dict[str, Any]) -> str:
    """Why a mitigation acted, as far as its record tells."""
    text = []
    if record.get("layer") is not None:
        text.append(f"layer {record['layer']}")
    if record.get("microbatch") is not None:
        text.append(f"micro-batch {record['microbatch']}")
    if record.get("load_imbalance") is not None:
        text.append(f"imbalance {record['load_imbalance']:.2f}x")
    if record.get("needed_bytes") is not None:
        text.append(f"{format_mib(record['needed_bytes'])} to free")
    return ", ".join(text) or "-"


def what(record: dict[str, Any]) -> str:
    """ "recompute layer2.expert_fc1 (1.5 MiB), ..." """
    return ", ".join(
        f"{a['residency']} {a['unit']}"
        + (f" ({format_mib(a['bytes'])})" if a.get("bytes") is not None else "")
        for a in record["actions"]) or "-"


def text_report(logs: list[RunLog]) -> str:
    """The comparison as a table for a terminal, then notes; ends with a newline."""
    rows = summarise(logs)
    table = [COMPARISON_HEADER] + [comparison_cells(row) for row in rows]
    widths = [max(len(line[i]) for line in table) for i in range(len(COMPARISON_HEADER))]
    out = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip()
           for line in table]
    out.insert(1, "  ".join("-" * width for width in widths))
    for log, row in zip(logs, rows):
        out.append(headline(log, row))
        if row.decision_p99_ns:  # 0 from a policy that decides nothing
            out.append(f"  decisions p50 {format_ms(row.decision_p50_ns)}, "
                       f"p99 {format_ms(row.decision_p99_ns)}, "
                       f"max {format_ms(row.decision_max_ns)}{_known_plans(row)}; "
                       f"{row.mitigations} mitigation(s)")
        out += report_pipeline.text_lines(log) + report_steps.text_lines(log.traced)
        shown = log.mitigations[:_MAX_LINES]
        out += [f"  step {m['step']}, rank {m['rank']}: {why(m)}: {what(m)}; "
                f"cost {format_ms(m.get('cost_ns'))}" for m in shown]
        if len(log.mitigations) > len(shown):
            out.append(f"  ... and {len(log.mitigations) - len(shown)} more in the log")
        out += [f"  note: {note} ({row.file})" for note in row.notes]
    return printable("\n".join(out)) + "\n"


def _known_plans(row: RunSummary) -> str:
    if row.plan_cache_hit_fraction is None:
        return ""
    return f"; plan known without a search in {100 * row.plan_cache_hit_fraction:.1f} %"


def printable(text: str) -> str:
    """Control characters replaced, so that a log cannot send escape sequences to a terminal."""
    return "".join(c if c == "\n" or c.isprintable() else "?" for c in text)
