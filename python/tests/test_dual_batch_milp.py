"""The independent optimum of dual-batch schedules (bench/dual_batch_milp.py), before it judges the
product: against numbers worked out by hand. Where dual_batch_cases is built, the product against it
on a few small instances; the optima of all fifty are in tests/data/dual_batch_milp.json, with which
a C++ test compares the solver.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

from dual_batch_milp import COMM, COMPUTE, UNIT_NS, Case, check, solve  # noqa: E402

needs_highs = pytest.mark.skipif(
    importlib.util.find_spec("highspy") is None,
    reason="SKIPPED FOR WANT OF highspy: the independent optimum is not compared with anything; "
           ".venv/bin/pip install -r requirements-bench.txt")
LIMIT_S = 60.0


def make_case(horizon: int, **parts) -> dict:
    """Durations in units; chains as (duration, resource[, host_sync])."""
    case = {"case": 0, "makespan_ns": horizon * UNIT_NS, "bound_ns": horizon * UNIT_NS,
            "forward": [], "backward": [], "weight_grads": [], "rebuilds": [], "copies_out": [],
            "copies_in": [], "weight_lag": 2, "rebuild_lead": 3, "comm_order": []}
    for key, value in parts.items():
        if isinstance(value, list) and key != "comm_order":
            value = [[item[0] * UNIT_NS, *item[1:]] for item in value]
        case[key] = value
    for key in ("forward", "backward"):
        case[key] = [[*op, False] if len(op) == 2 else op for op in case[key]]
    return case


def optimum(case: dict) -> int | None:
    best = solve(case, LIMIT_S)
    assert best.proven
    return None if best.makespan_ns is None else best.makespan_ns // UNIT_NS


@needs_highs
def test_chains_overlap_where_resources_differ():
    # Compute 3, comm 2, compute 3 beside comm 4, compute 2: the compute items need 8, and the
    # first of them can start at once: 3 (comm 4 beside it), 2 from 4 to 6, comm 2 from 4 to 6, 3: 9.
    parts = {"forward": [(3, COMPUTE), (2, COMM), (3, COMPUTE)],
             "backward": [(4, COMM), (2, COMPUTE)]}
    assert optimum(make_case(20, **parts)) == 9
    assert optimum(make_case(9, **parts)) == 9
    assert optimum(make_case(8, **parts)) is None
    # Forward's communication first: backward's starts at 5, ends at 9, its compute at 11.
    assert optimum(make_case(20, **parts, comm_order=[[0, 1], [1, 0]])) == 11


@needs_highs
def test_weight_gradients_fill_gaps_within_their_lag():
    # Backward 2, comm 6, 2, comm 6, 2 with a gradient of 3 behind the first operator and another of
    # 3 behind the second: both fill a communication, 18 in all. With forward compute of 6 the first
    # gap is full; the gradients have to share the second one, where only lag 1 lets them wait.
    backward = [(2, COMPUTE), (6, COMM), (2, COMPUTE), (6, COMM), (2, COMPUTE)]
    parts = {"backward": backward, "weight_grads": [(3, 0), (3, 2)]}
    assert optimum(make_case(40, **parts)) == 18
    parts["forward"] = [(6, COMPUTE)]
    assert optimum(make_case(40, **parts, weight_lag=1)) == 18
    # Without any lag: 2, gradient 3 to 5, forward to 11 or behind the second gradient to 19, ...:
    # forward first 0-6, then 6-8, 11 + 3 beside comm 8-14, 14-16, 16-22, 22-24: 24; forward in the
    # first gap: 2, 3, 6 = 11, then 11-13, 13-19, 19-21: 21; in the second: 2-8, 8-10, 10-13, 13-19,
    # 19-21: 21. At the end: 18 + 6 = 24.
    assert optimum(make_case(40, **parts, weight_lag=0)) == 21


@needs_highs
def test_rebuilds_lead_by_so_many():
    # Comm 5, compute 1, comm 5, compute 1: rebuilds of 4 before each compute. The first is hidden
    # behind the first communication; the second too if it may lead then (with 1: not before backward
    # 1 is issued, but behind that the second communication hides it).
    parts = {"backward": [(5, COMM), (1, COMPUTE), (5, COMM), (1, COMPUTE)],
             "rebuilds": [(4, 1), (4, 3)], "forward": [(3, COMPUTE)]}
    assert optimum(make_case(40, **parts)) == 14
    case = Case(make_case(40, **parts, rebuild_lead=1))
    assert ((1, 1), (3, 1)) in case.before
    assert optimum(make_case(40, **parts, rebuild_lead=1)) == 14
    # No lead: a rebuild is issued when its reader is next, behind comm 5: but streams are free.
    case = Case(make_case(40, **parts, rebuild_lead=0))
    assert ((1, 2), (3, 1)) in case.before and ((1, 0), (3, 0)) in case.before


@needs_highs
def test_copies_are_waited_for():
    parts = {"forward": [(2, COMPUTE), (1, COMM), (2, COMPUTE)], "copies_out": [(9, 0, 2)]}
    assert optimum(make_case(40, **parts)) == 13  # 2 + 9 + 2
    parts = {"backward": [(3, COMPUTE), (1, COMM), (2, COMPUTE)],
             "copies_in": [(4, 0, -1, -1), (6, 2, -1, 0)]}
    assert optimum(make_case(40, **parts)) == 15  # 4 + 3 + 6 + 2


@needs_highs
def test_nothing_issued_behind_a_host_sync_starts_before_its_end():
    # The backward's 4 can be issued before the sync and run beside the communication.
    parts = {"forward": [(2, COMPUTE), (5, COMM, True), (1, COMPUTE)], "backward": [(4, COMPUTE)]}
    assert optimum(make_case(40, **parts)) == 8
    # A weight gradient behind a backward of communication, which the sync must be issued behind by
    # the pinned order: 5 (comm), 5 (sync), and the gradient of 4 issued before or after it.
    parts = {"forward": [(5, COMM, True)], "backward": [(5, COMM)], "weight_grads": [(4, 0)],
             "comm_order": [[1, 0], [0, 0]]}
    assert optimum(make_case(40, **parts)) == 10
    assert optimum(make_case(40, **{**parts, "comm_order": [[0, 0], [1, 0]]})) == 14


@needs_highs
@pytest.mark.parametrize("change, problem", [
    ({"makespan_ns": 100_000}, "HiGHS has 90000, the product 100000"),
    ({"makespan_ns": 80_000}, "no schedule ends at 80000"),
    ({"bound_ns": 80_000}, "not proven: bound 80000, makespan 90000"),
])
def test_check_finds_one_error(change, problem):
    case = make_case(9, forward=[(3, COMPUTE), (2, COMM), (3, COMPUTE)],
                     backward=[(4, COMM), (2, COMPUTE)])
    assert check(case, LIMIT_S)[1] == []
    case |= change
    assert problem in check(case, LIMIT_S)[1]


def dual_batch_cases() -> Path:
    for folder in ("build", "build-core"):
        program = ROOT / folder / "bin/dual_batch_cases"
        if program.exists():
            return program
    pytest.skip("dual_batch_cases is not built: the product is compared with nothing here")


@needs_highs
@pytest.mark.parametrize("number", [0, 5, 7, 10])
def test_product_against_milp(number):
    line = subprocess.run([dual_batch_cases(), "--first", str(number), "--count", "1"], check=True,
                          capture_output=True, text=True, timeout=60).stdout
    best, problems = check(json.loads(line), LIMIT_S)
    assert problems == []
    recorded = json.loads((ROOT / "tests/data/dual_batch_milp.json").read_text(encoding="utf-8"))
    assert best.proven
    assert best.makespan_ns == recorded[str(number)]
