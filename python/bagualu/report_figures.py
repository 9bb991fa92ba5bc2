"""Figures of the report as plain Plotly data: what is drawn, and nothing of the page around it.

Colours are names with a leading "@" ("@grid", "@adaptive"); the page's script resolves them from
the palette of the reader's colour scheme. Text that came from a log is escaped, because Plotly
reads tags in labels.
"""

import html
import math
from dataclasses import dataclass
from typing import Any

from bagualu.report_log import RunLog
from bagualu.report_summary import (MIB, format_mib, hottest_rank, percentile, primary,
                                    summarise)

# name -> (light, dark). Policies and residencies keep their colour on every page.
PALETTE = {
    "text": ("#24292f", "#d9dde3"), "muted": ("#6a737d", "#929aa5"),
    "grid": ("#e9ecef", "#2c333b"), "budget": ("#c0392b", "#ff7b6b"),
    "floor": ("#7d8590", "#8b949e"), "spike": ("#f3e3c3", "#3d3424"),
    "save-all": ("#6b7a8c", "#9fb0c3"), "static": ("#d9822b", "#f0a35c"),
    "full-recompute": ("#8259b5", "#b794e6"), "adaptive": ("#0b8074", "#3cc3b2"),
    "selective": ("#2f6fb3", "#6aa9e9"), "threshold": ("#b83a74", "#ee7fb0"),
    "save": ("#5b8fc7", "#5b8fc7"), "recompute": ("#e3a54a", "#d79a42"),
    "offload": ("#9277c0", "#9a80c9"), "quantise": ("#5aa67b", "#5fb586"),
    "other0": ("#2f6fb3", "#6aa9e9"), "other1": ("#b83a74", "#ee7fb0"),
    "other2": ("#77862b", "#b3c45c"), "other3": ("#a2542f", "#dd8e67"),
    "heat0": ("#f6f8fa", "#1b2128"), "heat1": ("#d5e6e3", "#1f4a47"),
    "heat2": ("#f0b45f", "#b67a29"), "heat3": ("#b5302a", "#ff8170"),
}
CALM_IMBALANCE = 1.2  # the project's own line between calm and spike, docs/formats.md
DECISION_LIMIT_US = 10_000.0  # a decision is to stay below 10 ms, docs/design.md
_MAX_BANDS = 60  # more shaded spike steps than this hide the plot rather than explain it


@dataclass(frozen=True)
class Figure:
    """One card: `data` and `layout` go to Plotly as they are; `note` says what is counted."""

    id: str
    title: str
    note: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    wide: bool = False
    height_px: int | None = None  # None: the card's usual one


def build_figures(logs: list[RunLog]) -> list[Figure]:
    """Every figure the logs have data for, in reading order."""
    colours = policy_colours(logs)
    main = primary(logs)
    figures = [_peaks(logs, colours, main), *_inside_step(logs, colours), *_imbalances(logs),
               *_residencies(logs), _step_times(logs, colours, main), _speeds(logs, colours, main),
               _losses(logs, colours), _decisions(logs)]
    return [figure for figure in figures if figure is not None]


def policy_colours(logs: list[RunLog]) -> dict[str, str]:
    """Colour name per label: the policy's own for its first run, spare ones after that."""
    colours: dict[str, str] = {}
    spare = 0
    for log in logs:
        name = f"@{log.run['policy']}"
        if name[1:] not in PALETTE or name in colours.values():
            name = f"@other{spare % 4}"
            spare += 1
        colours[log.label] = name
    return colours


def _layout(x: str, y: str, **more: Any) -> dict[str, Any]:
    layout: dict[str, Any] = {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}}}
    for key, value in more.items():
        if key in layout:
            layout[key].update(value)
        else:
            layout[key] = value
    return layout


