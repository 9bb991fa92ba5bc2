"""One dumped stage problem: what a choice of residencies costs, in exact integers.

Written from this statement alone and sharing no code with the product, so that an error there
cannot hide here. Micro-batches m in flight, each the same graph at its own loads:
  save        the unit's bytes stay on the device; pinned units are always saved
  offload     0 bytes on the device, the unit's bytes over the link
  recompute   0 bytes; not if rebuild is "never". "pieces": pieces_ns of its own. "op": its producer
              runs again, and so does what makes the unsaved storages (unit -1) that an op run again
              reads; each op once per micro-batch
  quantise    encoded bytes stay, encode_ns; only where allowed
  cost = sum of max(0, compute_ns(m) - bubble_ns(m))
       + link_ns_per_byte * sum of max(0, offloaded(m) - free_link_bytes(m))
  device bytes of all m <= budget_bytes; offloaded bytes of all m <= host_budget_bytes, unless null
A case is one line of what decide_cases prints:
  storages, units, ops   the graph
  microbatches           per micro-batch: free_link_bytes, bubble_ns, bytes by storage, ns by op and
                         by unit
  link_ns_per_byte       of bytes past the free ones; 0 = nothing may go past them
  recompute_only         if true, units are saved or recomputed, nothing else
  result                 what the product answered
"""

import json
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

RESIDENCIES = ("save", "recompute", "offload", "quantise")


class Value(NamedTuple):
    device_bytes: int
    offloaded_bytes: list[int]  # by micro-batch
    cost_ns: Fraction


def read_cases(path: Path) -> Iterator[dict]:
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            if line.strip():
                yield json.loads(line)


def allowed(case: dict, unit: dict) -> tuple[str, ...]:
    """Residencies that this unit may get."""
    if unit["pinned"]:
        return ("save",)
    only_recompute = case.get("recompute_only", False)
    found = ["save"] if only_recompute else ["save", "offload"]
    if unit["rebuild"] != "never":
        found.append("recompute")
    if case["allow_quantise"] and not only_recompute:
        found.append("quantise")
    return tuple(found)


def unit_bytes(case: dict, microbatch: dict, unit: int, encoded: bool = False) -> int:
    sizes = microbatch["encoded_bytes" if encoded else "storage_bytes"]
    return sum(sizes[storage] for storage in case["units"][unit]["storages"])


def producer(case: dict, unit: int) -> int:
    """The op that leaves this unit behind."""
    producers = {case["storages"][storage]["producer"]
                 for storage in case["units"][unit]["storages"]}
    if len(producers) != 1:
        raise ValueError(f"unit {case['units'][unit]['name']} has producers {sorted(producers)}")
    return producers.pop()


def parents(case: dict, op: int) -> list[int]:
    """Ops that have to run before op can run again: they create unsaved storages that it reads."""
    found = []
    for storage in case["ops"][op]["reads"]:
        spec = case["storages"][storage]
        if spec["unit"] == -1 and spec["producer"] >= 0:
            found.append(spec["producer"])
    return found


def closure(case: dict, ops: list[int]) -> set[int]:
    """ops and everything that running them again runs, each once."""
    todo, found = list(ops), set()
    while todo:
        op = todo.pop()
        if op not in found:
            found.add(op)
            todo += parents(case, op)
    return found


def compute_ns(case: dict, microbatch: dict, chosen: list[str]) -> int:
    """Compute that one micro-batch adds: rebuilt units, encoding and decoding."""
    total, again = 0, []
    for unit, residency in enumerate(chosen):
        if residency == "quantise":
            total += microbatch["encode_ns"][unit]
        elif residency == "recompute" and case["units"][unit]["rebuild"] == "pieces":
            total += microbatch["pieces_ns"][unit]
        elif residency == "recompute":
            again.append(producer(case, unit))
    return total + sum(microbatch["op_ns"][op] for op in closure(case, again))


def evaluate(case: dict, residency: list[list[str]]) -> Value:
    """Bytes and cost of a choice, whether or not it fits the budgets.

    Raises ValueError for a residency that a unit may not have.
    """
    if len(residency) != len(case["microbatches"]):
        raise ValueError(f"{len(residency)} residencies, {len(case['microbatches'])} micro-batches")
    device, offloaded, cost = 0, [], Fraction(0)
    for microbatch, chosen in zip(case["microbatches"], residency):
        if len(chosen) != len(case["units"]):
            raise ValueError(f"{len(chosen)} residencies for {len(case['units'])} units")
        out = 0
        for unit, name in enumerate(chosen):
            if name not in allowed(case, case["units"][unit]):
                raise ValueError(f"unit {case['units'][unit]['name']} may not be: {name}")
            if name == "save":
                device += unit_bytes(case, microbatch, unit)
            elif name == "quantise":
                device += unit_bytes(case, microbatch, unit, encoded=True)
            elif name == "offload":
                out += unit_bytes(case, microbatch, unit)
        offloaded.append(out)
        cost += max(0, compute_ns(case, microbatch, chosen) - microbatch["bubble_ns"])
        cost += Fraction(case["link_ns_per_byte"]) * max(0, out - microbatch["free_link_bytes"])
    return Value(device, offloaded, cost)


def over_budget(case: dict, value: Value) -> dict[str, int]:
    """Bytes over each budget that is broken; empty if the choice fits."""
    over = {}
    if value.device_bytes > case["budget_bytes"]:
        over["device"] = value.device_bytes - case["budget_bytes"]
    host = case["host_budget_bytes"]
    if host is not None and sum(value.offloaded_bytes) > host:
        over["host"] = sum(value.offloaded_bytes) - host
    if case["link_ns_per_byte"] == 0:
        for m, (microbatch, out) in enumerate(zip(case["microbatches"], value.offloaded_bytes)):
            if out > microbatch["free_link_bytes"]:
                over[f"link {m}"] = out - microbatch["free_link_bytes"]
    return over
