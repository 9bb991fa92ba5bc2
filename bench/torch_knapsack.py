"""A rival: PyTorch's knapsack solvers for activation checkpointing, on a case without offload.

They take independent items (memory as a fraction of the whole, runtime) and a budget, and return
which items to save. What they return is valued by stage_case.py: dp_knapsack rounds each item to
1/10,000 of the whole and may come out over the budget.
"""

import time

from stage_case import compute_ns, unit_bytes


def torch_knapsack(case: dict, solver: str) -> tuple[list[list[str]], float]:
    """solver: a function of torch._functorch._activation_checkpointing.knapsack, by name.

    Returns: the residencies, and the seconds inside the solver.
    """
    from torch._functorch._activation_checkpointing import knapsack
    residency = [["save"] * len(case["units"]) for _ in case["microbatches"]]
    items, sizes, times, fixed = [], [], [], 0
    for m, microbatch in enumerate(case["microbatches"]):
        for u, unit in enumerate(case["units"]):
            size = unit_bytes(case, microbatch, u)
            if unit["pinned"] or unit["rebuild"] == "never":
                fixed += size
            elif size > 0:
                alone = ["save"] * len(case["units"])
                alone[u] = "recompute"
                items.append((m, u))
                sizes.append(size)
                times.append(float(compute_ns(case, microbatch, alone)))
    whole = sum(sizes)
    memory = [size / whole for size in sizes]
    budget = max(0.0, (case["budget_bytes"] - fixed) / whole)
    begin = time.perf_counter()
    _, _, dropped = getattr(knapsack, solver)(memory, times, budget)
    seconds = time.perf_counter() - begin
    for item in dropped:
        m, u = items[item]
        residency[m][u] = "recompute"
    return residency, seconds