def _line(name: str, colour: str, x: list, y: list, unit: str, **more: Any) -> dict[str, Any]:
    trace = {"type": "scatter", "mode": "lines", "name": html.escape(name), "x": x,
             "y": [_finite(v) for v in y], "line": {"color": colour, "width": 1.8},
             "hovertemplate": "%{y:,.4~f} " + unit}
    if len(x) == 1:
        trace["mode"] = "markers"
    trace.update(more)
    return trace


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _limits(logs: list[RunLog], with_floor: bool) -> tuple[list[dict], list[dict], list[float]]:
    """Shapes and labels of the budget and floor lines (MiB), and their heights."""
    wanted = [("budget", "budget_bytes", "solid")]
    if with_floor:
        wanted.append(("floor", "floor_bytes", "dot"))
    shapes, labels, heights = [], [], []
    for name, key, dash in wanted:
        for value in sorted({log.run.get(key) for log in logs if log.run.get(key)}):
            y = value / MIB
            heights.append(y)
            shapes.append({"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y,
                           "line": {"color": f"@{name}", "width": 1.4, "dash": dash}})
            labels.append({"xref": "paper", "x": 0.004, "y": y, "xanchor": "left",
                           "yanchor": "bottom" if name == "budget" else "top", "showarrow": False,
                           "text": f"{name} {format_mib(value)}",
                           "font": {"color": f"@{name}", "size": 11}})
    return shapes, labels, heights


def _span(values: list[float]) -> list[float]:
    """Axis range around the values, not from zero: what matters is the distance to the budget."""
    low, high = min(values), max(values)
    room = 0.1 * (high - low) or 1.0
    return [max(0.0, low - room), high + 1.2 * room]


def _spike_bands(log: RunLog) -> list[dict[str, Any]]:
    """Shading for the steps marked as spikes, neighbours merged; none if there are too many."""
    bands: list[list[int]] = []
    for step in (s["step"] for s in log.steps if s.get("spike")):
        if bands and step <= bands[-1][1] + 1:
            bands[-1][1] = step
        else:
            bands.append([step, step])
    if len(bands) > _MAX_BANDS:
        return []
    return [{"type": "rect", "yref": "paper", "x0": first - 0.5, "x1": last + 0.5, "y0": 0,
             "y1": 1, "fillcolor": "@spike", "line": {"width": 0}, "layer": "below"}
            for first, last in bands]


def _peaks(logs: list[RunLog], colours: dict[str, str], main: RunLog) -> Figure | None:
    data, values = [], []
    for log in logs:
        hot = [(step["step"], hottest_rank(step)) for step in log.steps]
        hot = [(step, rank) for step, rank in hot if rank is not None]
        if not hot:
            continue
        y = [rank["peak_bytes"] / MIB for _, rank in hot]
        values += y
        data.append(_line(log.label, colours[log.label], [s for s, _ in hot], y, "MiB",
                          customdata=[rank["rank"] for _, rank in hot],
                          hovertemplate="%{y:,.1f} MiB on rank %{customdata}"))
    for log in logs:
        for oom in log.ooms:
            budget = oom.get("budget_bytes") or log.run["budget_bytes"]
            if budget is None:
                continue
            wanted = budget - (oom.get("left_bytes") or 0) + (oom.get("wanted_bytes") or 0)
            values.append(wanted / MIB)
            data.append({
                "type": "scatter", "mode": "markers", "name": html.escape(f"{log.label}: OOM"),
                "x": [oom["step"]], "y": [wanted / MIB],
                "marker": {"symbol": "x", "size": 11, "color": colours[log.label],
                           "line": {"width": 1, "color": "@budget"}},
                "hovertemplate": "out of memory: %{y:,.1f} MiB needed"})
    if not data:
        return None
    shapes, labels, heights = _limits(logs, with_floor=True)
    return Figure(
        "memory-steps", "Peak memory per step",
        "Highest live device bytes of the hottest rank, static memory included. A cross marks the "
        "allocation that ended a run; shaded steps are routing spikes.", data,
        _layout("step", "peak (MiB)", yaxis={"range": _span(values + heights)}, annotations=labels,
                shapes=_spike_bands(main) + shapes, hovermode="x unified"), wide=True)


