"""Fixtures: one-rank commands inside the test process, with the fake C++ module."""

import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))


@pytest.fixture
def command(monkeypatch):
    """command("train", ...) -> exit code, as `bagualu train ...` with one rank."""
    import torch
    from fake_site import fake_runtime

    import bagualu
    from bagualu import launch

    monkeypatch.setitem(sys.modules, "bagualu._runtime", fake_runtime)
    monkeypatch.setattr(bagualu, "_runtime", fake_runtime, raising=False)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    handlers = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}
    threads = torch.get_num_threads()
    yield lambda *argv: launch.main([str(a) for a in argv])
    torch.set_num_threads(threads)
    for number, handler in handlers.items():
        signal.signal(number, handler)
