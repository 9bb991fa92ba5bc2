"""The stage problem as a tensor-level MILP for HiGHS, and the check of the product against it.

Usage: stage_milp.py CASES.jsonl [--limit SECONDS]
  checks every case and prints one JSON line with the distributions; exit 1 if a check fails.

The model: a binary per unit and residency, a binary per op that runs again; an op that runs again
makes the producers of the unsaved storages that it reads run again; max(0, .) is a continuous
column. HiGHS works within tolerances, so no answer of it is believed: every choice is evaluated in
integers (stage_case.py), and one that is over a budget by a byte is cut off and the model solved
again. The last per mille of a proof takes HiGHS most of its time, so check() asks for it only
where the verdict hangs on it.
"""

import argparse
import json
import math
import sys
import time
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np

from milp_model import Milp
from stage_case import (Value, allowed, evaluate, over_budget, parents, producer, read_cases,
                        unit_bytes)

NS = 1e-3  # objective in us: numbers near 1 suit HiGHS's tolerances
GAP_NS = 0.5  # optimal up to this
ROUGH_FRACTION, ROUGH_NS = 1e-3, 5_000  # a tenth of what is allowed
ALLOWED_FRACTION, ALLOWED_NS = 0.01, 50_000  # of the product's cost over the optimum


class Optimum(NamedTuple):
    value: Value | None  # None: no choice fits, or none was found in time
    residency: list[list[str]] | None
    bound_ns: float  # no choice that fits costs less; inf: no choice fits
    proven: bool  # the gap asked for was reached


class StageModel:
    """Columns of one case. A weight row is scaled by its largest entry: see _weights()."""

    def __init__(self, case: dict, minimise_device: bool = False):
        self.case = case
        self.milp = Milp()
        self.by_device = minimise_device
        self.choice: list[list[dict[str, int]]] = []
        self.device: dict[int, int] = {}  # column -> bytes
        self.host: dict[int, int] = {}
        self.budgets: dict[str, tuple[dict[int, int], int]] = {}  # as over_budget() names them
        for m, microbatch in enumerate(case["microbatches"]):
            self._add_microbatch(m, microbatch)
        if minimise_device:
            self._minimise_device()
        else:
            self._limit("device", self.device, case["budget_bytes"])
        if case["host_budget_bytes"] is not None:
            self._limit("host", self.host, case["host_budget_bytes"])

    def _add_microbatch(self, m: int, microbatch: dict) -> None:
        case, milp = self.case, self.milp
        again = [milp.binary() for _ in case["ops"]]
        compute = {op: ns * NS for op, ns in zip(again, microbatch["op_ns"])}
        for op, column in enumerate(again):
            for parent in parents(case, op):
                milp.row({again[parent]: 1.0, column: -1.0}, lower=0.0)
        out: dict[int, int] = {}
        chosen = []
        for unit, spec in enumerate(case["units"]):
            columns = {name: milp.binary() for name in allowed(case, spec)}
            milp.row({column: 1.0 for column in columns.values()}, 1.0, 1.0)
            self.device[columns["save"]] = unit_bytes(case, microbatch, unit)
            if "offload" in columns:
                out[columns["offload"]] = unit_bytes(case, microbatch, unit)
            if "quantise" in columns:
                self.device[columns["quantise"]] = unit_bytes(case, microbatch, unit, True)
                compute[columns["quantise"]] = microbatch["encode_ns"][unit] * NS
            if "recompute" in columns and spec["rebuild"] == "pieces":
                compute[columns["recompute"]] = microbatch["pieces_ns"][unit] * NS
            elif "recompute" in columns:
                milp.row({again[producer(case, unit)]: 1.0, columns["recompute"]: -1.0}, lower=0.0)
            chosen.append(columns)
        self.choice.append(chosen)
        self.host.update(out)
        if case["link_ns_per_byte"] == 0:
            self._limit(f"link {m}", out, microbatch["free_link_bytes"])
        if not self.by_device:
            self._add_costs(microbatch, compute, out)

    def _add_costs(self, microbatch: dict, compute: dict[int, float], out: dict[int, int]) -> None:
        exposed = self.milp.column(cost=1.0)
        self.milp.row({exposed: 1.0, **{c: -us for c, us in compute.items()}},
                      lower=-microbatch["bubble_ns"] * NS)
        weights, unit = _weights(out)
        overflow = self.milp.column(cost=self.case["link_ns_per_byte"] * unit * NS)
        self.milp.row({overflow: 1.0, **{c: -w for c, w in weights.items()}},
                      lower=-microbatch["free_link_bytes"] / unit)

    def _limit(self, name: str, load: dict[int, int], limit: int) -> None:
        self.budgets[name] = load, limit
        weights, unit = _weights(load)
        self.milp.row(weights, upper=limit / unit)

    def _minimise_device(self) -> None:
        weights, _ = _weights(self.device)
        for column, weight in weights.items():
            self.milp.cost[column] = weight

    def residency(self, values: list[float]) -> list[list[str]]:
        return [[max(columns, key=lambda name: values[columns[name]]) for columns in chosen]
                for chosen in self.choice]

    def cut_off(self, residency: list[list[str]], budget: str) -> None:
        """Forbids a set of choices that is over a budget by itself: exact, unlike a margin."""
        load, limit = self.budgets[budget]
        taken = [columns[name] for chosen, names in zip(self.choice, residency)
                 for columns, name in zip(chosen, names) if columns[name] in load]
        cover, total = {}, 0
        for column in sorted(taken, key=lambda c: -load[c]):
            if total <= limit:
                cover[column] = 1.0
                total += load[column]
        self.milp.row(cover, upper=len(cover) - 1.0)