def _inside_step(logs: list[RunLog], colours: dict[str, str]) -> list[Figure]:
    """A calm and a spike step side by side, same scale."""
    calm = [(log, record) for log in logs if (record := _calm_record(log)) is not None]
    spike = [(log, record) for log in logs if (record := _spike_record(log)) is not None]
    shapes, labels, heights = _limits(logs, with_floor=False)
    drawn = [p[1] / MIB for _, record in calm + spike for p in record["points"]]
    if not drawn:
        return []
    figures = []
    for name, title, chosen in (("calm", "Inside a calm step", calm),
                                ("spike", "Inside a spike step", spike)):
        data = []
        if name == "spike":  # each run's own calm step beside it, faint
            mitigated = [log for log, _ in spike]
            chosen = [(log, r) for log, r in calm if log in mitigated] + spike
        for log, record in chosen:
            faint = name == "spike" and (log, record) in calm
            points = sorted(record["points"], key=lambda p: p[0])
            data.append(_line(
                f"{log.label}, step {record['step']}", colours[log.label],
                [p[0] / 1e6 for p in points], [p[1] / MIB for p in points], "MiB",
                line={"color": colours[log.label], "width": 1.4, "shape": "hv",
                      "dash": "dot" if faint else "solid"},
                text=[html.escape(str(p[2])) if len(p) > 2 else "" for p in points],
                hovertemplate="%{x:,.2f} ms: %{y:,.1f} MiB<br>%{text}"))
        if data:
            figures.append(Figure(
                f"memory-{name}", title, "Live device bytes of the rank with the highest peak, "
                "operator by operator.", data,
                _layout("time since step start (ms)", "live (MiB)",
                        yaxis={"range": _span(drawn + heights)}, shapes=shapes,
                        annotations=labels, showlegend=True), wide=len(spike) == 0))
    return figures


def _calm_record(log: RunLog) -> dict[str, Any] | None:
    acted = {m["step"] for m in log.mitigations}
    calm = [r for r in log.memory if r["step"] not in acted and r["points"]]
    return min(calm, key=lambda r: (r["step"], r["rank"]), default=None)


def _spike_record(log: RunLog) -> dict[str, Any] | None:
    """The recorded step that freed most."""
    freed: dict[int, int] = {}
    for m in log.mitigations:
        total = sum(a.get("bytes") or 0 for a in m["actions"])
        freed[m["step"]] = freed.get(m["step"], 0) + total
    spikes = [r for r in log.memory if r["step"] in freed and r["points"]]
    return max(spikes, key=lambda r: (freed[r["step"]], -r["step"], -r["rank"]), default=None)


def _imbalances(logs: list[RunLog]) -> list[Figure]:
    """One heat map for every routing that differs: policies with equal losses route alike."""
    main = primary(logs)
    shown: list[RunLog] = []
    for log in [main] + [log for log in logs if log is not main]:
        if any(s["imbalance"] for s in log.steps) and not any(_alike(log, o) for o in shown):
            shown.append(log)
    return [_imbalance(log, index, len(shown) == 1) for index, log in enumerate(shown)]


def _alike(log: RunLog, other: RunLog) -> bool:
    theirs = {s["step"]: s["imbalance"] for s in other.steps}
    return all(theirs.get(s["step"], s["imbalance"]) == s["imbalance"] for s in log.steps)


def _load(value: float | None) -> float | None:
    """None for a layer without experts, which some writers log as 0: no real ratio is under 1."""
    return value if value is not None and value >= 0.5 else None


