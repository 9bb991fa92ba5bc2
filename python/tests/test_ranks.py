"""Several ranks: layouts, clean stops, deaths. Each test starts real processes."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import types

import psutil
import pytest
from helpers import SMALL, environment, of_type, read_log, run, start, write_model, write_text

from bagualu import distributed
from bagualu.distributed import DIED
from bagualu.launch import _outcome
from bagualu.layout import Layout


@pytest.fixture
def flags(tmp_path):
    return ["--model", write_model(tmp_path), "--data", write_text(tmp_path), *SMALL]


def losses(log):
    return [s["loss"] for s in of_type(read_log(log), "step")]


@pytest.fixture
def launch():
    """start(), and an end to what a failed test leaves running: ranks end with their launcher."""
    jobs = []

    def started(*argv):
        jobs.append(start(*argv, FAKE_STEP_S="0.05"))
        return jobs[-1]

    yield started
    for job in jobs:
        job.kill()
        job.communicate()


def wait_for(condition, seconds=150.0):  # start-up takes long on a busy machine
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)
    return value


def steps_logged(log):
    return len(of_type(read_log(log), "step")) if log.exists() else 0


def ranks_of(process):
    """pid by rank of a launcher's children."""
    found = {}
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            if "bagualu.train" in child.cmdline():
                found[int(child.environ()["RANK"])] = child.pid
        except (psutil.Error, KeyError):
            continue
    return found


def test_resume_under_another_layout(flags, tmp_path, command):
    four, one = tmp_path / "four.jsonl", tmp_path / "one.jsonl"
    # 4 sequences per step: 2 micro-batches of 1 on each of two ranks
    done = run("train", *flags, "--micro-batch-size", 1, "--nproc", 2, "--ep", 2, "--steps", 4,
               "--checkpoint", tmp_path / "ck", "--checkpoint-every", 2, "--log", four)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "ck" / "step-000002"
    assert (folder / "model-00002-of-00002.safetensors").is_file()
    assert command("train", "--resume", folder, "--log", one) == 0
    assert losses(one) == pytest.approx(losses(four)[2:], rel=1e-6)
    done = run("train", "--resume", folder, "--nproc", 2, "--ep", 1, "--log", one)
    assert done.returncode == 0, done.stderr
    assert losses(one) == pytest.approx(losses(four)[2:], rel=1e-6)


def test_out_of_memory_names_the_rank_everywhere(flags, tmp_path):
    log = tmp_path / "a.jsonl"
    done = run("train", *flags, "--nproc", 2, "--ep", 2, "--steps", 4, "--policy", "static",
               "--budget", "20MiB", "--spike", "step=2,layers=1,factor=2", "--log", log)
    assert done.returncode == 1
    cause = "out of memory on rank 1, step 2, micro-batch 0, layer 2, expert_fc1: wanted"
    assert f"bagualu train: rank 0 stopped: {cause}" in done.stderr
    assert f"bagualu train: {cause}" in done.stderr
    assert "Traceback" not in done.stderr and done.stderr.count("\n") == 2
    assert [r["rank"] for r in of_type(read_log(log), "oom")] == [1]
    assert of_type(read_log(log), "summary")[0]["oom_count"] == 1


def test_infeasible_budget(flags):
    done = run("train", *flags, "--nproc", 2, "--budget", "9MiB")
    assert done.returncode == 3
    assert done.stderr.count("\n") == 1 and f"by {2**20} bytes" in done.stderr


@pytest.mark.parametrize("victim", [0, 1])
def test_killed_rank_is_named_within_a_minute(flags, tmp_path, launch, victim):
    log = tmp_path / "a.jsonl"
    job = launch("train", *flags, "--nproc", 2, "--steps", 10000, "--log", log)
    wait_for(lambda: steps_logged(log) >= 2)
    os.kill(ranks_of(job)[victim], signal.SIGKILL)
    _, err = job.communicate(timeout=60)
    assert job.returncode == 1
    assert f"rank {1 - victim} stopped: rank {victim} died" in err
    assert re.search(rf"bagualu train: rank {victim} (died|was killed)", err)
    assert "Traceback" not in err


