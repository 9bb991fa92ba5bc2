"""Jobs with pipeline stages: checkpoints across layouts, infeasible stages, deaths."""

import os
import signal

import pytest
from helpers import SMALL, of_type, read_log, run, write_model, write_text
from test_ranks import launch, losses, ranks_of, steps_logged, wait_for  # noqa: F401


@pytest.fixture
def flags(tmp_path):
    # 4 sequences per step: 4 micro-batches of 1 on one data-parallel rank, 2 on each of two
    return ["--model", write_model(tmp_path, layers=4, dense_layers=[0], dense_ffn=16),
            "--data", write_text(tmp_path), *SMALL, "--micro-batch-size", 1]


def summary(log):
    return of_type(read_log(log), "summary")[-1]


def test_checkpoints_cross_layouts(flags, tmp_path, command):
    whole, again, other, alone = (tmp_path / f"{n}.jsonl" for n in ("w", "again", "other", "alone"))
    stages = ["--nproc", 4, "--pp", 2, "--ep", 2]
    done = run("train", *flags, *stages, "--steps", 4, "--checkpoint", tmp_path / "ck",
               "--checkpoint-every", 2, "--log", whole)
    assert done.returncode == 0, done.stderr
    assert read_log(whole)[0]["stage_layers"] == [2, 2]
    assert [r["layers"] for r in read_log(whole)[0]["ranks"]] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert len(summary(whole)["peak_bytes"]) == 4
    folder = tmp_path / "ck" / "step-000002"
    # layer 0 is dense, the others' experts are on two ranks of each stage
    assert sorted(p.name for p in folder.glob("model-*")) == [
        f"model-0000{i}-of-00004.safetensors" for i in (1, 2, 3, 4)]
    done = run("train", "--resume", folder, *stages, "--log", again)
    assert done.returncode == 0, done.stderr
    for digest in ("loss_digest", "grad_digest"):
        assert summary(again)[digest] == summary(whole)[digest]
    done = run("train", "--resume", folder, "--nproc", 2, "--pp", 2, "--pipeline", "zb-h1",
               "--stages", "1,3", "--log", other)
    assert done.returncode == 0, done.stderr
    assert losses(other) == pytest.approx(losses(whole)[2:], rel=1e-6)
    assert command("train", "--resume", folder, "--log", alone) == 0
    assert losses(alone) == pytest.approx(losses(whole)[2:], rel=1e-6)
    assert command("generate", "--checkpoint", folder, "--prompt", "a", "--tokens", 2) == 0


def test_the_heaviest_stage_says_what_is_missing(flags):
    # the fake's first stage needs 1 MiB more than the 10 MiB of the others
    done = run("train", *flags, "--nproc", 2, "--pp", 2, "--budget", "9MiB")
    assert done.returncode == 3
    assert done.stderr.count("\n") == 1 and f"by {2 * 2**20} bytes" in done.stderr


def test_who_died_and_who_was_waited_for(flags, tmp_path, launch, monkeypatch):  # noqa: F811
    monkeypatch.setenv("FAKE_WAIT", "rank 3, 1F0: hidden state")
    log = tmp_path / "a.jsonl"
    job = launch("train", *flags, "--nproc", 4, "--pp", 2, "--ep", 2, "--steps", 10000,
                 "--log", log)
    wait_for(lambda: steps_logged(log) >= 2)
    os.kill(ranks_of(job)[3], signal.SIGKILL)
    _, err = job.communicate(timeout=60)
    assert job.returncode == 1
    for rank in range(3):
        assert f"rank {rank} stopped: rank 3 (stage 1) died" in err
    assert err.count("it was waiting: rank 3, 1F0: hidden state") == 3
    assert "Traceback" not in err
