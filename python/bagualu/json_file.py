"""Reading and writing of small JSON files with errors that name the file and the place."""

import fcntl
import json
import os
from pathlib import Path
from typing import Any

from bagualu.errors import InvalidInput


def read_regular(path: Path, field: str, allowed: str) -> bytes:
    """The whole file. Throws InvalidInput if it is missing, unreadable, or a pipe or device, which
    could block for ever and gives its bytes only once, where every rank reads them.
    """
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise InvalidInput(path, field, "a pipe or device", allowed)
        return path.read_bytes()
    except OSError as error:
        raise InvalidInput(path, field, error.strerror, allowed) from None
    except ValueError as error:  # a path with a zero byte
        raise InvalidInput(repr(str(path)), field, error, allowed) from None


def read_json_object(path: Path) -> dict[str, Any]:
    """Throws InvalidInput if the file is missing, unreadable, not JSON, or not an object."""
    try:
        text = read_regular(path, "file", "a readable JSON file").decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInput(path, "text", f"byte {error.start} is not UTF-8", "JSON") from None
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise InvalidInput(path, place, error.msg, "JSON") from None
    except RecursionError:
        raise InvalidInput(path, "nesting", "too deep", "JSON of normal depth") from None
    except ValueError:  # Python converts at most 4,300 digits
        raise InvalidInput(path, "number", "thousands of digits", "64-bit integers") from None
    if not isinstance(value, dict):
        raise InvalidInput(path, "top level", type(value).__name__, "an object")
    return value


def lock(descriptor: int, path: Path, field: str) -> None:
    """Of one run at a time, until the descriptor is closed or its process ends, however it ends.

    Throws InvalidInput if another holds it. Devices and file systems without locks pass.
    """
    if not path.is_file() and not path.is_dir():
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InvalidInput(path, field, "in use by another run", "one run at a time") from None
    except OSError:
        return


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
    """Beside, fsync, rename, fsync of the directory: readers see the old file or the new one.

    A link is followed. A pipe or device is written to: renaming onto it would replace it.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file() and not path.is_dir():
        path.write_bytes(data)
        return
    beside = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        write_synced(beside, data)
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)
