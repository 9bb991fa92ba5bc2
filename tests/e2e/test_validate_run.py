"""A real run is decided again from its log: the same residencies, the same bytes at every point.

Times are compared too, but a busy machine has its own: docs/evaluation.md has those of a quiet one.
"""

import json
import os
import subprocess
import sys

import pytest
from job import MODEL, ROOT

from bagualu.report_steps import find_program

PROGRAM = find_program()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no program bagualu was built: make build")


def bagualu(command, *arguments):
    env = os.environ | {"PYTHONPATH": str(ROOT / "python"), "OMP_NUM_THREADS": "1"}
    start = [sys.executable, "-m", "bagualu.launch", command] if command == "train" \
        else [PROGRAM, command]
    return subprocess.run([*start, *map(str, arguments)], env=env, capture_output=True, text=True,
                          timeout=300, cwd=ROOT)


def train(folder, log, *flags):
    model = folder / "model.json"
    model.write_text(json.dumps(MODEL | {"vocab": 256}))
    done = bagualu("train", "--model", model, "--nproc", 2, "--threads", 1, "--seq", 32,
                   "--micro-batch-size", 2, "--micro-batches", 3, "--quiet", *flags,
                   *(["--log", log] if log else []))
    assert done.returncode == 0, done.stderr
    return done.stdout


def validate(log, code=0):
    done = bagualu("simulate", "--validate", log, "--json", "-", "--quiet")
    assert done.returncode == code, done.stdout[-2000:] + done.stderr
    return json.loads(done.stdout)


def test_a_spike_under_a_budget_is_decided_and_counted_as_it_was(tmp_path):
    floor = json.loads(train(tmp_path, None, "--ep", 2, "--dry-run"))["floor"]
    budget = (floor["floor_bytes"] + 3 * floor["calm_peak_bytes"]) // 4
    log = tmp_path / "run.jsonl"
    train(tmp_path, log, "--ep", 2, "--budget", budget, "--steps", 7,
          "--spike", "step=3-4,layers=1-2,factor=1.8")
    found = validate(log)
    assert found["equal"]
    total = found["total"]
    assert all(entry["different"] == 0 for entry in total.values())
    assert all(entry["compared"] > 0 for entry in total.values())
    assert 3 in [step["step"] for step in found["steps"] if step["spike"]]
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    spiked = [set(rank["plans"]) for line in lines if line["type"] == "step" and line["step"] == 3
              for rank in line["ranks"]]
    assert any("r" in plan or "o" in plan for plans in spiked for plan in plans)
    assert found["timed_steps"] > 0

    # A log that says something else is not equal to its simulation.
    step = next(line for line in lines if line["type"] == "step" and line["step"] == 2)
    step["ranks"][1]["peak_bytes"] += 64
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    changed = validate(log, code=1)
    assert not changed["equal"] and changed["total"]["peaks"]["different"] == 1


def test_two_stages_with_split_backward_are_counted_as_they_were(tmp_path):
    log = tmp_path / "run.jsonl"
    train(tmp_path, log, "--pp", 2, "--pipeline", "zb-h1", "--steps", 4)
    found = validate(log)
    assert found["equal"]
    assert found["total"]["passes"]["compared"] == 4 * 2 * 2 * (3 * 3)  # peak, end; F, I, W
