"""The report as one self-contained page: header, comparison, plots, mitigations.

Nothing is fetched: Plotly's script is inlined and the page's own policy forbids the network. All
text from logs is escaped here; figures escape theirs (report_figures.py).
"""

import html
import json
from typing import Any

import plotly.offline

from bagualu import (report_figures, report_pipeline, report_step_figures, report_steps,
                     report_summary)
from bagualu.report_log import RunLog
from bagualu.report_page import PAGE, SCRIPT, STYLE
from bagualu.report_summary import format_mib, format_ms

_MAX_ROWS = 200  # mitigations listed per run; the log has all


def render(logs: list[RunLog]) -> str:
    """The whole page as text, UTF-8 to be."""
    main = report_summary.primary(logs)
    rows = report_summary.summarise(logs)
    figures = report_figures.build_figures(logs)
    timelines = report_step_figures.build_step_figures(logs)
    title = f"bagualu: {_model_name(main)}, {main.run['policy']}"
    body = [_header(main, rows[logs.index(main)]), _comparison(logs, rows)]
    body += [_plots(figures) if figures else _empty("No step was completed: nothing to plot.")]
    body += [_pipelines(logs), _steps(logs), _plots(timelines) if timelines else "",
             _mitigations(logs), _notes(rows)]
    drawn = [{"id": f.id, "data": f.data, "layout": f.layout} for f in figures + timelines]
    palette = {name: list(pair) for name, pair in report_figures.PALETTE.items()}
    parts = {"TITLE": html.escape(title), "STYLE": STYLE, "BODY": "\n".join(filter(None, body)),
             "FIGURES": _json(drawn), "PALETTE": _json(palette), "SCRIPT": SCRIPT}
    page = PAGE
    for name, text in parts.items():
        page = page.replace(f"<!--{name}-->", text, 1)
    # Escaped text cannot spell a mark, so each mark is the page's own.
    return page.replace("<!--PLOTLY-->", plotly.offline.get_plotlyjs(), 1)


