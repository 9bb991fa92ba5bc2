"""A run with a spike every 34 steps gives all its bytes back; 2,000 steps: bench/soak_bench.py."""

import json

from job import run_job

GROWTH_BYTES = 4 << 20
HOT_ROWS = 72  # of 48 when routing is even, 96 at most


def soak(folder, steps):
    """Runs the soak on two ranks and checks what holds for any length. Returns: by rank."""
    run_job("soak_worker.py", 2, folder, steps, timeout_s=3000)
    ranks = [json.loads((folder / f"rank{r}.json").read_text()) for r in range(2)]
    for rank in ranks:
        assert rank["steps"] == steps
        assert len(rank["end_bytes"]) == 1, "device or host bytes differ after some step"
        assert rank["end_bytes"][0][1] == 0, "host bytes left"
        assert rank["peak_bytes"] <= rank["budget_bytes"]
        # Later samples only: the first steps fill caches of torch, of the arena and of Python.
        late = rank["rss"][len(rank["rss"]) // 2:]
        assert max(late) - late[0] < GROWTH_BYTES, "the process grows"
    # Half as many rows again as in calm are more than the budget holds under save-all.
    hot = [given_up for rank in ranks for rows, given_up in rank["spikes"] if rows > HOT_ROWS]
    assert len(hot) >= 0.9 * len(ranks[0]["spikes"]) and all(hot)
    return ranks


def test_sixty_steps_with_spikes_leave_nothing_behind(tmp_path):
    soak(tmp_path, 60)
