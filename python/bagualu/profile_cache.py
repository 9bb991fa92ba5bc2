"""Where operator times of this machine are kept between runs."""

import argparse
import hashlib
import importlib.metadata
import json
import platform
from pathlib import Path
from typing import Any

from bagualu.errors import InvalidInput
from bagualu.json_file import read_json_object, write_atomic
from bagualu.model_spec import ModelSpec

_VERSION = 1
# Times do not depend on these.
_NO_MATTER = ("name", "family", "dropout", "aux_loss_coef", "z_loss_coef", "router_bias_rate")


def default_folder() -> Path:
    return Path.home() / ".cache" / "bagualu"


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
                platform.processor())


def cache_file(spec: ModelSpec, args: argparse.Namespace, folder: Path) -> Path:
    """The name is a digest of all that times depend on."""
    key = {name: value for name, value in vars(spec).items() if name not in _NO_MATTER}
    key |= {"version": _VERSION, "ep": args.ep, "micro_batch_size": args.micro_batch_size,
            "seq": args.seq, "dtype": args.dtype, "threads": args.threads,
            "processor": processor(), "torch": importlib.metadata.version("torch")}
    text = json.dumps(key, sort_keys=True).encode()
    return folder / f"profile-{hashlib.sha256(text).hexdigest()[:16]}.json"


def cached_profile(spec: ModelSpec, args: argparse.Namespace) -> dict[str, Any] | None:
    """None where `bagualu profile` was not run for this model and machine, or the file is broken:
    a cache may not stop a run."""
    path = cache_file(spec, args, default_folder())
    if not path.is_file():
        return None
    try:
        return read_json_object(path)
    except InvalidInput:
        return None


def store_profile(path: Path, text: str) -> None:
    """Throws InvalidInput if the folder cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text.encode())
    except OSError as error:
        raise InvalidInput(path, "file", error.strerror, "a file that can be written") from None