def _json(value: Any) -> str:
    """JSON that can stand inside a script element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _model_name(log: RunLog) -> str:
    return str((log.run.get("model") or {}).get("name") or "unnamed model")


def _header(log: RunLog, row: report_summary.RunSummary) -> str:
    run = log.run
    model = run.get("model") or {}
    shape = [f"{model[key]} {word}" for key, word in (
        ("layers", "layers"), ("hidden", "hidden"), ("experts", "experts")) if model.get(key)]
    if model.get("top_k"):
        shape.append(f"top {model['top_k']}")
    batch = [f"{run[key]} {word}" for key, word in (
        ("microbatches", "micro-batches of"), ("micro_batch_size", "x")) if run.get(key)]
    if run.get("seq"):
        batch.append(f"{run['seq']} tokens")
    sizes = [f"{name} {run[key]}" for name, key in (("PP", "pp"), ("EP", "ep")) if run.get(key)
             and (key == "ep" or run[key] > 1)]
    ranks = f"{run['world_size']}" + (f" ({', '.join(sizes)})" if sizes else "")
    budget = "no limit" if run["budget_bytes"] is None else format_mib(run["budget_bytes"])
    facts = [("Model", ", ".join(shape)), ("Ranks", ranks),
             ("Batch per rank", " ".join(batch)), ("Type", run.get("dtype")),
             ("Seed", run.get("seed")), ("Budget per rank", budget),
             ("Floor", format_mib(run["floor_bytes"]) if run.get("floor_bytes") else None),
             ("Static memory", format_mib(run["static_bytes"]) if run.get("static_bytes")
              else None)]
    cells = "".join(f"<div><dt>{name}</dt><dd>{html.escape(str(value))}</dd></div>"
                    for name, value in facts if value not in (None, ""))
    good = row.finished and not log.ooms
    return (f'<header><p class="kicker">bagualu run report</p>'
            f"<h1>{html.escape(_model_name(log))}</h1>"
            f'<p class="result {"good" if good else "bad"}">'
            f"{html.escape(report_summary.headline(log, row))}</p><dl>{cells}</dl></header>")


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]], right: tuple[int, ...] = (),
           marks: dict[tuple[int, int], str] | None = None) -> str:
    """Escaped text; `right`: columns of numbers; `marks`: classes of single cells."""
    def cell(tag: str, row: int, column: int, text: str) -> str:
        names = (["number"] if column in right else []) + [(marks or {}).get((row, column), "")]
        joined = " ".join(filter(None, names))
        return f"<{tag}{f' class={chr(34)}{joined}{chr(34)}' if joined else ''}>" \
               f"{html.escape(text)}</{tag}>"
    top = "".join(cell("th", -1, i, text) for i, text in enumerate(head))
    lines = "".join("<tr>" + "".join(cell("td", r, c, text) for c, text in enumerate(row))
                    + "</tr>" for r, row in enumerate(rows))
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead>' \
           f"<tbody>{lines}</tbody></table></div>"


def _comparison(logs: list[RunLog], rows: list[report_summary.RunSummary]) -> str:
    marks = {}
    for index, (log, row) in enumerate(zip(logs, rows)):
        marks[index, 1] = "good" if row.finished else "bad"
        if log.ooms:
            marks[index, 2] = "bad"
        if row.losses_equal.startswith("different"):
            marks[index, 5] = "bad"
        elif row.losses_equal != "-":
            marks[index, 5] = "good"
    table = _table(report_summary.COMPARISON_HEADER,
                   [report_summary.comparison_cells(row) for row in rows], (3, 4), marks)
    title = "Policies compared" if len(logs) > 1 else "Result"
    return f"<section><h2>{title}</h2>{table}</section>"


def _plots(figures: list[report_figures.Figure]) -> str:
    cards = []
    for figure in figures:
        size = "card wide" if figure.wide else "card"
        style = f' style="height:{figure.height_px}px"' if figure.height_px else ""
        cards.append(f'<figure class="{size}"><figcaption><h2>{html.escape(figure.title)}</h2>'
                     f"<p>{html.escape(figure.note)}</p></figcaption>"
                     f'<div class="plot" id="{figure.id}"{style}></div></figure>')
    return f'<div class="grid">{"".join(cards)}</div>'


def _empty(text: str) -> str:
    return f'<section><p class="muted">{html.escape(text)}</p></section>'


def _mitigations(logs: list[RunLog]) -> str:
    rows: list[tuple[str, ...]] = []
    left_out = 0
    for log in logs:
        left_out += max(0, len(log.mitigations) - _MAX_ROWS)
        for record in log.mitigations[:_MAX_ROWS]:
            rows.append((log.label, str(record["step"]), str(record["rank"]),
                         report_summary.why(record), report_summary.what(record),
                         format_ms(record.get("cost_ns"))))
    if not rows:
        return ""
    head = ("policy", "step", "rank", "why", "what", "cost")
    more = f'<p class="muted">{left_out} more in the log(s).</p>' if left_out else ""
    return f"<section><h2>Mitigations</h2>{_table(head, rows, (1, 2, 5))}{more}</section>"


def _pipelines(logs: list[RunLog]) -> str:
    """One table per run with stages or pairs of passes."""
    parts = [f'<p class="muted">{html.escape(f"{log.label}: {report_pipeline.title(log)}")}</p>'
             + _table(report_pipeline.HEADER, rows, tuple(range(2, len(report_pipeline.HEADER))))
             for log in logs if (rows := report_pipeline.rows(log))]
    return f"<section><h2>Pipeline</h2>{''.join(parts)}</section>" if parts else ""


def _steps(logs: list[RunLog]) -> str:
    """Traced steps in numbers; their timelines stand below."""
    head = report_steps.HEADER
    parts = []
    for log in logs:
        if not log.traced.steps:
            continue
        text = f"{log.label}: executed / scheduled"
        if len(log.traced.steps) > 1:
            text += (f"; predictions of {len(log.traced.steps)} steps are off by "
                     f"{log.traced.median_error_fraction:.1%} in the median")
        parts.append(f'<p class="muted">{html.escape(text)}. Hidden: of the time that transfers '
                     "are under way, what runs beside compute. Exposed: waits, of the rank's "
                     "time.</p>" + _table(head, report_steps.rows(log.traced.steps),
                                          tuple(range(1, len(head)))))
    return f"<section><h2>Step</h2>{''.join(parts)}</section>" if parts else ""


def _notes(rows: list[report_summary.RunSummary]) -> str:
    notes = [f"{row.label} ({row.file}): {note}" for row in rows for note in row.notes]
    if not notes:
        return ""
    return ("<section><h2>Notes</h2><ul>" + "".join(f"<li>{html.escape(n)}</li>" for n in notes)
            + "</ul></section>")
