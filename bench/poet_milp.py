"""A rival: rematerialisation and paging over time steps, in the manner of POET (ICML 2022).

POET's variables, on one stage problem: per micro-batch, time step t and node i
  R  op i runs at t                     S_ram  i is in device memory when t begins
  S_sd  i is on the host when t begins  M_in, M_out  i is paged in, out during t
Steps: the forward of every op, then the peak, then the backward of every unit in reverse order of
its producer. Nodes are storages that nobody saves, and units. The device budget holds at the peak,
as in the stage problem; the objective is what the stage problem counts: ops that run again beyond
the bubble, bytes paged out beyond the free window. It knows no quantised residency.
Rows that tie steps together (retention, availability) are POET's; the optimum is that of the stage
problem, with (ops x steps) times the columns: this file shows what that costs.
"""

import time

from milp_model import Milp
from stage_case import evaluate, over_budget, producer, unit_bytes

NS = 1e-3  # objective in us


class PoetModel:
    def __init__(self, case: dict):
        self.case = case
        self.milp = Milp()
        self.units = len(case["units"])
        storages = case["storages"]
        # Nodes: units first, then the unsaved storages that an op makes.
        self.unsaved = {s: self.units + n for n, s in enumerate(
            s for s, spec in enumerate(storages) if spec["unit"] == -1 and spec["producer"] >= 0)}
        self.maker = [producer(case, u) for u in range(self.units)]
        self.maker += [storages[s]["producer"] for s in self.unsaved]
        self.peak = len(case["ops"])
        self.order = sorted(range(self.units), key=lambda u: -self.maker[u])
        self.at_peak: list[list[int]] = []  # S_ram of the units, by micro-batch
        self.paged: list[list[int]] = []  # S_sd at the peak
        device: dict[int, float] = {}
        host: dict[int, float] = {}
        self.mib = float(1 << 20)
        for microbatch in case["microbatches"]:
            self._add_microbatch(microbatch, device, host)
        self.milp.row(device, upper=case["budget_bytes"] / self.mib)
        if case["host_budget_bytes"] is not None:
            self.milp.row(host, upper=case["host_budget_bytes"] / self.mib)

    def _add_microbatch(self, microbatch: dict, device: dict, host: dict) -> None:
        milp, case = self.milp, self.case
        steps = self.peak + 1 + self.units
        nodes, ops = len(self.maker), len(case["ops"])
        run = [[milp.binary() for _ in range(ops)] for _ in range(steps)]
        pieces = [[milp.binary() for _ in range(self.units)] for _ in range(steps)]
        ram, sd, page_in, page_out = ([[milp.binary() for _ in range(nodes)]
                                       for _ in range(steps + 1)] for _ in range(4))
        for node in range(nodes):  # nothing is there before the first step
            milp.column_upper[ram[0][node]] = milp.column_upper[sd[0][node]] = 0.0
        for t in range(steps):
            self._add_step(t, run, pieces, ram, sd, page_in, page_out)
        self._add_costs(microbatch, run, pieces, page_out)
        for unit in range(self.units):
            size = unit_bytes(case, microbatch, unit) / self.mib
            device[ram[self.peak][unit]] = size
            host[sd[self.peak][unit]] = size
        self.at_peak.append(ram[self.peak][:self.units])
        self.paged.append(sd[self.peak][:self.units])

    def _add_step(self, t, run, pieces, ram, sd, page_in, page_out) -> None:
        milp, case = self.milp, self.case
        for op in range(len(case["ops"])):
            if t < self.peak:  # the forward runs op t, and nothing again
                fixed = float(op == t)
                milp.column_lower[run[t][op]] = milp.column_upper[run[t][op]] = fixed
            elif t == self.peak:
                milp.column_upper[run[t][op]] = 0.0
            for storage in case["ops"][op]["reads"]:
                node = self.unsaved.get(storage)
                if node is not None:  # at hand, or made in this step by the op before
                    milp.row({run[t][op]: -1.0, ram[t][node]: 1.0,
                              run[t][self.maker[node]]: 1.0}, lower=0.0)
        for node, maker in enumerate(self.maker):
            made = self._made(t, node, maker, run, pieces)
            milp.row({ram[t + 1][node]: -1.0, ram[t][node]: 1.0, page_in[t][node]: 1.0, **made},
                     lower=0.0)
            milp.row({sd[t + 1][node]: -1.0, sd[t][node]: 1.0, page_out[t][node]: 1.0}, lower=0.0)
            milp.row({page_in[t][node]: -1.0, sd[t][node]: 1.0}, lower=0.0)
            milp.row({page_out[t][node]: -1.0, ram[t][node]: 1.0, **made}, lower=0.0)
            self._bounds(t, node, ram, page_out)
        if t > self.peak:  # the backward of this unit reads it
            unit = self.order[t - self.peak - 1]
            milp.row({ram[t][unit]: 1.0, page_in[t][unit]: 1.0,
                      **self._made(t, unit, self.maker[unit], run, pieces)}, lower=1.0)

    def _made(self, t, node, maker, run, pieces) -> dict[int, float]:
        """What brings node into being in step t: its op, or a rebuild in pieces."""
        if node >= self.units or t < self.peak:
            return {run[t][maker]: 1.0}
        rebuild = self.case["units"][node]["rebuild"]
        if rebuild == "never" or self.case["units"][node]["pinned"]:
            return {}
        return {run[t][maker] if rebuild == "op" else pieces[t][node]: 1.0}

    def _bounds(self, t, node, ram, page_out) -> None:
        upper = self.milp.column_upper
        if node >= self.units:
            upper[page_out[t][node]] = 0.0  # transients are not paged
            if t == self.peak:
                upper[ram[t][node]] = 0.0  # nor held at the peak
            return
        if t >= self.peak:
            upper[page_out[t][node]] = 0.0  # too late
        if self.case["units"][node]["pinned"] and t == self.peak:
            self.milp.column_lower[ram[t][node]] = 1.0

    def _add_costs(self, microbatch, run, pieces, page_out) -> None:
        milp = self.milp
        exposed, overflow = milp.column(1.0), milp.column(
            self.case["link_ns_per_byte"] * self.mib * NS)
        compute, out = {exposed: 1.0}, {overflow: 1.0}
        for t in range(self.peak, len(run)):
            compute |= {run[t][op]: -ns * NS for op, ns in enumerate(microbatch["op_ns"])}
            compute |= {pieces[t][u]: -ns * NS for u, ns in enumerate(microbatch["pieces_ns"])}
        for t in range(self.peak):
            out |= {page_out[t][u]: -unit_bytes(self.case, microbatch, u) / self.mib
                    for u in range(self.units)}
        milp.row(compute, lower=-microbatch["bubble_ns"] * NS)
        milp.row(out, lower=-microbatch["free_link_bytes"] / self.mib)
        if self.case["link_ns_per_byte"] == 0:  # nothing goes past the free bytes
            milp.column_upper[overflow] = 0.0

    def residency(self, values: list[float]) -> list[list[str]]:
        """What the state at the peak means for each unit."""
        def name(kept: float, out: float) -> str:
            return "save" if kept > 0.5 else "offload" if out > 0.5 else "recompute"
        return [[name(values[r], values[s]) for r, s in zip(ram, sd)]
                for ram, sd in zip(self.at_peak, self.paged)]


def solve_poet(case: dict, time_limit_s: float = 10.0
               ) -> tuple[list[list[str]] | None, float, bool]:
    """Returns: a choice that fits or None; seconds, building included; whether it was proven."""
    begin = time.perf_counter()
    model = PoetModel(case)
    answer = model.milp.solve(time_limit_s, 0.5 * NS)
    seconds = time.perf_counter() - begin
    if answer.values is None:
        return None, seconds, answer.status == "infeasible"
    residency = model.residency(answer.values)
    if over_budget(case, evaluate(case, residency)):
        return None, seconds, False
    return residency, seconds, answer.status == "optimal"


def columns(case: dict) -> int:
    """Size of the model, to choose cases that it can still solve."""
    ops, units = len(case["ops"]), len(case["units"])
    unsaved = sum(s["unit"] == -1 and s["producer"] >= 0 for s in case["storages"])
    steps = ops + 1 + units
    return len(case["microbatches"]) * steps * (ops + units + 4 * (units + unsaved))
