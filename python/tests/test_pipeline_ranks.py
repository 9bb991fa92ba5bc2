"""Jobs with pipeline stages: checkpoints across layouts, infeasible stages, deaths."""

import os
import re
import signal
import time

import pytest
from helpers import SMALL, of_type, read_log, run, start, write_model, write_text
from test_ranks import losses, ranks_of, steps_logged, wait_for
from test_real_runtime import BUILT, succeed

real = pytest.mark.skipif(not BUILT, reason="the C++ module is not built: make build")


@pytest.fixture
def flags(tmp_path):
    # 4 sequences per step: 4 micro-batches of 1 on one data-parallel rank, 2 on each of two
    return ["--model", write_model(tmp_path, layers=4, dense_layers=[0], dense_ffn=16),
            "--data", write_text(tmp_path), *SMALL, "--micro-batch-size", 1]


def summary(log):
    return of_type(read_log(log), "summary")[-1]


@real
def test_checkpoints_cross_layouts(flags, tmp_path):
    whole, again, other, alone = (tmp_path / f"{n}.jsonl" for n in ("w", "again", "other", "alone"))
    stages = ["--nproc", 4, "--pp", 2, "--ep", 2]
    succeed("train", *flags, *stages, "--router-bias-rate", 0.01, "--steps", 4, "--log", whole,
            "--checkpoint", tmp_path / "ck", "--checkpoint-every", 2)
    run_record = read_log(whole)[0]
    assert run_record["stage_layers"] == [2, 2]
    assert [r["layers"] for r in run_record["ranks"]] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert summary(whole)["peak_bytes"] == summary(whole)["predicted_peak_bytes"]
    folder = tmp_path / "ck" / "step-000002"
    assert sorted(p.name for p in folder.glob("model-*")) == [
        f"model-0000{i}-of-00004.safetensors" for i in (1, 2, 3, 4)]
    succeed("train", "--resume", folder, *stages, "--router-bias-rate", 0.01, "--log", again)
    for digest in ("loss_digest", "grad_digest"):
        assert summary(again)[digest] == summary(whole)[digest]
    succeed("train", "--resume", folder, "--nproc", 2, "--pp", 2, "--pipeline", "zb-h1",
            "--stages", "1,3", "--log", other)
    assert losses(other) == pytest.approx(losses(whole)[2:], rel=1e-5)
    succeed("train", "--resume", folder, "--log", alone)
    assert losses(alone) == pytest.approx(losses(whole)[2:], rel=1e-5)
    succeed("generate", "--checkpoint", folder, "--prompt", "a", "--tokens", 2)


def test_the_heaviest_stage_says_what_is_missing(flags):
    # the fake's first stage needs 1 MiB more than the 10 MiB of the others
    done = run("train", *flags, "--nproc", 2, "--pp", 2, "--budget", "9MiB")
    assert done.returncode == 3
    assert done.stderr.count("\n") == 1 and f"by {2 * 2**20} bytes" in done.stderr


@real
def test_who_died_and_who_was_waited_for(flags, tmp_path):
    log = tmp_path / "a.jsonl"
    job = start("train", *flags, "--nproc", 4, "--pp", 2, "--ep", 2, "--steps", 1000000, "--log",
                log, fake=False)
    try:
        wait_for(lambda: steps_logged(log) >= 2)
        # A death is noticed within milliseconds, when the others may still compute: a rank that
        # stands still first has them all wait for it.
        victim = ranks_of(job)[3]
        os.kill(victim, signal.SIGSTOP)
        time.sleep(3)
        os.kill(victim, signal.SIGKILL)
        begin = time.monotonic()
        _, err = job.communicate(timeout=120)
    finally:
        job.kill()
    assert time.monotonic() - begin < 60 and job.returncode == 1
    for rank in range(3):
        assert f"rank {rank} stopped: rank 3 (stage 1) died" in err
    # rank 2 shares experts with it, rank 1 its tokens: one of them always waits for it, in a group
    # of two or of all
    assert re.search(r"it was waiting: .*with ranks? [\d, ]*3", err)
    assert "Traceback" not in err