def _weights(load: dict[int, int]) -> tuple[dict[int, float], int]:
    """load in units of a power of two bytes (so that doubles stay exact), at most 2^16 each.

    Then HiGHS's absolute tolerance of 1e-6 is less than a byte up to 64 GiB in one column.
    """
    unit = 1 << max(0, max(load.values(), default=1).bit_length() - 16)
    return {column: size / unit for column, size in load.items() if size}, unit


def solve(case: dict, time_limit_s: float = 60.0, gap_ns: float = GAP_NS,
          gap_fraction: float = 0.0) -> Optimum:
    """Stops when one of the gaps is reached."""
    model = StageModel(case)
    end = time.monotonic() + time_limit_s
    while True:
        answer = model.milp.solve(max(0.01, end - time.monotonic()), gap_ns * NS, gap_fraction)
        bound_ns = answer.bound / NS
        if answer.values is None:
            return Optimum(None, None, bound_ns, answer.status == "infeasible")
        residency = model.residency(answer.values)
        value = evaluate(case, residency)
        over = over_budget(case, value)
        if not over:
            break
        for budget in over:
            model.cut_off(residency, budget)
    cost_ns = float(value.cost_ns)
    # HiGHS reckons its gap with its own objective, which its tolerances move a little.
    wanted = GAP_NS + max(gap_ns, (gap_fraction + 1e-7) * cost_ns)
    return Optimum(value, residency, bound_ns, cost_ns - bound_ns <= wanted)


def solve_milp(case: dict, time_limit_s: float = 60.0
               ) -> tuple[Fraction | None, list[list[str]] | None, bool]:
    """Returns: cost of the cheapest choice that fits, the choice, and whether HiGHS proved it.

    (None, None, True): no choice fits.
    """
    found = solve(case, time_limit_s)
    return found.value.cost_ns if found.value else None, found.residency, found.proven


def least_device_bytes(case: dict, time_limit_s: float = 60.0) -> tuple[int | None, bool]:
    """Returns: device bytes that no choice goes below, host budget and links holding, and whether
    HiGHS proved it. (None, True): no choice fits whatever the device has."""
    model = StageModel({**case, "budget_bytes": 0}, minimise_device=True)
    while True:
        answer = model.milp.solve(time_limit_s, 1e-9)
        if answer.values is None:
            return None, answer.status == "infeasible"
        residency = model.residency(answer.values)
        value = evaluate(case, residency)
        over = [budget for budget in over_budget(case, value) if budget in model.budgets]
        if not over:
            return value.device_bytes, answer.status == "optimal"
        for budget in over:
            model.cut_off(residency, budget)


@dataclass
class Check:
    """What check() saw in one case. Costs in ns."""
    case: int
    problems: list[str] = field(default_factory=list)
    open_questions: list[str] = field(default_factory=list)  # HiGHS ran out of time
    feasible: bool = True
    cost_ns: float = 0.0
    optimum_ns: float = 0.0  # the cheaper of the product's choice and HiGHS's
    optimum_bound_ns: float = 0.0  # HiGHS's
    bound_ns: float = 0.0
    product_ns: int = 0
    milp_ns: int = 0

    @property
    def excess_ns(self) -> float:
        return self.cost_ns - self.optimum_ns

    @property
    def excess_fraction(self) -> float:
        return self.excess_ns / self.optimum_ns if self.optimum_ns > 0 else 0.0


def check(case: dict, time_limit_s: float = 60.0) -> Check:
    """Holds the product's answer against integers and against HiGHS."""
    seen, result = Check(case["case"]), case["result"]
    begin = time.perf_counter_ns()
    best = solve(case, time_limit_s, ROUGH_NS, ROUGH_FRACTION)
    seen.product_ns, seen.feasible = result["solve_ns"], result["feasible"]
    if not result["feasible"]:
        _check_refusal(case, best, seen)
    elif (value := _check_answer(case, seen)) is not None:
        seen.cost_ns, seen.bound_ns = float(value.cost_ns), result["bound_ns"]
        _compare(seen, best)
        if seen.open_questions and not seen.problems:
            seen.open_questions.clear()
            _compare(seen, solve(case, time_limit_s))
    seen.milp_ns = time.perf_counter_ns() - begin
    return seen


