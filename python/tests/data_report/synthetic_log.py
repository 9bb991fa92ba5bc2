"""Writes run logs like those of the demo: four policies, one routing, three spikes.

The numbers are invented but hang together: peaks follow the imbalance, a mitigation lowers them,
losses are equal for all policies. Fixed arithmetic, no random state.
"""

import json
import math
from pathlib import Path
from typing import Any

MIB = 1024 * 1024
BUDGET_BYTES = 96 * MIB
LAYERS = 6
SPIKES = (20, 34, 48)
POLICIES = ("save-all", "static", "full-recompute", "adaptive")


def imbalance(step: int) -> list[float]:
    """Per layer; calm is below 1.2, a spike reaches 2.6 in layers 2 and 3."""
    calm = [1.04 + 0.12 * abs(math.sin(step * 1.7 + layer * 2.3)) for layer in range(LAYERS)]
    if step in SPIKES:
        calm[2], calm[3] = 2.6, 2.2
    return calm


def peak_bytes(policy: str, step: int, rank: int) -> int:
    """Static 52 MiB plus activations in proportion to the hottest layers' rows."""
    load = 1 + (sum(imbalance(step)) / LAYERS - 1) * (1.0 if rank == 1 else 0.5)
    activations = {"full-recompute": 14.0, "static": 34.0}.get(policy, 37.0)
    peak = 52 * MIB + int(activations * load * MIB)
    return min(peak, BUDGET_BYTES - 700_000) if policy == "adaptive" else peak


def _residencies(policy: str, step: int) -> dict[str, int]:
    if policy == "full-recompute":
        return {"save": 8, "recompute": 40, "offload": 0}
    if policy == "static":
        return {"save": 40, "recompute": 8, "offload": 0}
    if policy == "adaptive" and step in SPIKES:
        return {"save": 36, "recompute": 9, "offload": 3}
    return {"save": 48, "recompute": 0, "offload": 0}


def _memory(policy: str, step: int) -> dict[str, Any]:
    """Up through the forward, down through the backward, in 120 points."""
    top = peak_bytes(policy, step, 1) - 52 * MIB
    points = []
    for index in range(120):
        climb = index / 60 if index < 60 else (119 - index) / 60
        wave = 1.5 * MIB * (index % 5 == 2)
        live = 52 * MIB + max(0, int(top * min(1.0, climb) - wave))
        points.append([index * 3_000_000, live, f"layer{index % LAYERS}.expert_fc1"])
    return {"type": "memory", "step": step, "rank": 1, "points": points}


def records(policy: str, steps: int = 60) -> list[dict[str, Any]]:
    """All records of one run, in the order a trainer writes them."""
    budget = None if policy == "save-all" else BUDGET_BYTES
    model = {"name": "demo-moe", "layers": LAYERS, "hidden": 128, "experts": 16, "top_k": 2}
    out: list[dict[str, Any]] = [{
        "type": "run", "version": 1, "bagualu": "0.1.0", "policy": policy, "world_size": 4,
        "ep": 4, "dtype": "fp32", "seed": 1, "budget_bytes": budget, "host_budget_bytes": None,
        "static_bytes": 52 * MIB, "floor_bytes": 63 * MIB, "model": model, "micro_batch_size": 4,
        "seq": 128, "microbatches": 2, "steps": steps, "argv": ["train"]}]
    for step in range(1, steps + 1):
        if policy == "static" and step in SPIKES:
            out.append({"type": "oom", "step": step, "rank": 1, "microbatch": 0, "layer": 3,
                        "op": "expert_fc1", "wanted_bytes": 3 * MIB, "left_bytes": MIB,
                        "budget_bytes": BUDGET_BYTES})
            break
        out += _step(policy, step)
    done = sum(1 for record in out if record["type"] == "step")
    whole = done == steps
    out.append({
        "type": "summary", "policy": policy, "world_size": 4, "steps_completed": done,
        "oom_count": 0 if whole else 1, "restarts": 0, "tokens_per_s": _speed(policy, 1),
        "budget_bytes": budget,
        "peak_bytes": [max(peak_bytes(policy, s, r) for s in range(1, done + 1))
                       for r in range(4)],
        "loss_digest": f"{steps:016x}" if whole else f"{done:016x}", "grad_digest": "0",
        "spikes": len(SPIKES), "spikes_survived": len(SPIKES) if whole else 0,
        "decision_ns": {"p50": 21_000, "p99": 640_000, "max": 1_900_000,
                        "total_per_step_max": 2_600_000},
        "plan_cache_hit_fraction": 0.985})
    return out


def _speed(policy: str, step: int) -> float:
    base = {"save-all": 3050.0, "static": 2980.0, "full-recompute": 2270.0}.get(policy, 3010.0)
    slow = 0.93 if policy == "adaptive" and step in SPIKES else 1.0
    return base * slow * (1 + 0.02 * math.sin(step * 12.9898))


def _step(policy: str, step: int) -> list[dict[str, Any]]:
    spike = step in SPIKES
    tokens = 4096
    out: list[dict[str, Any]] = []
    if policy == "adaptive" and spike:
        out.append({
            "type": "mitigation", "step": step, "rank": 1, "microbatch": 0, "layer": 2,
            "load_imbalance": 2.6, "needed_bytes": 4 * MIB, "cost_ns": 9_400_000,
            "actions": [{"unit": "layer2.moe_act", "residency": "recompute", "bytes": 3 * MIB,
                         "ns": 4_100_000},
                        {"unit": "layer2.expert_fc1", "residency": "offload", "bytes": 2 * MIB,
                         "ns": 5_300_000}]})
    ranks = [{"rank": rank, "peak_bytes": peak_bytes(policy, step, rank),
              "predicted_peak_bytes": peak_bytes(policy, step, rank), "end_bytes": 52 * MIB,
              "host_peak_bytes": 0, "rows": [512] * LAYERS,
              "residencies": _residencies(policy, step), "bytes_recomputed": 0,
              "bytes_offloaded": 0, "wait_ns": 0, "cache_hits": 5, "comm_ns": 90_000_000,
              "decision_ns": [20_000 + 900 * ((step * 7 + layer) % 11)
                              for layer in range(LAYERS)]} for rank in range(4)]
    speed = _speed(policy, step)
    out.append({"type": "step", "step": step, "lr": 3e-4, "grad_norm": 1.0, "aux_loss": 1.02,
                "loss": 1.9 + 0.9 * math.exp(-step / 25) + 0.03 * math.sin(step * 2.1),
                "z_loss": 0.1, "domain": ["plays", "bible"], "tokens": tokens, "spike": spike,
                "step_ns": int(tokens / speed * 1e9), "tokens_per_s": speed,
                "imbalance": imbalance(step), "ranks": ranks})
    if step == 1 or (policy == "adaptive" and spike):
        out.append(_memory(policy, step))
    if step % 20 == 0:
        out.append({"type": "validation", "step": step, "loss": 1.95 + 0.9 * math.exp(-step / 25)})
    return out


def write_log(path: Path, policy: str, steps: int = 60) -> Path:
    """Writes one log and returns its path."""
    lines = [json.dumps(record) for record in records(policy, steps)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def write_demo(folder: Path, steps: int = 60) -> list[Path]:
    """One log per policy of the demo."""
    return [write_log(folder / f"{policy}.jsonl", policy, steps) for policy in POLICIES]
