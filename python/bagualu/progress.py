"""What a person sees while a run goes on. Rank 0 only; logs are run_log.py's."""

import sys
import time
from typing import Any, TextIO

from bagualu.units import format_bytes

_REFRESH_S = 0.1


def mitigation_line(record: dict[str, Any]) -> str:
    """Why, what, cost."""
    actions: dict[str, list[int]] = {}
    for action in record["actions"]:
        entry = actions.setdefault(action["residency"], [0, 0])
        entry[0] += 1
        entry[1] += action["bytes"]
    what = ", ".join(f"{name} {count} units ({format_bytes(size)})"
                     for name, (count, size) in sorted(actions.items())) or "nothing"
    return (f"step {record['step']}, rank {record['rank']}, micro-batch {record['microbatch']}, "
            f"layer {record['layer']}: load {record['load_imbalance']:.2f}x the mean needs "
            f"{format_bytes(record['needed_bytes'])}; {what}; "
            f"costs {record['cost_ns'] / 1e6:.2f} ms")


def _done_text(ranks: list[dict[str, Any]]) -> str:
    total: dict[str, int] = {}
    for entry in ranks:
        for name, count in entry.get("residencies", {}).items():
            total[name] = total.get(name, 0) + count
    others = [f"{name} {count}" for name, count in sorted(total.items())
              if name != "save" and count]
    return ", ".join(others) or "all saved"


def progress_line(record: dict[str, Any], steps: int, budget_bytes: int | None) -> str:
    peak = max(entry["peak_bytes"] for entry in record["ranks"])
    memory = format_bytes(peak)
    if budget_bytes:
        memory += f" of {format_bytes(budget_bytes)} ({100 * peak / budget_bytes:.0f} %)"
    imbalance = max(record["imbalance"], default=1.0)
    return (f"step {record['step'] + 1}/{steps}  loss {record['loss']:.4f}  "
            f"{record['tokens_per_s']:.0f} tokens/s  {memory}  imbalance {imbalance:.2f}x  "
            f"{_done_text(record['ranks'])}")


class Progress:
    """One line that is rewritten, on a terminal only; lines of lasting interest always."""

    def __init__(self, quiet: bool, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._quiet = quiet
        self._live = not quiet and self._stream.isatty()
        self._width = 0
        self._shown = 0.0

    def step(self, record: dict[str, Any], steps: int, budget_bytes: int | None) -> None:
        last = record["step"] + 1 == steps
        if not self._live or (time.monotonic() - self._shown < _REFRESH_S and not last):
            return
        line = progress_line(record, steps, budget_bytes)
        self._stream.write("\r" + line.ljust(self._width))
        self._stream.flush()
        self._width, self._shown = len(line), time.monotonic()

    def say(self, text: str) -> None:
        if self._quiet:
            return
        self.end_line()
        self._stream.write(text + "\n")
        self._stream.flush()

    def end_line(self) -> None:
        if self._width:
            self._stream.write("\n")
            self._width = 0


def summary_table(summary: dict[str, Any]) -> str:
    """Names and values in two columns."""
    budget = summary["budget_bytes"]
    rows = [
        ("policy", summary["policy"]), ("ranks", summary["world_size"]),
        ("steps completed", summary["steps_completed"]),
        ("out of memory", summary["oom_count"]),
        ("tokens/s", f"{summary['tokens_per_s']:.0f}"),
        ("budget", format_bytes(budget) if budget else "none"),
        ("peak", format_bytes(max(summary["peak_bytes"]))),
        ("predicted peak", format_bytes(max(summary["predicted_peak_bytes"]))),
        ("loss", f"{summary['loss_first']:.6f} -> {summary['loss_last']:.6f}"
         if summary["loss_last"] is not None else "-"),
        ("loss digest", summary["loss_digest"][:16]),
        ("spikes survived", f"{summary['spikes_survived']} of {summary['spikes']}"),
        ("decision time", ", ".join(f"{key} {summary['decision_ns'][key] / 1e3:.1f} us"
                                    for key in ("p50", "p99", "max"))),
        ("plans known", f"{100 * summary['plan_cache_hit_fraction']:.1f} % of decisions"
         if summary["policy"] == "adaptive" else "-"),
        ("recomputed", format_bytes(summary["bytes_recomputed"])),
        ("offloaded", format_bytes(summary["bytes_offloaded"])),
    ]
    return "\n".join(f"{name:<18} {value}" for name, value in rows)


def proposal(step_peaks: list[int], floor_bytes: int) -> str:
    """A budget, from a run that had none."""
    ordered = sorted(step_peaks)
    mib = 2**20
    p90 = ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]
    budget = -(-max(p90, floor_bytes) // mib)
    return (f"measured without a budget: highest peak {format_bytes(ordered[-1])}, floor "
            f"{format_bytes(floor_bytes)}; proposed: --budget {budget}MiB (nine of ten of these "
            "steps fit it with everything kept)")
