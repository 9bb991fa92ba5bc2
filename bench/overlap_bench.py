"""Overlap in real `bagualu train` runs: what it gains, what is hidden, and whether steps go as planned.

Runs with overlap on and off take turns; each counts with the median of its steps after the first. The
link between expert ranks is slowed by a stated delay, chosen after a run without overlap and delay so
that the exchanges of a step take SHARE of its compute. The machine may be busy: what is hidden is read
from traces of the executor, and what decides is that the sides take turns.
Figures:
  overlap_gain           tokens/s on over off with the slowed link; beside it without
  overlap_hidden         of the time in which communication was under way, what had compute beside it
  offload_exposed        of the time of copies, what was waited for; calm steps, policy kwai
  step_prediction_error  |predicted - measured| / measured of steps of one PP 2 x EP 2 run, predicted
                         from the two before and the two after it (schedule/step_replay.h)
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
MODEL = {"version": 1, "name": "bench", "layers": 4, "hidden": 256, "heads": 8, "kv_heads": 4,
         "head_dim": 32, "vocab": 256, "experts": 8, "top_k": 2, "expert_ffn": 512}
SHARE = 0.5
LATENCY_US = 200
MICROBATCHES = 8
RUN_LIMIT_S = 1200


@dataclass(frozen=True)
class Shape:
    pp: int
    ep: int
    order: str = "1f1b"

    def __str__(self) -> str:
        return f"PP {self.pp} x EP {self.ep}"

    @property
    def ranks(self) -> int:
        return self.pp * self.ep


class Bench:
    """Owns nothing; writes into `folder`."""

    def __init__(self, folder: Path, steps: int, pairs: int) -> None:
        self.folder, self.steps, self.pairs = folder, steps, pairs
        self._model = folder / "model.json"
        self._model.write_text(json.dumps(MODEL))
        self._runs = 0

    def train(self, shape: Shape, overlap: str, more: list[str], traced: range,
              steps: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Returns: the steps of the run log without the first, what the traces say."""
        self._runs += 1
        log = self.folder / f"run{self._runs}.jsonl"
        command = [str(ROOT / "build/bin/bagualu"), "train", "--model", str(self._model),
                   "--nproc", str(shape.ranks), "--pp", str(shape.pp), "--ep", str(shape.ep),
                   "--threads", "1", "--seq", "256", "--micro-batches", str(MICROBATCHES),
                   "--steps", str(steps), "--overlap", overlap, "--pipeline", shape.order,
                   "--log", str(log), "--quiet", "--deadline", "120",
                   "--trace-step", ",".join(map(str, traced)), *more]
        subprocess.run(command, check=True, stdout=sys.stderr, timeout=RUN_LIMIT_S)
        records = [json.loads(line) for line in log.read_text().splitlines()]
        traces = [str(log.with_name(f"{log.stem}.trace-{rank}.jsonl"))
                  for rank in range(shape.ranks)]
        figures = subprocess.run(
            [str(ROOT / "build/bin/step_figures"), "--order", shape.order, "--pp", str(shape.pp),
             "--dp", str(shape.ep), "--micro-batches", str(MICROBATCHES),
             *(["--overlap"] if overlap == "on" else []), *traces],
            check=True, capture_output=True, text=True)
        return [r for r in records if r["type"] == "step"][1:], json.loads(figures.stdout)

    def dry_run(self, policy: str, budget_bytes: int | None) -> dict[str, Any]:
        """What `--dry-run` answers for the run of `offload()`."""
        limit = [] if budget_bytes is None else ["--budget", f"{-(-budget_bytes // 1024)}KiB"]
        answer = subprocess.run(
            [str(ROOT / "build/bin/bagualu"), "train", "--model", str(self._model), "--threads", "1",
             "--seq", "256", "--micro-batches", str(MICROBATCHES), "--policy", policy, *limit,
             "--dry-run"], check=True, capture_output=True, text=True, timeout=RUN_LIMIT_S)
        found: dict[str, Any] = json.loads(answer.stdout)
        return found

    def exchanged(self, shape: Shape) -> tuple[float, float]:
        """Of a rank and a step: bytes and number of exchanges, from the last run's traces."""
        sent = count = 0
        steps = set()
        for rank in range(shape.ranks):
            file = self.folder / f"run{self._runs}.trace-{rank}.jsonl"
            for line in file.read_text().splitlines():
                record = json.loads(line)
                if record["type"] != "transfer":
                    continue
                steps.add(record["step"])
                if record["name"].rpartition(".")[2] in ("dispatch", "combine"):
                    sent, count = sent + record["bytes"], count + 1
        return sent / len(steps) / shape.ranks, count / len(steps) / shape.ranks

    def slow_link(self, shape: Shape) -> list[str]:
        """The flag that makes a step's exchanges take SHARE of its compute."""
        _, figures = self.train(shape, "off", [], range(1, self.steps), self.steps)
        compute_s = float(np.median(of_ranks(figures, "compute_ns"))) / 1e9
        size, count = self.exchanged(shape)
        left_s = max(SHARE * compute_s - count * LATENCY_US / 1e6, 0.1 * SHARE * compute_s)
        return ["--slow-link", f"{size / left_s / 1e6:.3f}MB/s,{LATENCY_US}us"]

    def turns(self, shape: Shape, more: list[str]) -> dict[str, Any]:
        """Medians of `pairs` runs of each side, which take turns."""
        medians: dict[str, list[float]] = {"on": [], "off": []}
        seen: dict[str, list[dict[str, Any]]] = {"on": [], "off": []}
        losses = []
        for pair in range(self.pairs):
            for overlap in ("on", "off") if pair % 2 == 0 else ("off", "on"):
                steps, figures = self.train(shape, overlap, more, range(1, self.steps), self.steps)
                if figures["order"] != "equal":
                    sys.exit(f"overlap_bench.py: {shape}, overlap {overlap}: {figures['order']}")
                medians[overlap].append(float(np.median([s["step_ns"] for s in steps])) / 1e6)
                seen[overlap].append(figures)
                losses.append([step["loss"] for step in steps])
                print(f"{shape}, overlap {overlap}: {medians[overlap][-1]:.0f} ms, beside compute "
                      f"{hidden([figures], 'comm')}, waited / compute "
                      f"{share([figures], 'comm_wait_ns', 'compute_ns')}", file=sys.stderr,
                      flush=True)
        assert all(loss == losses[0] for loss in losses), "overlap changed the losses"
        by_pair = [off / on for on, off in zip(medians["on"], medians["off"], strict=True)]
        return {"value": round(float(np.median(medians["off"]) / np.median(medians["on"])), 3),
                "by_pair": [round(r, 3) for r in by_pair],
                "step_ms": {side: [round(m, 1) for m in ms] for side, ms in medians.items()},
                "hidden": {side: hidden(seen[side], "comm") for side in seen},
                "comm_over_compute_off": share(seen["off"], "comm_ns", "compute_ns"),
                "waited_over_compute": {side: share(seen[side], "comm_wait_ns", "compute_ns")
                                        for side in seen}}


