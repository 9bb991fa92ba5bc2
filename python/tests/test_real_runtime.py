"""The trainer on the real C++ module: resume, layouts, policies, Hugging Face files, generate."""

import json
from pathlib import Path

import pytest
from helpers import of_type, read_log, run, write_model, write_text

import bagualu

BUILT = list(Path(bagualu.__file__).parent.glob("_runtime*.so"))
pytestmark = pytest.mark.skipif(not BUILT, reason="the C++ module is not built: make build")

# Dense and MoE layers, a shared expert, dropout: all that has state or randomness.
CHANGES = {"layers": 3, "dense_layers": [0], "dense_ffn": 32, "shared_ffn": 16, "dropout": 0.1,
           "aux_loss_coef": 0.01, "router_bias_rate": 0.001}
SHAPE = ["--seq", 16, "--micro-batches", 2, "--warmup", 2]


def succeed(*argv):
    done = run(*argv, fake=False)
    assert done.returncode == 0, done.stderr
    return done


def losses(log):
    return [s["loss"] for s in of_type(read_log(log), "step")]


def summary(log):
    return of_type(read_log(log), "summary")[-1]


@pytest.fixture
def base(tmp_path):
    return ["train", "--data", write_text(tmp_path), *SHAPE]


def test_resume_bit_identical_and_under_another_layout(base, tmp_path):
    argv = [*base, "--model", write_model(tmp_path, **CHANGES), "--nproc", 2, "--ep", 2]
    whole, again, alone = (tmp_path / f"{name}.jsonl" for name in ("whole", "again", "alone"))
    succeed(*argv, "--steps", 4, "--log", whole, "--checkpoint", tmp_path / "ck",
            "--checkpoint-every", 2)
    folder = tmp_path / "ck" / "step-000002"
    succeed("train", "--resume", folder, "--nproc", 2, "--ep", 2, "--log", again)
    assert summary(again)["loss_digest"] == summary(whole)["loss_digest"]
    assert summary(again)["grad_digest"] == summary(whole)["grad_digest"]
    # dropout depends on the rank, so another layout is only near
    succeed("train", "--resume", folder, "--log", alone)
    assert losses(alone) == pytest.approx(losses(whole)[2:], rel=1e-2)


def test_layouts_agree_without_dropout(base, tmp_path):
    model = write_model(tmp_path, **CHANGES | {"dropout": 0.0})
    found = []
    for nproc, ep, microbatches in ((1, 1, 4), (2, 1, 2), (2, 2, 2)):
        log = tmp_path / f"{nproc}-{ep}.jsonl"
        succeed(*base, "--model", model, "--steps", 3, "--nproc", nproc, "--ep", ep,
                "--micro-batches", microbatches, "--aux-loss", 0, "--log", log)
        found.append(losses(log))
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert found[2] == pytest.approx(found[0], rel=1e-5)


def test_policies_give_the_same_bits_and_static_dies(base, tmp_path):
    argv = [*base, "--model", write_model(tmp_path, **CHANGES), "--nproc", 2, "--ep", 2,
            "--micro-batch-size", 4, "--steps", 3, "--overlap", "off"]
    spike = ["--spike", "step=1,layers=1-2,factor=2"]
    floor = json.loads(succeed(*argv, "--dry-run").stdout)["floor"]
    budget = ["--budget", (floor["floor_bytes"] + floor["worst_save_all_bytes"]) // 2]
    digests = {}
    for policy, limit in (("save-all", []), ("full-recompute", budget), ("adaptive", budget)):
        log = tmp_path / f"{policy}.jsonl"
        succeed(*argv, *spike, *limit, "--policy", policy, "--log", log)
        digests[policy] = summary(log)["loss_digest"]
        if limit:
            assert max(summary(log)["peak_bytes"]) <= limit[1]
    assert len(set(digests.values())) == 1
    tight = ["--budget", (floor["calm_peak_bytes"] + floor["worst_save_all_bytes"]) // 2]
    done = run(*argv, *spike, *tight, "--policy", "save-all", fake=False)
    assert done.returncode == 1 and "out of memory on rank" in done.stderr


def test_traced_steps_of_two_stages_are_replayed(base, tmp_path):
    from bagualu import report_log, report_steps
    log = tmp_path / "run.jsonl"
    succeed(*base, "--model", write_model(tmp_path, **CHANGES | {"layers": 4}), "--nproc", 2,
            "--pp", 2, "--steps", 4, "--trace-step", "1,2,3", "--log", log)
    if report_steps.find_program() is None:
        pytest.skip("no program bagualu was built: make build")
    traced = report_log.read_logs([log])[0].traced
    assert traced.note == "" and [step["step"] for step in traced.steps] == [1, 2, 3]
    for step in traced.steps:
        # Two micro-batches cross one border each way; the machine's noise bounds no times.
        for rank in step["ranks"]:
            messages = [s for s in report_steps.spans(step, rank, "executed")
                        if s.track == "stages"]
            assert len(messages) == 4
        keys = [{t["key"] for t in rank["transfers"] if t["key"].startswith("p2p")}
                for rank in step["ranks"]]
        assert keys[0] == keys[1] and len(keys[0]) == 4
        assert step["predicted_ns"] > 0 and step["measured_ns"] > 0


def test_budget_under_the_floor(base, tmp_path):
    done = run(*base, "--model", write_model(tmp_path), "--budget", "100KiB", fake=False)
    assert done.returncode == 3 and "bytes; --budget" in done.stderr


def test_generate_and_profile(base, tmp_path):
    model = write_model(tmp_path, **CHANGES)
    succeed(*base, "--model", model, "--steps", 1, "--checkpoint", tmp_path / "ck")
    done = succeed("generate", "--checkpoint", tmp_path / "ck", "--prompt", "ab", "--tokens", 5,
                   "--temperature", 0)
    assert done.stdout.startswith("ab")
    done = succeed("profile", "--model", model, "--seq", 16, "--cache", tmp_path / "cache",
                   "--json", tmp_path / "p.json")
    assert json.loads((tmp_path / "p.json").read_text())["ops"]


def test_hugging_face_round_trip(base, tmp_path):
    from test_hf import SPECS, random_tensors, save
    for family in ("mixtral", "qwen3_moe"):
        folder = tmp_path / family
        save(folder, SPECS[family], random_tensors(SPECS[family]))
        succeed(*base, "--hf", folder, "--steps", 1, "--lr", 0, "--checkpoint", folder / "ck")
        before = (folder / "model.safetensors").read_bytes()
        # a learning rate of 0 changes nothing, so loading and saving are exact inverses
        assert (folder / "ck/step-000001/model.safetensors").read_bytes() == before
