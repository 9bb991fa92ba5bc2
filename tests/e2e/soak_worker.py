"""One rank of a long run with spikes: python soak_worker.py OUT_FOLDER STEPS."""

import gc
import json
import sys
import time
from pathlib import Path

import psutil
from job import MODEL, Rank, tokens_of

SPIKE_EVERY = 34
MODEL = MODEL | {"layers": 2, "hidden": 16, "expert_ffn": 48}
MICROBATCHES = 2


def main() -> None:
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    job = Rank()
    trainer = job.trainer(job.world, MODEL, microbatches=MICROBATCHES, policy="adaptive")
    forecast = json.loads(trainer.floor_json())
    # Between the peak of calm steps and that of a spike; what this test itself holds comes on top.
    live = job.runtime.arena_stats()["live_bytes"]
    tokens_bytes = tokens_of(0, 0, MICROBATCHES).nbytes
    budget = live + tokens_bytes + 64 - forecast["static_bytes"] + (
        2 * forecast["calm_peak_bytes"] + forecast["worst_save_all_bytes"]) // 3
    trainer.set_policy("adaptive", "{}", budget)
    process = psutil.Process()
    rss, ends, losses, spikes, peak = [], set(), [], [], 0
    begin = time.monotonic()
    for step in range(steps):
        spike = step % SPIKE_EVERY == SPIKE_EVERY - 1
        extras = {"spikes": [{"layers": [1], "factor": job.world}]} if spike else {}
        report = json.loads(trainer.step(tokens_of(job.rank, step, MICROBATCHES), step, 1e-3,
                                         json.dumps(extras)))
        assert report["unaccounted_bytes"] == 0
        ends.add((report["end_bytes"], report["host_end_bytes"]))
        peak = max(peak, report["peak_bytes"])
        if spike:
            saved = report["residencies"]["save"] == sum(report["residencies"].values())
            spikes.append([max(report["rows"]), not saved])
        losses.append(report["loss"])
        if step % 10 == 9:
            gc.collect()
            rss.append(process.memory_info().rss)
    (folder / f"rank{job.rank}.json").write_text(json.dumps({
        "steps": steps, "rss": rss, "spikes": spikes,  # [rows, was anything given up]
        "end_bytes": sorted(ends), "peak_bytes": peak, "budget_bytes": budget,
        "loss_first": losses[0], "loss_last": losses[-1],
        "seconds": time.monotonic() - begin}))


if __name__ == "__main__":
    main()