def test_killed_launcher_leaves_no_rank_behind(flags, tmp_path, launch):
    log = tmp_path / "a.jsonl"
    job = launch("train", *flags, "--nproc", 2, "--steps", 10000, "--log", log)
    wait_for(lambda: steps_logged(log) >= 1)
    ranks = ranks_of(job).values()
    job.kill()
    job.communicate()
    wait_for(lambda: not any(psutil.pid_exists(pid) for pid in ranks), seconds=30)


def test_a_bug_on_a_rank_shows_its_traceback_and_the_rank(flags):
    done = run("train", *flags, "--nproc", 2, "--steps", 3, FAKE_CRASH="1:1")
    assert done.returncode == 1
    assert "rank 1 failed: ZeroDivisionError: a bug of the test" in done.stderr
    assert done.stderr.count("Traceback") == 1


def test_sigterm_finishes_the_step_and_saves(flags, tmp_path, launch):
    log = tmp_path / "a.jsonl"
    job = launch("train", *flags, "--nproc", 2, "--steps", 10000, "--log", log,
                "--checkpoint", tmp_path / "ck")
    wait_for(lambda: steps_logged(log) >= 2)
    listening = {c.laddr.ip for pid in (job.pid, *ranks_of(job).values())
                 for c in psutil.Process(pid).net_connections("inet")
                 if c.status == psutil.CONN_LISTEN}
    assert listening and listening <= {"127.0.0.1", "::1"}  # rendezvous and Gloo
    job.send_signal(signal.SIGTERM)
    _, err = job.communicate(timeout=60)
    assert job.returncode == 0, err
    records = read_log(log)
    steps = len(of_type(records, "step"))
    assert of_type(records, "summary")[0]["steps_completed"] == steps
    assert (tmp_path / "ck" / "latest").read_text() == f"step-{steps:06}\n"
    assert "stopped by a signal" in err


def test_kill_9_then_resume(flags, tmp_path, command, launch):
    whole, log = tmp_path / "whole.jsonl", tmp_path / "a.jsonl"
    argv = ["train", *flags, "--steps", 12]
    assert command(*argv, "--log", whole) == 0
    save = ["--checkpoint", tmp_path / "ck", "--checkpoint-every", 1, "--log", log]
    job = launch(*argv, *save)
    wait_for(lambda: steps_logged(log) >= 3)
    job.kill()
    job.communicate()
    assert command(*argv, *save, "--resume", "latest") == 0
    digests = {of_type(read_log(path), "summary")[0]["loss_digest"] for path in (whole, log)}
    assert len(digests) == 1


def test_under_plain_torchrun(flags, tmp_path):
    out = tmp_path / "out.json"
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            "-m", "bagualu.train", *flags, "--ep", 2, "--steps", 2, "--json", out]
    done = subprocess.run(list(map(str, argv)), env=environment(), capture_output=True, text=True,
                          timeout=250)
    assert done.returncode == 0, done.stderr
    assert json.loads(out.read_text())["steps_completed"] == 2



def test_a_rank_that_stands_still_counts_as_dead(monkeypatch):
    process = subprocess.Popen(["sleep", "60"])
    peer = distributed._Peer(socket.gethostname(), process.pid,
                             distributed._process(process.pid)[1])
    try:
        assert peer.alive(None, 1)
        process.send_signal(signal.SIGSTOP)
        wait_for(lambda: distributed._process(process.pid)[0] == "T")
        assert peer.alive(None, 1)  # for a while
        monkeypatch.setattr(distributed, "_STOPPED_S", 0.0)
        assert not peer.alive(None, 1) and "stands still" in peer.how
    finally:
        process.kill()
        process.wait()
    assert not peer.alive(None, 1)


def test_who_stood_still_was_not_merely_killed(tmp_path):
    # torchrun kills a stopped rank in the end; the others know why
    status = {"rank": 0, "exit_code": 1, "text": "rank 1 stands still", "cause": 1}
    (tmp_path / "rank-0.json").write_text(json.dumps(status))
    failure = types.SimpleNamespace(exitcode=-9, signal_name=lambda: "SIGKILL")
    assert _outcome(tmp_path, {1: failure}, Layout(2)) == (1, "rank 1 stands still")
    (tmp_path / "rank-0.json").write_text(json.dumps(status | {"text": f"rank 1 {DIED}"}))
    assert _outcome(tmp_path, {1: failure}, Layout(2)) == (1, "rank 1 was killed by SIGKILL")