def of_ranks(figures: dict[str, Any], field: str) -> list[int]:
    return [rank[field] for step in figures["steps"] for rank in step["ranks"]]


def share(runs: list[dict[str, Any]], part: str, whole: str) -> float | None:
    """Median over steps and ranks of part / whole."""
    pairs = [(a, b) for run in runs
             for a, b in zip(of_ranks(run, part), of_ranks(run, whole), strict=True) if b > 0]
    return round(float(np.median([a / b for a, b in pairs])), 3) if pairs else None


def hidden(runs: list[dict[str, Any]], kind: str) -> float | None:
    return share(runs, f"{kind}_beside_ns", f"{kind}_ns")


def show(figure: str, value: float | None, **more: Any) -> None:
    print(json.dumps({"figure": figure, "unit": "ratio", "value": value, "kind": "measured",
                      **more}), flush=True)


def gains(bench: Bench, shape: Shape) -> None:
    link = bench.slow_link(shape)
    slow = bench.turns(shape, link)
    about = {"shape": str(shape), "steps": bench.steps - 1, "pairs": bench.pairs}
    fast = bench.turns(shape, [])
    show("overlap_gain", slow.pop("value"), **about, slow_link=link[1], **slow, without_delay=fast)
    show("overlap_hidden", slow["hidden"]["on"], **about, slow_link=link[1])


def offload(bench: Bench) -> None:
    """kwai's plan for a budget just above the floor, run without one: uneven routing of an untrained
    model would end kwai itself."""
    shape = Shape(1, 1)
    budget = bench.dry_run("save-all", None)["floor"]
    least, calm = budget["floor_bytes"], budget["calm_peak_bytes"]
    plan = bench.dry_run("kwai", least + (calm - least) // 5)["plan"]["plan"]
    file = bench.folder / "plan.json"
    file.write_text(json.dumps(plan))
    _, figures = bench.train(shape, "off", ["--policy", "static", "--plan", str(file)],
                             range(1, bench.steps), bench.steps)
    show("offload_exposed", share([figures], "copy_wait_ns", "copy_ns"), shape=str(shape),
         steps=bench.steps - 1, hidden=hidden([figures], "copy"),
         offloaded_units=sum(kind == "offload" for kind in plan["units"].values()),
         copy_over_compute=share([figures], "copy_ns", "compute_ns"))


def prediction(bench: Bench, steps: int) -> None:
    shape = Shape(2, 2)
    first = 3  # allocators and caches are warm
    _, figures = bench.train(shape, "on", [], range(first, first + steps), first + steps)
    measured = np.array([step["measured_ns"] for step in figures["steps"]])
    predicted = np.array([step["predicted_ns"] for step in figures["steps"]])
    own = np.array([step["own_times_ns"] for step in figures["steps"]])
    error = np.abs(predicted - measured) / measured
    quantiles = {f"p{q}": round(float(np.quantile(error, q / 100)), 4) for q in (10, 50, 90, 100)}
    show("step_prediction_error", quantiles["p50"], shape=str(shape), steps=steps,
         order=figures["order"], error=quantiles,
         own_times_error=round(float(np.max(np.abs(own - measured) / measured)), 5),
         measured_ms=[round(float(ns) / 1e6, 1) for ns in measured],
         predicted_ms=[round(float(ns) / 1e6, 1) for ns in predicted])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--quick", action="store_true", help="nothing: it takes minutes")
    length.add_argument("--full", action="store_true")
    parser.add_argument("--steps", type=int, default=6, help="of a run")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--predicted", type=int, default=30, help="steps")
    parser.add_argument("--only", choices=("gain12", "gain22", "offload", "prediction"))
    args = parser.parse_args()
    if args.quick:
        print("overlap_bench.py: takes minutes, so with --full only", file=sys.stderr)
        return
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), args.steps, args.pairs)
        parts = {"gain12": lambda: gains(bench, Shape(1, 2)),
                 "gain22": lambda: gains(bench, Shape(2, 2)),
                 "offload": lambda: offload(bench),
                 "prediction": lambda: prediction(bench, args.predicted)}
        for name, part in parts.items():
            if args.only in (None, name):
                part()


if __name__ == "__main__":
    main()
