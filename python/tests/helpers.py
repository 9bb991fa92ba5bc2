"""Running commands in tests as a user would, with the fake C++ module."""

import json
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent
PYTHON = TESTS.parent
# 2 layers, 4 experts: small enough that a job is all start-up.
MODEL = {"version": 1, "name": "test", "layers": 2, "hidden": 16, "heads": 2, "kv_heads": 1,
         "head_dim": 16, "vocab": 256, "experts": 4, "top_k": 2, "expert_ffn": 16}
SMALL = ["--seq", "16", "--micro-batch-size", "2", "--micro-batches", "2", "--warmup", "2"]


def environment(fake=True, **extra):
    paths = [str(PYTHON)] + ([str(TESTS / "fake_site")] if fake else [])
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"} | extra
    env.pop("BAGUALU_FAKE_RUNTIME", None)
    return env | ({"BAGUALU_FAKE_RUNTIME": "1"} if fake else {})


def start(*argv, fake=True, module="bagualu.launch", **extra):
    return subprocess.Popen([sys.executable, "-m", module, *map(str, argv)],
                            env=environment(fake, **extra), stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, errors="replace")


def run(*argv, fake=True, module="bagualu.launch", timeout=250, **extra):
    """The finished process, with stdout and stderr."""
    process = start(*argv, fake=fake, module=module, **extra)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return subprocess.CompletedProcess(argv, process.returncode, out, err)


def write_model(folder, **changes):
    path = Path(folder) / "model.json"
    path.write_text(json.dumps(MODEL | changes))
    return path


def write_text(folder, name="text.txt", size=4000):
    path = Path(folder) / name
    path.write_bytes(bytes((i * i // 7 + i) % 96 + 32 for i in range(size)))
    return path


def read_log(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def of_type(records, kind):
    return [record for record in records if record["type"] == kind]
