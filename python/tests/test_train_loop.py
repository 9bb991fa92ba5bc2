"""The loop on one rank: log, summary, resume, spikes, traces, generate."""

import hashlib
import json
import os
import signal
import struct
from pathlib import Path

import pytest
from helpers import SMALL, of_type, read_log, write_model, write_text

from bagualu.progress import Progress, mitigation_line, progress_line
from bagualu.report_log import read_log as read_for_report
from bagualu.session import learning_rate


@pytest.fixture
def train(command, tmp_path):
    argv = ["train", "--model", write_model(tmp_path), "--data", write_text(tmp_path), *SMALL]
    return lambda *flags: command(*argv, *flags)


def summary_of(path):
    return of_type(read_log(path), "summary")[-1]


def test_log_and_summary(train, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("FAKE_SPIKE", "2:1.5")
    log, out = tmp_path / "a.jsonl", tmp_path / "out.json"
    assert train("--steps", 4, "--log", log, "--json", out, "--validate-every", 2,
                 "--budget", "20MiB") == 0
    records = read_log(log)
    assert [r["type"] for r in records] == [
        "run", "start", "step", "memory", "step", "validation", "step", "mitigation", "memory",
        "step", "validation", "summary"]
    assert records[1]["first_step"] == 0 and len(records[1]["profiles"]) == 1
    assert records[1]["options"]["budget_bytes"] == 20 * 2**20
    assert records[0]["version"] == 1 and records[0]["budget_bytes"] == 20 * 2**20
    steps = of_type(records, "step")
    assert [s["spike"] for s in steps] == [False, False, True, False]
    assert steps[0]["domain"] == ["text", "text"] and steps[0]["tokens"] == 2 * 2 * 16
    summary = records[-1]
    packed = b"".join(struct.pack("<d", s["loss"]) for s in steps)
    assert summary["loss_digest"] == hashlib.sha256(packed).hexdigest()
    assert (summary["spikes"], summary["spikes_survived"]) == (1, 1)
    # Half of all decisions take 1,000 ns: nearest rank takes the lower one of the middle pair.
    assert summary["decision_ns"] == {"p50": 1000, "p99": 2000, "max": 2000,
                                      "total_per_step_max": 3000}
    assert summary["plan_cache_hit_fraction"] == 0.5
    assert json.loads(out.read_text())["loss_digest"] == summary["loss_digest"]
    assert read_for_report(log).steps
    out, err = capfd.readouterr()
    assert "loss digest" in out
    assert "decision time      p50 1.0 us, p99 2.0 us, max 2.0 us" in out
    assert "plans known        50.0 % of decisions" in out
    assert "step 2, rank 0, micro-batch 0, layer 2: load 1.50x" in err  # why, what, cost
    assert "recompute 1 units (4.0 MiB); costs 0.01 ms" in err
    assert "step 1/4" not in err  # no progress: not a terminal


def test_log_says_which_steps_are_traced_and_drops_traces_of_another_run(train, tmp_path):
    log, old = tmp_path / "a.jsonl", tmp_path / "a.trace-0.jsonl"
    old.write_text("of another run")
    assert train("--steps", 2, "--log", log) == 0
    assert read_log(log)[0]["trace_step"] is None and not old.exists()
    assert train("--steps", 2, "--log", log, "--trace-step", "1") == 0
    assert read_log(log)[0]["trace_step"] == [1]


def test_out_of_memory(train, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("FAKE_SPIKE", "2:1.5")
    log, out = tmp_path / "a.jsonl", tmp_path / "out.json"
    assert train("--steps", 4, "--log", log, "--json", out, "--policy", "static",
                 "--budget", "20MiB") == 1
    records = read_log(log)
    # peak 16 MiB * 1.5 = 24 MiB; the fake wants what is over the budget and leaves 100 bytes
    assert of_type(records, "oom") == [
        {"type": "oom", "step": 2, "rank": 0, "microbatch": 0, "layer": 2, "op": "expert_fc1",
         "wanted_bytes": 4 * 2**20 + 100, "left_bytes": 100, "budget_bytes": 20 * 2**20}]
    summary = json.loads(out.read_text())
    assert (summary["oom_count"], summary["steps_completed"]) == (1, 2)
    assert (summary["spikes"], summary["spikes_survived"]) == (1, 0)
    assert ("out of memory on rank 0, step 2, micro-batch 0, layer 2, expert_fc1: wanted 4.0 MiB, "
            "left 100 B of budget 20.0 MiB") in capfd.readouterr().err


def test_loss_that_is_not_finite_ends_the_job(train, monkeypatch, capfd):
    monkeypatch.setenv("FAKE_NAN", "1")
    assert train("--steps", 3) == 1
    err = capfd.readouterr().err
    assert "step 1: loss is not finite" in err and "Traceback" not in err


def test_plan_of_a_dry_run_is_a_plan_file(train, tmp_path, monkeypatch):
    from fake_site import fake_runtime
    out = tmp_path / "plan.json"
    assert train("--dry-run", "--json", out) == 0
    given = []
    original = fake_runtime.Trainer.__init__

    def init(self, spec, options, *groups):
        given.append(json.loads(options)["policy_args"])
        original(self, spec, options, *groups)

    monkeypatch.setattr(fake_runtime.Trainer, "__init__", init)
    assert train("--steps", 1, "--policy", "static", "--plan", out) == 0
    assert given == [{"plan": {"units": {}}}]


def test_budget_under_the_floor(train, capfd):
    assert train("--budget", "9MiB") == 3
    assert f"by {2**20} bytes" in capfd.readouterr().err


def test_measuring_mode_proposes_a_budget(train, capfd):
    assert train("--steps", 2) == 0
    assert "--budget 16MiB" in capfd.readouterr().err


def test_dry_run_trains_nothing(train, tmp_path, capfd):
    assert train("--dry-run", "--budget", "20MiB", "--log", tmp_path / "a.jsonl") == 0
    report = json.loads(capfd.readouterr().out)
    assert report["floor"]["floor_bytes"] == 10 * 2**20 and "plan" in report
    assert not (tmp_path / "a.jsonl").exists()


def test_resume_is_bit_identical(train, tmp_path):
    whole, first, second = (tmp_path / name for name in ("a.jsonl", "b.jsonl", "c.jsonl"))
    assert train("--steps", 6, "--log", whole, "--lr", 0.01) == 0
    checkpoints = tmp_path / "ck"
    assert train("--steps", 6, "--log", first, "--lr", 0.01, "--checkpoint", checkpoints,
                 "--checkpoint-every", 3, "--quiet") == 0
    assert sorted(p.name for p in checkpoints.iterdir()) == ["latest", "step-000003",
                                                             "step-000006"]
    assert train("--resume", checkpoints / "step-000003", "--log", second) == 0
    assert [s["step"] for s in of_type(read_log(second), "step")] == [3, 4, 5]
    digests = {summary_of(log)["loss_digest"] for log in (whole, first, second)}
    assert len(digests) == 1
    assert len({summary_of(log)["grad_digest"] for log in (whole, first, second)}) == 1


def test_resume_takes_flags_from_the_checkpoint(command, train, tmp_path):
    checkpoints, log = tmp_path / "ck", tmp_path / "a.jsonl"
    assert train("--steps", 4, "--checkpoint", checkpoints, "--checkpoint-every", 2, "--seed", 5,
                 "--log", log) == 0
    (checkpoints / "latest").write_text("step-000002\n")
    digest = summary_of(log)["loss_digest"]
    # into the same log: steps 2 and 3 are written anew, not twice
    assert command("train", "--resume", "latest", "--checkpoint", checkpoints, "--log", log) == 0
    assert [s["step"] for s in of_type(read_log(log), "step")] == [0, 1, 2, 3]
    assert len(of_type(read_log(log), "run")) == 1
    assert summary_of(log)["loss_digest"] == digest
    assert command("train", "--resume", checkpoints) == 2  # all steps are done


def test_sigterm_on_one_rank(train, tmp_path, monkeypatch):
    from fake_site import fake_runtime
    original = fake_runtime.Trainer.step

    def step(self, tokens, number, lr, extras):
        if number == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, tokens, number, lr, extras)

    monkeypatch.setattr(fake_runtime.Trainer, "step", step)
    log = tmp_path / "a.jsonl"
    assert train("--steps", 9, "--log", log, "--checkpoint", tmp_path / "ck") == 0
    assert summary_of(log)["steps_completed"] == 3  # the signal came after step 1 had begun
    assert (tmp_path / "ck" / "latest").read_text() == "step-000003\n"


def test_init_takes_weights_only(train, tmp_path):
    checkpoints, log = tmp_path / "ck", tmp_path / "a.jsonl"
    assert train("--steps", 2, "--checkpoint", checkpoints) == 0
    assert train("--steps", 2, "--init", checkpoints, "--log", log) == 0
    assert [s["step"] for s in of_type(read_log(log), "step")] == [0, 1]


def test_hugging_face_folder_is_a_start(command, train, tmp_path):
    assert train("--steps", 1, "--checkpoint", tmp_path / "ck") == 0
    # MODEL is a Mixtral in shape, so its checkpoint is a folder of transformers
    assert command("train", "--hf", tmp_path / "ck" / "step-000001", "--steps", 1,
                   "--data", tmp_path / "text.txt", *SMALL) == 0


def test_routing_trace_is_handed_over(train, tmp_path, monkeypatch):
    from fake_site import fake_runtime
    trace = tmp_path / "t.csv"
    # T = 2 * 16 tokens, k = 2: 64 rows, 32 at most for one expert
    trace.write_text("".join(f"r,0,0,{layer},32 32 0 0\n" for layer in (0, 1)))
    seen = []
    original = fake_runtime.Trainer.step

    def step(self, tokens, number, lr, extras):
        seen.append(json.loads(extras)["routing"])
        return original(self, tokens, number, lr, extras)

    monkeypatch.setattr(fake_runtime.Trainer, "step", step)
    assert train("--steps", 1, "--routing-trace", trace) == 0
    assert seen == [[[[32, 32, 0, 0]] * 2] * 2]


def test_generate(command, train, tmp_path, capfdbinary):
    assert train("--steps", 1, "--checkpoint", tmp_path / "ck") == 0
    capfdbinary.readouterr()
    argv = ["generate", "--checkpoint", tmp_path / "ck", "--prompt", "To be", "--tokens", 30]
    assert command(*argv, "--seed", 7) == 0
    first = capfdbinary.readouterr().out
    assert command(*argv, "--seed", 7) == 0
    assert capfdbinary.readouterr().out == first
    assert first.startswith(b"To be") and len(first) == 5 + 30 + 1
    for bad in (["--tokens", 0], ["--temperature", -1], ["--prompt", ""], ["--checkpoint", "/no"]):
        assert command(*argv, *bad) == 2


def test_profile_is_kept_and_found(command, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("bagualu.profile_cache.Path.home", lambda: tmp_path)
    from fake_site import fake_runtime
    model = write_model(tmp_path)
    assert command("profile", "--model", model, "--seq", 16, "--threads", 1) == 0
    assert "ops" in json.loads(capfd.readouterr().out)
    system = json.loads((tmp_path / ".cache" / "bagualu" / "this-machine.json").read_text())
    shipped = Path(__file__).resolve().parents[2] / "configs" / "systems" / "cpu-2core.json"
    assert list(system) == list(json.loads(shipped.read_text()))
    # 64 rows of 16 fp32 elements and a gate weight in 1000 ns
    assert system["link_bytes_per_s"] == 64 * (16 * 4 + 4) * 1e6
    assert (system["d2h_bytes_per_s"], system["h2d_bytes_per_s"]) == (2e9, 3e9)
    assert system["fp32_flops_per_s"] > 1e6 and system["launch_ns"] > 0
    given = []
    original = fake_runtime.Trainer.__init__

    def init(self, spec, options, *groups):
        given.append(json.loads(options)["profile"])
        original(self, spec, options, *groups)

    monkeypatch.setattr(fake_runtime.Trainer, "__init__", init)
    argv = ["train", "--model", model, "--data", write_text(tmp_path), "--steps", 1,
            "--threads", 1, "--micro-batches", 1]
    assert command(*argv, "--seq", 16) == 0 and command(*argv, "--seq", 17) == 0
    assert given[0]["ops"] and given[1] is None
    assert command("profile", "--model", model, "--ep", 3) == 2


def test_learning_rate():
    # 2 of 12 steps warm up; the cosine falls from 1.0 to 0.1 over steps 2..11
    rates = [learning_rate(step, 12, 2, 1.0, 0.1) for step in range(12)]
    assert rates[:3] == [0.5, 1.0, 1.0] and rates[-1] == pytest.approx(0.1)
    assert rates[2:] == sorted(rates[2:], reverse=True)


RECORD = {"step": 4, "loss": 1.25, "tokens_per_s": 1000.0, "imbalance": [1.1, 1.3],
          "ranks": [{"peak_bytes": 3 * 2**20, "residencies": {"save": 3, "recompute": 2}}]}


class Terminal:
    def __init__(self, tty):
        self.text, self.tty = "", tty

    def isatty(self):
        return self.tty

    def write(self, text):
        self.text += text

    def flush(self):
        pass


def test_progress():
    line = progress_line(RECORD, 10, 4 * 2**20)
    assert line == ("step 5/10  loss 1.2500  1000 tokens/s  3.0 MiB of 4.0 MiB (75 %)  "
                    "imbalance 1.30x  recompute 2")
    for tty, quiet, shown in ((True, False, True), (False, False, False), (True, True, False)):
        stream = Terminal(tty)
        Progress(quiet, stream).step(RECORD, 10, None)
        assert ("step 5/10" in stream.text) == shown


def test_mitigation_line_without_actions():
    assert "nothing" in mitigation_line({"step": 1, "rank": 0, "microbatch": 0, "layer": 0,
                                         "load_imbalance": 2.0, "needed_bytes": 5, "actions": [],
                                         "cost_ns": 0})
