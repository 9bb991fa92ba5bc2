"""Dual-batch schedules as a disjunctive MILP for HiGHS, and the check of the product against it.

Usage: dual_batch_milp.py CASES.jsonl [--limit SECONDS] [--write FILE]
  CASES: lines of dual_batch_cases. Checks every case, prints one JSON line per case and one with
  the sum; --write records the proven optima for the C++ test. Exit 1 if a check fails.

The model: a start per item and copy, a binary per pair of items whose order is open, big-M. Windows
and host synchronisation speak of the order in which items are issued, so a binary says which of two
is issued first, and where they share a stream, which runs first. Time is in units of 10 us, of which
all durations are multiples: a gap under one unit is none. The product's makespan is the horizon, so
"infeasible" means that no such schedule exists.
"""

import argparse
import json
import sys
import time
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from milp_model import Milp

UNIT_NS = 10_000
COMPUTE, COMM = 0, 1
FORWARD, BACKWARD, WEIGHT_GRAD, REBUILD = range(4)
Item = tuple[int, int]  # kind, index


class Optimum(NamedTuple):
    makespan_ns: int | None  # None: no schedule within the horizon
    proven: bool


class Case:
    """Items, durations and what must be issued before what."""

    def __init__(self, case: dict):
        self.case = case
        self.chains = {FORWARD: case["forward"], BACKWARD: case["backward"]}
        self.items: list[Item] = [(kind, i) for kind, key in enumerate(
            ("forward", "backward", "weight_grads", "rebuilds")) for i in range(len(case[key]))]
        self.before = self._issue_order()

    def duration(self, item: Item) -> int:
        kind, index = item
        key = ("forward", "backward", "weight_grads", "rebuilds")[kind]
        return units(self.case[key][index][0])

    def resource(self, item: Item) -> int:
        kind, index = item
        return self.chains[kind][index][1] if kind in self.chains else COMPUTE

    def syncs(self, item: Item) -> bool:
        kind, index = item
        return kind in self.chains and self.chains[kind][index][2]

    def starts_after(self) -> list[tuple[Item, Item]]:
        """Pairs (a, b): b starts when a has ended or later; copies left out."""
        pairs = [((kind, i - 1), (kind, i)) for kind, chain in self.chains.items()
                 for i in range(1, len(chain))]
        pairs += [((BACKWARD, after), (WEIGHT_GRAD, k))
                  for k, (_, after) in enumerate(self.case["weight_grads"])]
        pairs += [((REBUILD, r), (BACKWARD, before))
                  for r, (_, before) in enumerate(self.case["rebuilds"])]
        return pairs

    def _issue_order(self) -> set[tuple[Item, Item]]:
        case = self.case
        pairs = set(self.starts_after())
        pairs |= {((kind, i - 1), (kind, i)) for kind, i in self.items if i > 0}
        pairs |= {((BACKWARD, freed), (REBUILD, reader)) for _, _, reader, freed
                  in case["copies_in"] if reader >= 0 and freed >= 0}
        # A rebuild waits until few enough lead: r - (rebuilds whose reader is issued) < lead, or its
        # own reader is next. Both come true at one backward operator and stay true.
        readers = [before for _, before in case["rebuilds"]]
        for r, own in enumerate(readers):
            for next_op in range(own + 1):
                leading = r - sum(reader < next_op for reader in readers[:r])
                if leading < case["rebuild_lead"] or next_op == own:
                    if next_op > 0:
                        pairs.add(((BACKWARD, next_op - 1), (REBUILD, r)))
                    break
        comm = [tuple(item) for item in case["comm_order"]]
        pairs |= set(zip(comm, comm[1:]))
        return closure(pairs, self.items)

    def windows(self) -> list[tuple[Item, Item]]:
        """Pairs (b, w): what is issued behind b, weight gradients aside, is issued behind w."""
        lag, found = self.case["weight_lag"], []
        sources = [after for _, after in self.case["weight_grads"]]
        for j in range(len(self.case["backward"])):
            due = sum(source <= j for source in sources) - lag - 1
            if due >= 0:
                found.append(((BACKWARD, j), (WEIGHT_GRAD, due)))
        return found


def units(ns: int) -> int:
    assert ns % UNIT_NS == 0, ns
    return ns // UNIT_NS


def closure(pairs: set, items: list) -> set:
    after = {item: {b for a, b in pairs if a == item} for item in items}
    for via in items:
        for item in items:
            if via in after[item]:
                after[item] |= after[via]
    assert all(item not in after[item] for item in items), "the case contradicts itself"
    return {(a, b) for a in items for b in after[a]}


