"""One rank of pipeline parity: python parity_worker.py OUT_FOLDER, with cases.json in the folder.

Runs every case (layout, order, overlap) on the same sequences, under save-all and under random
residencies and budgets, with an evaluation between steps. Writes rankR.json, and the gradients of
every case's reference run, by our names.
"""

import gc
import json
import random
import sys
import time
from pathlib import Path

from any_residency_worker import random_vector
from job import MODEL, Rank, digest

# 8 layers, so that four ranks can hold two virtual stages each. Dropout is on: its random numbers
# are functions of position, so the cut into stages may not show.
MODEL = MODEL | {"layers": 8, "dense_layers": [0, 5]}
SEQUENCES, SIZE, SEQ, VOCAB = 8, 2, 12, MODEL["vocab"]


def tokens_of(case: dict, layout, rank: int, step: int):
    """int64 [microbatches, SIZE, SEQ + 1]: this rank's of the step's sequences, cut as data.py does.
    """
    import torch

    generator = torch.Generator().manual_seed(1000 + step)
    count = case.get("sequences", SEQUENCES)
    everything = torch.randint(VOCAB, (count, SEQ + 1), generator=generator)
    by_microbatch = everything.reshape(-1, layout.dp_size, SIZE, SEQ + 1)
    return by_microbatch[:, layout.dp_rank(rank)].contiguous()


class Case:
    """One case on this rank; nothing on ranks that it leaves out."""

    def __init__(self, job: Rank, case: dict, folder: Path) -> None:
        from bagualu.layout import make_layout

        self.job, self.case, self.folder = job, case, folder
        self.layout = make_layout(MODEL["layers"], case["world"], case["pp"], case["ep"],
                                  case.get("vpp", 1), case["pipeline"], case.get("stages", ()))
        self.own = random.Random(f"{case['name']} {job.rank}")
        self.model = MODEL | case.get("model", {})
        microbatches = case.get("sequences", SEQUENCES) // SIZE // self.layout.dp_size
        self.trainer = job.trainer(
            case["ep"], self.model, case["world"], pp_size=case["pp"], microbatches=microbatches,
            virtual_per_rank=case.get("vpp", 1), pipeline=case["pipeline"],
            stage_layers=list(self.layout.stage_layers), overlap=case["overlap"], deadline_s=60,
            seq=SEQ, micro_batch_size=SIZE)
        self.here = self.trainer is not None
        self.result = {"name": case["name"], "runs": 0, "different": [], "unaccounted": 0,
                       "peaks": [], "end_bytes": [], "losses": []}

    def step(self, number: int) -> str:
        extras = {"spikes": [{"layers": [1, 2], "factor": 1.5}]} if number % 2 and \
            self.case["ep"] > 1 else {}
        report = json.loads(self.trainer.step(tokens_of(self.case, self.layout, self.job.rank,
                                                        number), number, 0.0, json.dumps(extras)))
        result = self.result
        result["peaks"] += report["microbatch_peaks"]
        result["unaccounted"] = max(result["unaccounted"], report["unaccounted_bytes"])
        ends = [report["end_bytes"], report["host_end_bytes"]]
        result["end_bytes"] += [ends] if ends not in result["end_bytes"] else []
        result["losses"].append(report["loss"])
        return digest(self.trainer, report)

    def run(self, runs: int) -> dict:
        """runs: random policies beside save-all, each for two steps and an evaluation between. The
        second step has a spike."""
        from safetensors.torch import save_file

        self.step(0)
        save_file({name: gradient.clone() for name, gradient in self.trainer.gradients().items()},
                  self.folder / f"{self.case['name']}-{self.job.rank}.safetensors")
        expected = self.two_steps()
        units = json.loads(self.trainer.units_json())
        for run in range(runs):
            if run % 2:
                self.trainer.set_policy("adaptive", "{}", self.random_budget())
            else:
                self.trainer.set_policy("static", json.dumps(random_vector(units, self.own)), 0)
            if self.two_steps() != expected:
                self.result["different"].append(run)
            self.result["runs"] += 1
        self.trainer.set_policy("save-all", "{}", 0)  # the arena's budget outlives this trainer
        return self.result

    def two_steps(self) -> list:
        first = self.step(0)
        evaluated = self.trainer.evaluate(tokens_of(self.case, self.layout, self.job.rank, 7))
        return [first, float(evaluated).hex(), self.step(1)]

    def random_budget(self) -> int:
        forecast = json.loads(self.trainer.floor_json())
        floor = forecast["floor_bytes"]  # with one micro-batch it may be above everything kept
        highest = max(floor, forecast["worst_save_all_bytes"])
        activations = self.own.randint(floor, highest) - forecast["static_bytes"]
        return self.job.runtime.arena_stats()["live_bytes"] + 1024 + activations


def main() -> None:
    folder = Path(sys.argv[1])
    cases = json.loads((folder / "cases.json").read_text())
    job = Rank()
    results = []
    for case in cases:
        begin = time.monotonic()
        running = Case(job, case, folder)
        if running.here:
            results.append(running.run(case.get("runs", 2)))
            results[-1]["seconds"] = round(time.monotonic() - begin, 1)
        del running
        gc.collect()
        (folder / f"rank{job.rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
