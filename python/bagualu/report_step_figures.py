"""Timelines of traced steps: per rank and track, what was executed above what was scheduled."""

import html
from collections.abc import Iterator
from typing import Any

from bagualu import report_steps
from bagualu.report_figures import Figure
from bagualu.report_log import RunLog
from bagualu.report_steps import SIDES, TRACKS, Span

_MAX_STEPS = 3  # drawn per run, _MAX_RANKS of each; the Perfetto trace has all
_MAX_RANKS = 8
_MAX_SPANS = 20_000  # drawn per step; the shortest are left out
_ROW_PX = 26
_COLOURS = {"forward": "@save", "backward": "@recompute", "weight gradient": "@quantise",
            "rebuild": "@other1", "messages": "@other3", "other": "@floor", "wait": "@grid",
            "communication": "@offload", "copy": "@adaptive"}
_LINES = {"executed": (-0.16, 12, 1.0), "scheduled": (0.28, 6, 0.6)}  # y, px, opacity


def build_step_figures(logs: list[RunLog]) -> list[Figure]:
    """One wide card per traced step, at most _MAX_STEPS per run."""
    return [_timeline(log, index, step, len(logs) > 1) for index, log in enumerate(logs)
            for step in log.traced.steps[:_MAX_STEPS]]


def _rows(step: dict[str, Any]) -> list[tuple[int, str]]:
    """(rank's place, track) from the top; tracks that nobody used are left out."""
    used = {span.track for rank in step["ranks"] for span in
            report_steps.spans(step, rank, "executed")}
    return [(place, track) for place in range(min(_MAX_RANKS, len(step["ranks"])))
            for track in TRACKS if track in used]


def _pieces(span: Span) -> Iterator[tuple[str, int, int]]:
    """(kind, start, end): waiting is drawn as such."""
    if span.wait_ns:
        yield "wait", span.start_ns, span.start_ns + span.wait_ns
    if span.start_ns + span.wait_ns < span.end_ns:
        yield span.kind, span.start_ns + span.wait_ns, span.end_ns


def _label(span: Span, side: str) -> str:
    text = [f"{side}: {span.name}"]
    if span.microbatch >= 0:
        text.append(f"micro-batch {span.microbatch}, stage {span.stage}")
    length = f"{(span.end_ns - span.start_ns) / 1e6:,.3f} ms"
    if span.wait_ns:
        length += f", {span.wait_ns / 1e6:,.3f} of them waiting"
    if span.bytes is not None:
        length += f", {span.bytes / 1024:,.1f} KiB"
    return html.escape("\n".join([*text, length])).replace("\n", "<br>")


def _timeline(log: RunLog, index: int, step: dict[str, Any], several: bool) -> Figure:
    rows = _rows(step)
    gap = 0.5
    heights = {row: number + gap * row[0] for number, row in enumerate(rows)}
    drawn: list[tuple[float, str, Span]] = []
    for place, rank in enumerate(step["ranks"][:_MAX_RANKS]):
        drawn += [(heights[place, span.track], side, span) for side in SIDES
                  for span in report_steps.spans(step, rank, side)
                  if span.end_ns > span.start_ns]
    left_out = max(0, len(drawn) - _MAX_SPANS)
    drawn = sorted(drawn, key=lambda d: d[2].start_ns - d[2].end_ns)[:_MAX_SPANS]
    span_ns = max([step["measured_ns"], step["predicted_ns"]])
    ranks = [str(rank["rank"]) for rank in step["ranks"]]
    note = (f"{step['measured_ns'] / 1e6:,.1f} ms, {step['predicted_ns'] / 1e6:,.1f} ms predicted "
            f"({report_steps.off_fraction(step):+.1%}) from median times of the other traced "
            "steps. Thick: executed; thin below: the same lists as scheduled. Drag to zoom.")
    if len(ranks) > _MAX_RANKS:
        note += f" The first {_MAX_RANKS} of {len(ranks)} ranks."
    if left_out:
        note += f" The {left_out:,} shortest of {left_out + len(drawn):,} pieces are left out."
    labels = [f"rank {ranks[place]} {track}" if track == TRACKS[0] else track
              for place, track in rows]
    height = max(heights.values(), default=0.0)
    layout = {
        "xaxis": {"title": {"text": "time since the step's start (ms)"},
                  "range": [0, span_ns / 1e6]},
        "yaxis": {"title": {"text": ""}, "tickmode": "array", "tickvals": list(heights.values()),
                  "ticktext": labels, "range": [height + 0.7, -0.7], "fixedrange": True,
                  "showgrid": False},
        "hovermode": "closest", "dragmode": "zoom", "showlegend": True}
    name = f", {log.label}" if several else ""
    return Figure(f"step-{index}-{step['step']}", f"Step {step['step']}{name}", note,
                  _traces(drawn, span_ns), layout, wide=True,
                  height_px=120 + round(_ROW_PX * (height + 1.4)))


def _traces(drawn: list[tuple[float, str, Span]], span_ns: int) -> list[dict[str, Any]]:
    """One line per kind and side, broken between its pieces: thousands of bars would be slow."""
    points: dict[tuple[str, str], tuple[list, list, list]] = {}
    for height, side, span in drawn:
        text = _label(span, side)
        for kind, start, end in _pieces(span):
            x, y, texts = points.setdefault((kind, side), ([], [], []))
            # Points inside long pieces too: the pointer finds points, not lines.
            count = 1 + 60 * (end - start) // max(1, span_ns)
            x += [(start + (end - start) * i // count) / 1e6 for i in range(count + 1)] + [None]
            y += [round(height + _LINES[side][0], 2)] * (count + 1) + [None]
            texts += [text] * (count + 1) + [""]
    traces = []
    for kind in _COLOURS:
        for side in SIDES:
            if (kind, side) not in points:
                continue
            x, y, texts = points[kind, side]
            _, width, opacity = _LINES[side]
            traces.append({
                "type": "scatter", "mode": "lines", "name": kind, "legendgroup": kind, "x": x,
                "y": y, "text": texts, "hovertemplate": "%{text}<extra></extra>",
                "connectgaps": False, "opacity": opacity,
                "showlegend": side == SIDES[0] or (kind, SIDES[0]) not in points,
                "line": {"color": _COLOURS[kind], "width": width, "simplify": False}})
    return traces
