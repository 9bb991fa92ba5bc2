"""Reading and writing of small JSON files with errors that name the file and the place."""

import json
import os
from pathlib import Path
from typing import Any

from bagualu.errors import InvalidInput


def read_json_object(path: Path) -> dict[str, Any]:
    """Throws InvalidInput if the file is missing, unreadable, not JSON, or not an object."""
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInput(path, "text", f"byte {error.start} is not UTF-8", "JSON") from None
    except OSError as error:
        raise InvalidInput(path, "file", error.strerror, "a readable JSON file") from None
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise InvalidInput(path, place, error.msg, "JSON") from None
    except RecursionError:
        raise InvalidInput(path, "nesting", "too deep", "JSON of normal depth") from None
    if not isinstance(value, dict):
        raise InvalidInput(path, "top level", type(value).__name__, "an object")
    return value


def write_synced(path: Path, data: bytes) -> None:
    """Writes and fsyncs; OSError passes to the caller, who knows what to remove."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """A rename is durable only once its directory is."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, data: bytes) -> None:
    """Beside, fsync, rename, fsync of the directory: readers see the old file or the new one."""
    beside = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        write_synced(beside, data)
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)