class ScheduleModel:
    def __init__(self, case: dict):
        self.case = Case(case)
        self.horizon = units(case["makespan_ns"])
        self.milp = Milp()
        self.makespan = self.milp.column(cost=1.0, upper=self.horizon)
        self.start = {item: self._start(self.case.duration(item)) for item in self.case.items}
        self.first: dict[tuple[Item, Item], int] = {}  # a is issued before b: column
        for a, b in self.case.starts_after():
            self._after(self.start[b], self.start[a], self.case.duration(a))
        self._copies(case)
        self._orders()
        self._windows()

    def _start(self, duration: int) -> int:
        column = self.milp.column(upper=self.horizon - duration)
        self.milp.row({self.makespan: 1.0, column: -1.0}, lower=duration)
        return column

    def _after(self, later: int, earlier: int, duration: int) -> None:
        self.milp.row({later: 1.0, earlier: -1.0}, lower=duration)

    def _copies(self, case: dict) -> None:
        def engine(copies: list[tuple[int, Item | None, list[Item]]]) -> None:
            last = None
            for ns, source, readers in copies:
                duration = units(ns)
                column = self._start(duration)
                if source is not None:
                    self._after(column, self.start[source], self.case.duration(source))
                if last is not None:
                    self._after(column, *last)
                for reader in readers:
                    self._after(self.start[reader], column, duration)
                last = column, duration
        engine([(ns, (FORWARD, source), [(FORWARD, freed)] if freed >= 0 else [])
                for ns, source, freed in case["copies_out"]])
        engine([(ns, (BACKWARD, freed) if freed >= 0 else None,
                 [(BACKWARD, op)] + ([(REBUILD, rebuild)] if rebuild >= 0 else []))
                for ns, op, rebuild, freed in case["copies_in"]])

    def _orders(self) -> None:
        syncs = any(self.case.syncs(item) for item in self.case.items)
        for a, b in combinations(self.case.items, 2):
            if syncs or self.case.resource(a) == self.case.resource(b):
                self._order(a, b)
        if syncs:
            # Pairs by time alone are free of cycles; with the host's order they need a position.
            place = {item: self.milp.column(upper=len(self.case.items) - 1.0)
                     for item in self.case.items}
            for (a, b), column in list(self.first.items()):
                size = float(len(self.case.items))
                self.milp.row({place[b]: 1.0, place[a]: -1.0, column: -size}, lower=1.0 - size)

    def _order(self, a: Item, b: Item) -> None:
        if (a, b) in self.case.before or (b, a) in self.case.before:
            one, two = (a, b) if (a, b) in self.case.before else (b, a)
            column = self.milp.column(lower=1.0, upper=1.0)
            self.first[one, two] = column
            self._runs_before(one, two, column)
            return
        column, other = self.milp.binary(), self.milp.binary()
        self.milp.row({column: 1.0, other: 1.0}, 1.0, 1.0)
        self.first[a, b], self.first[b, a] = column, other
        self._runs_before(a, b, column)
        self._runs_before(b, a, other)

    def _runs_before(self, a: Item, b: Item, column: int) -> None:
        if self.case.resource(a) != self.case.resource(b) and not self.case.syncs(a):
            return
        duration, big = self.case.duration(a), float(self.horizon)
        self.milp.row({self.start[b]: 1.0, self.start[a]: -1.0, column: -big},
                      lower=duration - big)

    def _windows(self) -> None:
        for backward, grad in self.case.windows():
            for item in self.case.items:
                if item[0] == WEIGHT_GRAD or item == backward:
                    continue
                if (backward, item) in self.first and (grad, item) in self.first:
                    self.milp.row({self.first[grad, item]: 1.0,
                                   self.first[backward, item]: -1.0}, lower=0.0)
                elif (backward, item) in self.first and (item, grad) in self.first:
                    self.milp.row({self.first[backward, item]: 1.0}, upper=0.0)
                elif (grad, item) in self.first and (backward, item) in self.case.before:
                    self.milp.row({self.first[grad, item]: 1.0}, lower=1.0)


def solve(case: dict, time_limit_s: float) -> Optimum:
    model = ScheduleModel(case)
    answer = model.milp.solve(time_limit_s, absolute_gap=0.4)
    if answer.values is None:
        return Optimum(None, answer.status == "infeasible")
    makespan = round(answer.values[model.makespan])
    return Optimum(makespan * UNIT_NS, answer.bound > makespan - 0.5)


def check(case: dict, time_limit_s: float) -> tuple[Optimum, list[str]]:
    best = solve(case, time_limit_s)
    problems = []
    if case["bound_ns"] != case["makespan_ns"]:
        problems.append(f"not proven: bound {case['bound_ns']}, makespan {case['makespan_ns']}")
    if best.makespan_ns is None and best.proven:
        problems.append(f"no schedule ends at {case['makespan_ns']}")
    if best.makespan_ns is not None and best.makespan_ns < case["makespan_ns"]:
        problems.append(f"HiGHS has {best.makespan_ns}, the product {case['makespan_ns']}")
    return best, problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", type=Path)
    parser.add_argument("--limit", type=float, default=600.0, metavar="SECONDS")
    parser.add_argument("--write", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    optima, problems, seconds = {}, [], []
    for line in arguments.cases.read_text(encoding="utf-8").splitlines():
        case = json.loads(line)
        begin = time.perf_counter()
        best, found = check(case, arguments.limit)
        seconds.append(time.perf_counter() - begin)
        problems += [f"case {case['case']}: {problem}" for problem in found]
        if best.proven and best.makespan_ns is not None:
            optima[case["case"]] = best.makespan_ns
        print(json.dumps({"case": case["case"], "optimum_ns": best.makespan_ns,
                          "proven": best.proven, "makespan_ns": case["makespan_ns"],
                          "highs_s": round(seconds[-1], 2), "problems": found}), flush=True)
    print(json.dumps({"cases": len(seconds), "proven": len(optima), "problems": problems,
                      "highs_s_max": round(max(seconds), 2)}))
    if arguments.write:
        text = ",\n".join(f'  "{number}": {ns}' for number, ns in optima.items())
        arguments.write.write_text("{\n" + text + "\n}\n", encoding="utf-8")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