def _imbalance(log: RunLog, index: int, alone: bool) -> Figure:
    layers = max(len(s["imbalance"]) for s in log.steps)
    rows = [[_load(s["imbalance"][layer]) if layer < len(s["imbalance"]) else None
             for s in log.steps] for layer in range(layers)]
    top = max([1.6] + [v for row in rows for v in row if v is not None])
    calm = (CALM_IMBALANCE - 1) / (top - 1)
    data = [{"type": "heatmap", "x": [s["step"] for s in log.steps], "y": list(range(layers)),
             "z": rows, "zmin": 1, "zmax": top, "xgap": 0, "ygap": 1,
             "colorscale": [[0, "@heat0"], [calm, "@heat1"], [calm + (1 - calm) * 0.35, "@heat2"],
                            [1, "@heat3"]],
             "colorbar": {"title": {"text": "max / mean"}, "thickness": 10, "outlinewidth": 0},
             "hovertemplate": "step %{x}, layer %{y}: %{z:.2f}x<extra></extra>"}]
    title = "Load imbalance per layer" + ("" if alone else f": {log.label}")
    return Figure(
        f"imbalance-{index}", title,
        "Rows of the hottest rank over the mean of the ranks. Up to 1.2 is calm.", data,
        _layout("step", "layer", yaxis={"autorange": "reversed", "dtick": max(1, layers // 8),
                                        "showgrid": False}, xaxis={"showgrid": False}), wide=True)


def _residencies(logs: list[RunLog]) -> list[Figure]:
    """One card per run, all with the same steps, so that a run that ended early shows it."""
    figures = []
    steps = [s["step"] for log in logs for s in log.steps]
    first, last = min(steps, default=0), max(steps, default=1)
    for index, log in enumerate(logs):
        totals = []
        for step in log.steps:
            total: dict[str, int] = {}
            for rank in step["ranks"]:
                for name, count in (rank.get("residencies") or {}).items():
                    total[name] = total.get(name, 0) + (count or 0)
            totals.append(total)
        names = list(dict.fromkeys(name for total in totals for name in total))
        data = []
        for spare, name in enumerate(names):
            y = [total.get(name, 0) for total in totals]
            colour = f"@{name}" if name in PALETTE else f"@other{spare % 4}"
            if any(y):
                data.append(_line(
                    name, colour, [s["step"] for s in log.steps], y, "units", mode="lines",
                    stackgroup="one", fillcolor=colour, hovertemplate="%{y:,} units",
                    line={"width": 0, "color": colour, "shape": "hvh"}))
        if data:
            figures.append(Figure(
                f"residencies-{index}", f"Residencies: {log.label}",
                "How many units of saved storage were kept, recomputed or moved, all ranks.", data,
                _layout("step", "units", yaxis={"rangemode": "tozero"}, showlegend=True,
                        xaxis={"range": [first, last]},
                        hovermode="x unified"), wide=len(logs) == 1))
    return figures


def _per_step(logs: list[RunLog], colours: dict[str, str], unit: str, value: Any) -> list[dict]:
    return [_line(log.label, colours[log.label], [s["step"] for s in log.steps],
                  [value(s) for s in log.steps], unit, hovertemplate="%{y:,.1f} " + unit)
            for log in logs if log.steps]


def _step_times(logs: list[RunLog], colours: dict[str, str], main: RunLog) -> Figure | None:
    data = _per_step(logs, colours, "ms", lambda s: s["step_ns"] / 1e6)
    if not data:
        return None
    return Figure("step-time", "Step time", "Wall time of one optimizer step.", data,
                  _layout("step", "time (ms)", yaxis={"rangemode": "tozero"},
                          shapes=_spike_bands(main), hovermode="x unified", showlegend=True))


def _speeds(logs: list[RunLog], colours: dict[str, str], main: RunLog) -> Figure | None:
    data = _per_step(logs, colours, "tokens/s", lambda s: s["tokens_per_s"])
    if not data:
        return None
    return Figure("speed", "Throughput", "Tokens per second of the whole job.", data,
                  _layout("step", "tokens/s", yaxis={"rangemode": "tozero"},
                          shapes=_spike_bands(main), hovermode="x unified", showlegend=True))


def _losses(logs: list[RunLog], colours: dict[str, str]) -> Figure | None:
    """Equal losses lie on each other: each run gets a thinner line, so that all can be seen."""
    data = []
    drawn = [log for log in logs if log.steps]
    for index, log in enumerate(drawn):
        width = 1.5 + 2.5 * (len(drawn) - 1 - index)
        data.append(_line(log.label, colours[log.label], [s["step"] for s in log.steps],
                          [s["loss"] for s in log.steps], "",
                          line={"color": colours[log.label], "width": width},
                          legendgroup=log.label, opacity=1 if index + 1 == len(drawn) else 0.55))
        if log.validation:
            data.append(_line(f"{log.label}, validation", colours[log.label],
                              [v["step"] for v in log.validation],
                              [v["loss"] for v in log.validation], "", mode="lines+markers",
                              legendgroup=log.label, showlegend=False,
                              line={"color": colours[log.label], "width": 1, "dash": "dot"},
                              marker={"size": 6 + 3 * (len(drawn) - 1 - index),
                                      "color": colours[log.label],
                                      "symbol": "circle-open"}))
    if not data:
        return None
    return Figure("loss", "Loss", "Mean cross entropy per token (nats). Equal runs lie on each "
                  "other, the thinner line on top; circles are validation.", data,
                  _layout("step", "loss (nats/token)", hovermode="x unified", showlegend=True),
                  wide=True)


def _decisions(logs: list[RunLog]) -> Figure | None:
    rows: list[tuple[str, list[float | None]]] = []
    for log in logs:
        times = [float(ns) for s in log.steps for r in s["ranks"]
                 for ns in r.get("decision_ns") or []]
        stated = (log.summary or {}).get("decision_ns") or {}
        values = [stated.get("p50", percentile(times, 0.5)),
                  stated.get("p99", percentile(times, 0.99)),
                  stated.get("max", max(times, default=None))]
        numbers = [float(v) if isinstance(v, (int, float)) and v > 0 else None for v in values]
        if any(v is not None for v in numbers):
            rows.append((html.escape(log.label), numbers))
    if not rows:
        return None
    data = []
    for index, (name, colour) in enumerate((("p50", "@save"), ("p99", "@recompute"),
                                            ("max", "@offload"))):
        data.append({"type": "scatter", "mode": "markers", "name": name,
                     "x": [label for label, _ in rows],
                     "y": [None if v[index] is None else v[index] / 1e3 for _, v in rows],
                     "marker": {"color": colour, "size": 12}, "hovertemplate": "%{y:,.1f} us"})
    # Whole decades, up to the limit at least: distance to the limit is what the plot is for.
    lowest = min(v / 1e3 for _, numbers in rows for v in numbers if v is not None)
    highest = max([DECISION_LIMIT_US] + [v / 1e3 for _, numbers in rows for v in numbers if v])
    span = [math.floor(math.log10(lowest)) - 0.1, math.log10(highest) + 0.3]
    limit = {"xref": "paper", "x0": 0, "x1": 1, "y0": DECISION_LIMIT_US, "y1": DECISION_LIMIT_US,
             "type": "line", "line": {"color": "@budget", "width": 1.4}}
    label = {"xref": "paper", "x": 0.004, "y": math.log10(DECISION_LIMIT_US), "xanchor": "left",
             "yanchor": "bottom", "showarrow": False, "text": "limit 10 ms",
             "font": {"color": "@budget", "size": 11}}
    known = [f" {row.label} knew the plan without a search in "
             f"{100 * row.plan_cache_hit_fraction:.1f} % of its decisions."
             for row in summarise(logs) if row.plan_cache_hit_fraction is not None]
    return Figure("decisions", "Decision time", "Time of one decision after gating, all ranks and "
                  "layers; logarithmic scale." + "".join(known), data,
                  _layout("policy", "time (us)", yaxis={"type": "log", "range": span, "dtick": 1},
                          showlegend=True, shapes=[limit], annotations=[label],
                          xaxis={"type": "category"}), wide=True)
