"""One rank of test_any_residency.py: python any_residency_worker.py OUT_FOLDER VECTORS."""

import json
import random
import sys
from pathlib import Path

from job import MODEL, Rank, digest, tokens_of

TOKENS, TOP_K, EXPERTS = 24, MODEL["top_k"], MODEL["experts"]
VECTORS_PER_ROUTING = 16
RESIDENCIES = ("save", "recompute", "offload")


def counts_on(experts: list[int], ep_size: int, draw: random.Random) -> list[int]:
    """Counts of one layer, all on these experts, at most one per token and expert."""
    most, left = TOKENS * ep_size, TOKENS * ep_size * TOP_K
    counts = [0] * EXPERTS
    while left:
        expert = draw.choice([e for e in experts if counts[e] < most])
        take = min(left, most - counts[expert], draw.randint(1, 9))
        counts[expert] += take
        left -= take
    return counts


def random_extras(kind: str, ep_size: int, step: int, draw: random.Random) -> dict:
    """Routing of one kind, for every MoE layer."""
    local = EXPERTS // ep_size
    if kind in ("natural", "ties"):
        return {}
    if kind == "spike":
        return {"spikes": [{"layers": [1, 2], "factor": draw.uniform(1.2, ep_size)}]}
    layers = []
    for layer in range(MODEL["layers"]):
        first = draw.randrange(ep_size) * local
        chosen = {"one rank": list(range(first, first + local)),
                  "few experts": draw.sample(range(EXPERTS), TOP_K + 1),
                  "same experts": draw.sample(range(EXPERTS), TOP_K),
                  "anything": list(range(EXPERTS))}[kind]
        layers.append([] if layer in MODEL["dense_layers"] else counts_on(chosen, ep_size, draw))
    return {"routing": [layers]}


def random_vector(units: list[dict], draw: random.Random) -> dict:
    chosen = {u["name"]: draw.choice([r for r in u["allowed"] if r in RESIDENCIES]) for u in units}
    return {"plan": {"version": 1, "eager_drain": draw.random() < 0.5,
                     "prefetch": draw.random() < 0.5, "units": chosen}}


class Comparison:
    """Vectors of one trainer against save-all; every rank has vectors of its own."""

    def __init__(self, job: Rank, name: str, ep_size: int, **options) -> None:
        self.job, self.name, self.ep_size = job, name, ep_size
        self.trainer = job.trainer(ep_size, **options)
        self.units = json.loads(self.trainer.units_json())
        self.forecast = json.loads(self.trainer.floor_json())
        self.shared = random.Random(name)
        self.own = random.Random(f"{name} {job.rank}")
        self.result = {"name": name, "vectors": 0, "different": [], "peaks": [], "rows": set(),
                       "unaccounted": 0, "end_bytes": set(), "units": {}, "kinds": {}}

    def step(self, step: int, extras: dict) -> str:
        report = json.loads(self.trainer.step(tokens_of(self.job.rank, step), step, 0.0,
                                              json.dumps(extras)))
        result = self.result
        result["peaks"] += report["microbatch_peaks"]
        result["unaccounted"] = max(result["unaccounted"], report["unaccounted_bytes"])
        result["end_bytes"].add((report["end_bytes"], report["host_end_bytes"]))
        result["rows"].update(report["rows"][1:])
        for name, count in report["residencies"].items():
            result["units"][name] = result["units"].get(name, 0) + count
        return digest(self.trainer, report)

    def set_policy(self, vector: int) -> None:
        # One in eight is the adaptive policy under a budget, with plans that change at gates.
        if vector % 8 == 7:
            self.trainer.set_policy("adaptive", "{}", self.random_budget())
        else:
            self.trainer.set_policy("static", json.dumps(random_vector(self.units, self.own)), 0)

    def random_budget(self) -> int:
        forecast = self.forecast
        activations = self.own.randint(forecast["floor_bytes"], forecast["worst_save_all_bytes"]) \
            - forecast["static_bytes"]
        # What is live in this process, and the tokens of the coming step.
        return self.job.runtime.arena_stats()["live_bytes"] + 256 + activations

    def run(self, vectors: int) -> dict:
        kinds = ["one rank", "few experts", "natural", "same experts", "spike", "anything"]
        for step in range((vectors + VECTORS_PER_ROUTING - 1) // VECTORS_PER_ROUTING):
            kind = kinds[step % len(kinds)]
            self.routing(kind, step, min(VECTORS_PER_ROUTING, vectors))
        # Last, because it changes the weights: equal logits, so that order alone decides.
        for layer in (1, 2):
            self.trainer.parameters()[f"layers.{layer}.router"].zero_()
        self.trainer.parameters_changed()
        self.routing("ties", 500, VECTORS_PER_ROUTING)
        self.trainer.set_policy("save-all", "{}", 0)  # the arena's budget outlives this trainer
        return self.result | {key: sorted(self.result[key]) for key in ("rows", "end_bytes")}

    def routing(self, kind: str, step: int, vectors: int) -> None:
        extras = random_extras(kind, self.ep_size, step, self.shared)
        self.trainer.set_policy("save-all", "{}", 0)
        expected = self.step(step, extras)
        for vector in range(vectors):
            self.set_policy(vector)
            if self.step(step, extras) != expected:
                self.result["different"].append([kind, step, vector])
        self.result["vectors"] += vectors
        self.result["kinds"][kind] = self.result["kinds"].get(kind, 0) + vectors


def main() -> None:
    folder, vectors = Path(sys.argv[1]), int(sys.argv[2])
    job = Rank()
    cases = [("EP 4", 4, {}, vectors), ("EP 2 x DP 2", 2, {}, vectors),
             ("EP 4, bf16", 4, {"dtype": "bf16"}, VECTORS_PER_ROUTING)]
    results = [Comparison(job, name, ep, **options).run(count)
               for name, ep, options, count in cases]
    (folder / f"rank{job.rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
