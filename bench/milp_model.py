"""A thin layer over HiGHS: columns, rows, one solve. Needs highspy (requirements-bench.txt)."""

import ctypes
import math
import os
import sys
from dataclasses import dataclass, field
from typing import NamedTuple

INF = math.inf


class Answer(NamedTuple):
    status: str  # "optimal", "infeasible" or "time limit"
    values: list[float] | None  # by column; None if no solution was found
    bound: float  # proven lower bound on the objective


@dataclass
class Milp:
    """minimise cost x, lower <= A x <= upper; rows may be added between solves."""
    cost: list[float] = field(default_factory=list)
    column_lower: list[float] = field(default_factory=list)
    column_upper: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    rows: list[tuple[dict[int, float], float, float]] = field(default_factory=list)

    def column(self, cost: float = 0.0, lower: float = 0.0, upper: float = INF,
               integer: bool = False) -> int:
        self.cost.append(cost)
        self.column_lower.append(lower)
        self.column_upper.append(upper)
        self.integer.append(integer)
        return len(self.cost) - 1

    def binary(self, cost: float = 0.0) -> int:
        return self.column(cost, 0.0, 1.0, integer=True)

    def row(self, terms: dict[int, float], lower: float = -INF, upper: float = INF) -> None:
        self.rows.append((terms, lower, upper))

    def solve(self, time_limit_s: float, absolute_gap: float, relative_gap: float = 0.0) -> Answer:
        import highspy
        solver = _make_highs(highspy)
        for option, value in (("output_flag", False), ("threads", 1), ("mip_rel_gap", relative_gap),
                              ("mip_abs_gap", absolute_gap), ("time_limit", time_limit_s),
                              ("mip_feasibility_tolerance", 1e-9)):
            solver.setOptionValue(option, value)
        solver.passModel(self._highs_lp(highspy))
        solver.run()
        status = solver.getModelStatus()
        info = solver.getInfo()
        if status in (highspy.HighsModelStatus.kInfeasible,
                      highspy.HighsModelStatus.kUnboundedOrInfeasible):
            return Answer("infeasible", None, INF)
        known = {highspy.HighsModelStatus.kOptimal: "optimal",
                 highspy.HighsModelStatus.kTimeLimit: "time limit"}
        if status not in known:
            raise RuntimeError(f"HiGHS stopped with {solver.modelStatusToString(status)}")
        # Without integer columns left after presolve HiGHS reports no bound of its own.
        bound = info.mip_dual_bound if any(self.integer) else info.objective_function_value
        found = info.primal_solution_status == 2  # feasible
        return Answer(known[status], list(solver.getSolution().col_value) if found else None, bound)

    def _highs_lp(self, highspy):
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = len(self.cost), len(self.rows)
        model.col_cost_ = self.cost
        model.col_lower_, model.col_upper_ = self.column_lower, self.column_upper
        model.integrality_ = [highspy.HighsVarType.kInteger if whole
                              else highspy.HighsVarType.kContinuous for whole in self.integer]
        model.row_lower_ = [lower for _, lower, _ in self.rows]
        model.row_upper_ = [upper for _, _, upper in self.rows]
        start, index, value = [0], [], []
        for terms, _, _ in self.rows:
            index += terms.keys()
            value += terms.values()
            start.append(len(index))
        matrix = model.a_matrix_
        matrix.format_ = highspy.MatrixFormat.kRowwise
        matrix.num_col_, matrix.num_row_ = len(self.cost), len(self.rows)
        matrix.start_, matrix.index_, matrix.value_ = start, index, value
        return model


def _make_highs(highspy):
    """A solver. The first one prints a banner; standard output carries figures only."""
    sys.stdout.flush()
    out = os.dup(1)
    os.dup2(2, 1)
    try:
        solver = highspy.Highs()
        ctypes.CDLL(None).fflush(None)  # the banner is in the buffer of the C library
        return solver
    finally:
        os.dup2(out, 1)
        os.close(out)