def _check_refusal(case: dict, best: Optimum, seen: Check) -> None:
    if best.value is not None:
        seen.problems.append("refused, and a choice fits")
        return
    if not best.proven:
        seen.open_questions.append("refused; HiGHS found no choice that fits in its time")
        return
    least, proven = least_device_bytes(case)
    if least is None:
        return
    missing, said = least - case["budget_bytes"], case["result"]["missing_bytes"]
    if missing < said or (proven and missing != said):
        seen.problems.append(f"says {said} bytes missing: {missing}")
    elif missing != said:
        seen.open_questions.append(f"says {said} bytes missing; HiGHS found {missing}")


def _check_answer(case: dict, seen: Check) -> Value | None:
    """The answer by itself, in integers."""
    result = case["result"]
    try:
        value = evaluate(case, result["residency"])
    except ValueError as error:
        seen.problems.append(str(error))
        return None
    for budget, more in over_budget(case, value).items():
        seen.problems.append(f"{more} bytes over the budget of {budget}")
    if value.device_bytes != result["device_bytes"]:
        seen.problems.append(f"says {result['device_bytes']} device bytes: {value.device_bytes}")
    # The link's part of each micro-batch may be rounded to a whole ns.
    if abs(value.cost_ns - Fraction(result["cost_ns"])) > len(case["microbatches"]):
        seen.problems.append(f"says {result['cost_ns']} ns: {float(value.cost_ns)}")
    return value


def _limit_ns(cost_ns: float) -> float:
    return cost_ns + max(ALLOWED_FRACTION * cost_ns, ALLOWED_NS) + 1


def _compare(seen: Check, best: Optimum) -> None:
    """Cost and bound against the optimum, which lies between HiGHS's bound and the best choice."""
    if math.isinf(best.bound_ns) and best.bound_ns > 0:
        if not seen.problems:
            seen.problems.append("solved, and HiGHS calls it infeasible")
        return
    known = [] if any("over the budget" in problem for problem in seen.problems) else [seen.cost_ns]
    if best.value is not None:
        known.append(float(best.value.cost_ns))
    seen.optimum_ns = min(known, default=best.bound_ns)
    seen.optimum_bound_ns = best.bound_ns
    if seen.cost_ns in known and seen.cost_ns < best.bound_ns * (1 - 1e-7) - 1:
        seen.problems.append(f"{seen.cost_ns} ns is below HiGHS's bound {best.bound_ns} ns")
    if seen.cost_ns > _limit_ns(seen.optimum_ns):
        seen.problems.append(f"{seen.cost_ns} ns is too far above the optimum, at most "
                             f"{seen.optimum_ns} ns")
    elif seen.cost_ns > _limit_ns(best.bound_ns):
        seen.open_questions.append("cost may be too far above the optimum")
    if seen.bound_ns > seen.optimum_ns + 1:
        seen.problems.append(f"bound {seen.bound_ns} ns above {seen.optimum_ns} ns")
    elif seen.bound_ns > best.bound_ns + 1 + 1e-7 * seen.optimum_ns:
        seen.open_questions.append("bound may be above the optimum")


def distribution(values: list[float], digits: int) -> dict[str, float]:
    array = np.array(values)
    return {name: round(float(np.quantile(array, q)), digits)
            for name, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))}


def summary(checks: list[Check]) -> dict:
    solved = [seen for seen in checks if seen.feasible]
    figures = {"figure": "decide_vs_milp", "kind": "measured", "cases": len(checks),
               "infeasible": len(checks) - len(solved),
               "failed": sum(bool(seen.problems) for seen in checks),
               "open": sum(bool(seen.open_questions) for seen in checks)}
    if solved:
        figures |= {
            "cost_zero": sum(seen.cost_ns == 0 for seen in solved),
            "within_1_ns": sum(seen.excess_ns <= 1 for seen in solved),
            "excess_fraction": distribution([s.excess_fraction for s in solved], 6),
            "excess_us": distribution([s.excess_ns / 1e3 for s in solved], 3),
            "optimum_known_to_us": distribution(
                [max(0.0, s.optimum_ns - s.optimum_bound_ns) / 1e3 for s in solved], 3),
            "certified_gap_us": distribution([(s.cost_ns - s.bound_ns) / 1e3 for s in solved], 3),
            "product_us": distribution([s.product_ns / 1e3 for s in solved], 1),
            "milp_ms": distribution([s.milp_ns / 1e6 for s in solved], 1)}
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("cases", type=Path)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for HiGHS per case")
    args = parser.parse_args()
    checks = []
    for case in read_cases(args.cases):
        checks.append(check(case, args.limit))
        for text in checks[-1].problems + checks[-1].open_questions:
            print(f"case {case['case']}: {text}", file=sys.stderr, flush=True)
    print(json.dumps(summary(checks)))
    return int(any(seen.problems for seen in checks))


if __name__ == "__main__":
    sys.exit(main())
