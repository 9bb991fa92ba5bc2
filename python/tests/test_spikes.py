"""Spikes on the real C++ module: nobody sees them coming, and nothing is left of them afterwards."""

import json
from pathlib import Path

import pytest
from helpers import of_type, read_log, run, write_model, write_text

import bagualu

BUILT = list(Path(bagualu.__file__).parent.glob("_runtime*.so"))
pytestmark = pytest.mark.skipif(not BUILT, reason="the C++ module is not built: make build")

STEPS = 8
SPIKE_STEP = 4
CHANGES = {"layers": 4, "hidden": 32, "experts": 8, "expert_ffn": 64}


def decisions(step):
    """What every rank decided and predicted in a step, without times."""
    return [(r["residencies"], r["predicted_peak_bytes"], r["bytes_recomputed"],
             r["bytes_offloaded"]) for r in step["ranks"]]


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Arguments of a job on two ranks, and a budget between its calm peak and its spike's."""
    folder = tmp_path_factory.mktemp("spikes")
    argv = ["train", "--data", write_text(folder), "--model", write_model(folder, **CHANGES),
            "--nproc", 2, "--ep", 2, "--overlap", "off", "--seq", 32,
            "--micro-batch-size", 4, "--micro-batches", 2,
            "--steps", STEPS, "--lr", 0]
    probe = folder / "probe.jsonl"
    done = run(*argv, "--steps", STEPS, "--log", probe, fake=False)
    assert done.returncode == 0, done.stderr
    calm = max(r["peak_bytes"] for s in of_type(read_log(probe), "step") for r in s["ranks"])
    return folder, argv, calm + 4096


def steps_of(job, name, *more, exit_code=0):
    folder, argv, budget = job
    log = folder / f"{name}.jsonl"
    done = run(*argv, "--budget", budget, *more, "--log", log, fake=False)
    assert done.returncode == exit_code, done.stderr
    return of_type(read_log(log), "step"), done, log


def test_adaptive_decides_without_hindsight_and_recovers_at_once(job):
    calm, _, _ = steps_of(job, "calm", "--policy", "adaptive")
    spiked, _, log = steps_of(job, "spiked", "--policy", "adaptive",
                              "--spike", f"step={SPIKE_STEP},layers=1-2,factor=2")
    for before, same in zip(calm[:SPIKE_STEP], spiked[:SPIKE_STEP]):
        assert decisions(before) == decisions(same)  # nothing is done before the spike is there
    mitigated = {m["step"] for m in of_type(read_log(log), "mitigation")}
    assert mitigated == {SPIKE_STEP}
    # lr = 0: weights are as they were, so the step after the spike must be as if it had not been.
    for after, same in zip(calm[SPIKE_STEP + 1:], spiked[SPIKE_STEP + 1:]):
        assert decisions(after) == decisions(same)
        assert after["loss"] == same["loss"]


@pytest.mark.parametrize("policy", ["static", "save-all"])
def test_a_policy_that_cannot_change_dies_at_the_spike_and_says_where(job, policy):
    more = []
    if policy == "static":
        # Given, not fitted: a fit follows measured times, and a lucky one may survive.
        plan = job[0] / "plan.json"
        plan.write_text(json.dumps({"version": 1, "eager_drain": False, "prefetch": True,
                                    "units": {"layer0.attn_norm": "recompute"}}))
        more = ["--plan", plan]
    steps, done, log = steps_of(job, policy, "--policy", policy, *more, "--spike",
                                f"step={SPIKE_STEP},layers=1-2,factor=2", exit_code=1)
    assert len(steps) == SPIKE_STEP
    (oom,) = of_type(read_log(log), "oom")
    assert oom["step"] == SPIKE_STEP and oom["wanted_bytes"] > oom["left_bytes"] >= 0
    for word in (f"rank {oom['rank']}", f"step {SPIKE_STEP}", f"layer {oom['layer']}", "wanted"):
        assert word in done.stderr


def test_full_recompute_and_threshold_keep_the_same_losses(job):
    spike = ["--spike", f"step={SPIKE_STEP},layers=1-2,factor=2"]
    reference = [s["loss"] for s in steps_of(job, "reference", "--policy", "adaptive", *spike)[0]]
    recomputed, _, _ = steps_of(job, "full", "--policy", "full-recompute", *spike)
    assert [s["loss"] for s in recomputed] == reference


def test_retry_runs_the_step_of_a_spike_again_with_the_same_numbers(job):
    spike = ["--spike", f"step={SPIKE_STEP},layers=1-2,factor=2"]
    reference, _, _ = steps_of(job, "reference2", "--policy", "adaptive", *spike)
    repeated, _, _ = steps_of(job, "retry", "--policy", "retry", *spike)
    assert repeated[SPIKE_STEP]["repeated"] and not any(s["repeated"] for s in reference)
    for step, same in zip(repeated, reference):
        for key in ("loss", "aux_loss", "grad_norm", "imbalance"):
            assert step[key] == same[key]
        # Two micro-batches; the first run's stand before the second's.
        for rank, one in zip(step["ranks"], same["ranks"]):
            assert len(rank["microbatch_peaks"]) == (4 if step["repeated"] else 2)
            assert all(predicted == measured for predicted, measured in rank["microbatch_peaks"])
            assert rank["peak_bytes"] <= job[2] and rank["end_bytes"] == one["end_bytes"]
            assert (rank["residencies"]["recompute"] > 0) == step["repeated"]
