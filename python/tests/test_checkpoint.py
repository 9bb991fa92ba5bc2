"""Checkpoints are whole or absent, whatever happens while they are written or to them later."""

import errno
import json
import os

import pytest
from helpers import SMALL, write_model, write_text

from bagualu import checkpoint
from bagualu.errors import InvalidInput


@pytest.fixture
def train(command, tmp_path):
    argv = ["train", "--model", write_model(tmp_path), "--data", write_text(tmp_path), *SMALL,
            "--checkpoint", tmp_path / "ck", "--quiet"]
    return lambda *flags: command(*argv, *flags)


class Killed(BaseException):
    """A kill -9: nothing that the code would do afterwards may matter."""


def test_killed_at_any_moment(train, tmp_path, monkeypatch):
    assert train("--steps", 1) == 0
    root = tmp_path / "ck"
    calls = left = 0

    def counted(function):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls > left:
                raise Killed
            return function(*args, **kwargs)
        return call

    # the lock of a process that was really killed ends with it
    monkeypatch.setattr("bagualu.checkpoint.lock", lambda *_: None)
    for name in ("fsync", "rename", "replace"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    steps_seen = []
    for left in range(100):
        calls = 0
        try:
            train("--steps", 3, "--resume", root / "step-000001", "--keep", 100)
            break
        except Killed:
            steps_seen.append(checkpoint.load(root, verify_data=True).position.step)
    # files, folder, rename, parent, latest, parent: at least nine moments, old until the last
    assert len(steps_seen) >= 9 and set(steps_seen) <= {1, 3}
    assert checkpoint.load(root, verify_data=True).position.step == 3
    assert not list(root.glob("*.tmp-*"))


@pytest.mark.parametrize("place", ["write", "mkdir", "rename"])
def test_disk_full(train, tmp_path, monkeypatch, capfd, place):
    assert train("--steps", 1) == 0
    before = sorted(p.name for p in (tmp_path / "ck").iterdir())

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(*{"write": ("bagualu.checkpoint.write_tensors", full),
                        "mkdir": ("bagualu.checkpoint.Path.mkdir", full),
                        "rename": ("bagualu.checkpoint.os.rename", full)}[place])
        if place == "mkdir":  # preflight's own probe comes first
            patch.setattr("bagualu.preflight.check_folder", lambda folder: None)
        assert train("--steps", 2) == 2
    err = capfd.readouterr().err
    assert "No space left on device" in err and str(tmp_path / "ck") in err
    assert sorted(p.name for p in (tmp_path / "ck").iterdir()) == before
    assert checkpoint.load(tmp_path / "ck", verify_data=True).position.step == 1


def test_keeps_the_newest(train, tmp_path):
    assert train("--steps", 5, "--checkpoint-every", 1, "--keep", 3) == 0
    assert sorted(p.name for p in (tmp_path / "ck").iterdir()) == [
        "latest", "step-000003", "step-000004", "step-000005"]


def test_no_pickle_in_a_checkpoint(train, tmp_path):
    assert train("--steps", 1) == 0
    assert sorted(p.name for p in (tmp_path / "ck" / "step-000001").iterdir()) == [
        "config.json", "model.safetensors", "optimizer.safetensors", "state.json",
        "state.safetensors"]


def _edit_state(folder, **changes):
    path = folder / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "state.json cut": (lambda d: (d / "state.json").write_text('{"version"'), "state.json"),
    "state.json of another version": (lambda d: _edit_state(d, version=9), "version"),
    "state.json without step": (lambda d: _edit_state(d, step=None), "state.json"),
    "negative step": (lambda d: _edit_state(d, step=-1), "state.json"),
    "files no object": (lambda d: _edit_state(d, files=[1]), "state.json"),
    "file outside": (lambda d: _edit_state(d, files={"../x": {"bytes": 1}}), "x: size"),
    "broken model": (lambda d: _edit_state(d, model={"layers": 1}), "hidden"),
    "wrong flag": (lambda d: _edit_state(d, flags={"seq": "many"}), "seq"),
    "model cut": (lambda d: os.truncate(d / "model.safetensors", 100), "model.safetensors"),
    "model empty": (lambda d: os.truncate(d / "model.safetensors", 0), "model.safetensors"),
    "model gone": (lambda d: (d / "model.safetensors").unlink(), "model.safetensors"),
    "one bit": (lambda d: _flip(d / "optimizer.safetensors"), "optimizer.safetensors"),
    "latest nonsense": (lambda d: (d.parent / "latest").write_text("../../etc"), "latest"),
    "latest of nothing": (lambda d: (d.parent / "latest").write_text("step-000099"), "step-000099"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_checkpoint(train, tmp_path, capfd, kind):
    assert train("--steps", 1) == 0
    damage, named = DAMAGE[kind]
    damage(tmp_path / "ck" / "step-000001")
    capfd.readouterr()
    assert train("--steps", 2, "--resume", "latest") == 2
    err = capfd.readouterr().err
    assert named in err and err.count("\n") == 1


def test_checkpoint_of_another_shape(train, tmp_path, capfd):
    assert train("--steps", 1) == 0
    other = tmp_path / "other"
    other.mkdir()
    wide = write_model(other, expert_ffn=32)
    assert train("--steps", 2, "--resume", "latest", "--model", wide) == 2
    assert "expert_ffn: found 32; allowed 16" in capfd.readouterr().err
    assert train("--steps", 2, "--init", tmp_path / "ck", "--model", wide) == 2
    assert "w1.weight: found [16, 16]; allowed [32, 16]" in capfd.readouterr().err


def test_other_batch_is_refused(train, tmp_path, capfd):
    assert train("--steps", 1) == 0
    assert train("--steps", 2, "--resume", "latest", "--micro-batches", 3) == 2
    assert "sequences per step" in capfd.readouterr().err


def test_find_needs_a_checkpoint(tmp_path):
    with pytest.raises(InvalidInput, match="neither state.json nor latest"):
        checkpoint.find(tmp_path)
