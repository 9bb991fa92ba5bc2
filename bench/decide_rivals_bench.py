"""The product's stage decision beside other solvers on the same cases: time and value.

Cases and the product's answers (with their time) come from decide_cases. Figures:
  rival_highs    HiGHS on the exact MILP (stage_milp.py), cases shaped like real models
  rival_poet     a POET-style MILP over time steps, on those of the cases that it may still solve
  rival_*knapsack  PyTorch's solvers, 64 items that may only be recomputed
Values are recomputed in integers from what each solver returned; a choice over the budget has none.
"over_optimum" is (cost - optimum) / optimum by HiGHS with no time limit that matters.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

from poet_milp import columns, solve_poet
from stage_case import evaluate, over_budget, read_cases
from stage_milp import Optimum, distribution, solve
from torch_knapsack import torch_knapsack

ROOT = Path(__file__).resolve().parents[1]
POET_LIMIT_S = 10.0
POET_COLUMNS = 100_000  # above, building the model alone takes seconds
KNAPSACKS = ("greedy_knapsack", "ilp_knapsack", "dp_knapsack")
REPEATS = 5  # of a knapsack solver; the fastest counts
SIZES = {"quick": {"realistic": 20, "poet": 2, "items64": 10, "limit_s": 3.0},
         "full": {"realistic": 300, "poet": 10, "items64": 100, "limit_s": 60.0}}


def dump(family: str, count: int) -> list[dict]:
    """Cases from decide_cases, of whichever build is there."""
    for folder in ("build", "build-core"):
        program = ROOT / folder / "bin/decide_cases"
        if program.exists():
            file = program.parent.parent / f"decide_{family}.jsonl"
            with open(file, "w", encoding="utf-8") as lines:
                subprocess.run([program, "--seed", "1", "--count", str(count), "--family", family],
                               check=True, stdout=lines)
            return list(read_cases(file))
    sys.exit("error: no build*/bin/decide_cases; scripts/build core makes it")


def value_of(case: dict, residency: list[list[str]] | None) -> float | None:
    """Cost in ns; None if there is no choice or it is over a budget."""
    if residency is None:
        return None
    value = evaluate(case, residency)
    return None if over_budget(case, value) else float(value.cost_ns)


def over_optimum(costs: list[float | None], optima: list[float]) -> dict[str, float] | None:
    known = [(c - o) / max(o, 1.0) for c, o in zip(costs, optima) if c is not None]
    return distribution(known, 5) if known else None


def emit(figure: str, rival_s: list[float], product_s: list[float], rival: list[float | None],
         product: list[float | None], optima: list[float], **more) -> None:
    """One figure: how many times faster the product is (median), and both values.

    "worse" counts cases where the product costs over 1 ns more than the rival's valid choice.
    """
    ratios = np.array(rival_s) / np.array(product_s)
    print(json.dumps({
        "figure": figure, "unit": "x the product's time", "kind": "measured",
        "value": round(float(np.median(ratios)), 1), "least": round(float(ratios.min()), 1),
        "cases": len(rival_s), "rival_us": distribution([1e6 * s for s in rival_s], 1),
        "product_us": distribution([1e6 * s for s in product_s], 1),
        "rival_without_valid_choice": sum(c is None for c in rival),
        "product_without_valid_choice": sum(c is None for c in product),
        "product_worse": sum(p is None or p > r + 1 for p, r in zip(product, rival)
                             if r is not None),
        "rival_worse": sum(r is None or r > p + 1 for p, r in zip(product, rival)
                           if p is not None),
        "rival_over_optimum": over_optimum(rival, optima),
        "product_over_optimum": over_optimum(product, optima), **more}), flush=True)


def product_side(cases: list[dict]) -> tuple[list[float], list[float | None]]:
    return ([case["result"]["solve_ns"] / 1e9 for case in cases],
            [value_of(case, case["result"]["residency"]) for case in cases])


def timed_optimum(case: dict, limit_s: float) -> tuple[float, Optimum]:
    begin = time.perf_counter()
    found = solve(case, limit_s)
    return time.perf_counter() - begin, found


def against_milps(sizes: dict) -> None:
    cases = [case for case in dump("realistic", sizes["realistic"]) if case["result"]["feasible"]]
    runs = [timed_optimum(case, sizes["limit_s"]) for case in cases]
    highs = [value_of(case, found.residency) for case, (_, found) in zip(cases, runs)]
    times, product = product_side(cases)
    optima = [min(c for c in pair if c is not None) for pair in zip(highs, product)]
    emit("rival_highs", [s for s, _ in runs], times, highs, product, optima,
         proven=sum(found.proven for _, found in runs), limit_s=sizes["limit_s"])
    small = sorted((i for i, case in enumerate(cases)
                    if not case["allow_quantise"] and columns(case) <= POET_COLUMNS
                    and optima[i] > 0), key=lambda i: columns(cases[i]))[:sizes["poet"]]
    if not small:
        print("no case is small enough for the POET-style MILP", file=sys.stderr)
        return
    poet = [solve_poet(cases[i], POET_LIMIT_S) for i in small]
    emit("rival_poet", [seconds for _, seconds, _ in poet], [times[i] for i in small],
         [value_of(cases[i], found) for i, (found, _, _) in zip(small, poet)],
         [product[i] for i in small], [optima[i] for i in small],
         proven=sum(proven for _, _, proven in poet), limit_s=POET_LIMIT_S,
         columns=[columns(cases[i]) for i in small])


def against_torch(sizes: dict) -> None:
    cases = [case for case in dump("items64", sizes["items64"]) if case["result"]["feasible"]]
    assert all(case["recompute_only"] for case in cases)
    optima = []
    times, product = product_side(cases)
    for case, cost in zip(cases, product):
        found = value_of(case, solve(case, sizes["limit_s"]).residency)
        optima.append(min(c for c in (found, cost) if c is not None))
    for solver in KNAPSACKS:
        if solver == "ilp_knapsack" and importlib.util.find_spec("scipy") is None:
            print("SKIPPED rival_ilp_knapsack: no scipy (requirements-bench.txt)", file=sys.stderr)
            continue
        seconds, rival = [], []
        for case in cases:
            runs = [torch_knapsack(case, solver) for _ in range(REPEATS)]
            seconds.append(min(s for _, s in runs))
            rival.append(value_of(case, runs[0][0]))
        emit(f"rival_{solver}", seconds, times, rival, product, optima,
             items=len(cases[0]["units"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--quick", action="store_const", dest="mode", const="quick", default="quick")
    mode.add_argument("--full", action="store_const", dest="mode", const="full")
    sizes = SIZES[parser.parse_args().mode]
    torch.set_num_threads(1)
    if importlib.util.find_spec("highspy") is None:
        print("SKIPPED decide_rivals_bench: no highspy; "
              ".venv/bin/pip install -r requirements-bench.txt", file=sys.stderr)
        return
    against_torch(sizes)
    against_milps(sizes)


if __name__ == "__main__":
    main()
