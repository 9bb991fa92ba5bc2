"""What a report says of pipeline stages and pairs of passes: one row per rank, from the steps."""

from typing import Any

from bagualu.report_log import RunLog
from bagualu.run_log import PIPELINE_FIELDS

HEADER = ("rank", "stages", "peak / predicted", "segments in pairs", "weight gradients put off",
          "compute", "comm beside compute", "comm waits", "copies beside compute", "copy waits",
          "stage waits", "bubble")
_MIB = 1024 * 1024


def has_pipeline(log: RunLog) -> bool:
    """Whether its steps have the fields."""
    return any("compute_ns" in entry for step in log.steps[:1] for entry in step["ranks"])


def title(log: RunLog) -> str:
    """ "1f1b, 2 pipeline ranks, layers 3 + 5, overlap on" """
    run = log.run
    text = f"{run.get('pipeline') or 'one stage'}, {run.get('pp') or 1} pipeline rank(s)"
    if run.get("stage_layers"):
        text += f", layers {' + '.join(str(n) for n in run['stage_layers'])}"
    if run.get("overlap") is not None:
        text += f", overlap {'on' if run['overlap'] else 'off'}"
    return text


def _part(value: int, whole: int) -> str:
    return f"{value} of {value + whole}" if value + whole else "-"


def _beside(beside_ns: int, total_ns: int) -> str:
    return f"{beside_ns / total_ns:.1%} of {total_ns / 1e6:,.0f} ms" if total_ns else "-"


def rows(log: RunLog) -> list[tuple[str, ...]]:
    """Cells under HEADER, by rank: sums over the steps, without the first if there are more."""
    if not has_pipeline(log):
        return []
    steps = log.steps[1:] or log.steps
    span_ns = sum(step["step_ns"] for step in steps)
    return [_row(log, rank, [step["ranks"][rank] for step in steps if rank < len(step["ranks"])],
                 span_ns) for rank in range(len(log.steps[0]["ranks"]))]


def _row(log: RunLog, rank: int, entries: list[dict[str, Any]], span_ns: float
         ) -> tuple[str, ...]:
    total = {name: sum(entry.get(name) or 0 for entry in entries) for name in PIPELINE_FIELDS}
    held = log.run.get("ranks") or []
    stages = held[rank].get("stages", []) if rank < len(held) else []
    peak = max((entry["peak_bytes"] for entry in entries), default=0)
    predicted = max((entry.get("predicted_peak_bytes") or 0 for entry in entries), default=0)

    def share(name: str) -> str:
        return f"{total[name] / span_ns:.1%}" if span_ns else "-"

    return (str(rank), ", ".join(map(str, stages)) or "-",
            f"{peak / _MIB:,.2f} / {predicted / _MIB:,.2f} MiB",
            _part(total["overlapped_segments"], total["serialised_segments"]),
            _part(total["deferred_passes"], total["undeferred_passes"]), share("compute_ns"),
            _beside(total["comm_beside_ns"], total["comm_ns"]), share("comm_wait_ns"),
            _beside(total["copy_beside_ns"], total["copy_ns"]), share("copy_wait_ns"),
            share("p2p_wait_ns"), share("bubble_ns"))


def text_lines(log: RunLog) -> list[str]:
    """The same for a terminal, indented; empty for a run without stages or pairs."""
    cells = rows(log)
    if not cells:
        return []
    table = [HEADER, *cells]
    widths = [max(len(line[i]) for line in table) for i in range(len(HEADER))]
    return [f"  pipeline: {title(log)}"] + [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip()
        for line in table]
