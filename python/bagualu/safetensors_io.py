"""Safetensors files, read and written without allocating tensors.

Why not the safetensors package: it fills its tensors through torch's CPU allocator, which in a
rank is the budgeted device arena, and it cannot stream, fsync or digest what it writes. Its own
reader and writer are the oracle in the tests.
"""

import hashlib
import json
import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bagualu.errors import InvalidInput

if TYPE_CHECKING:
    import torch

_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "U8": 1}
WEIGHT_DTYPES = ("F64", "F32", "F16", "BF16")
_TORCH_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
                "I64": "int64", "I32": "int32", "U8": "uint8"}
_CODES = {np.dtype("float64"): "F64", np.dtype("float32"): "F32", np.dtype("int64"): "I64"}
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class _Entry:
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def _entry(path: Path, name: str, value: Any, data_bytes: int) -> _Entry:
    allowed = "dtype, shape and data_offsets that agree with the file"
    try:
        dtype, shape = value["dtype"], tuple(value["shape"])
        begin, end = value["data_offsets"]
        if type(begin) is not int or type(end) is not int:
            raise ValueError
        count = 1
        for n in shape:
            if type(n) is not int or n < 0:
                raise ValueError
            count *= n
        if dtype not in _ITEM_BYTES or not 0 <= begin <= end <= data_bytes:
            raise ValueError
        if count * _ITEM_BYTES[dtype] != end - begin:
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise InvalidInput(path, name, json.dumps(value)[:100], allowed) from None
    return _Entry(dtype, shape, begin, end)


class TensorFile:
    """A mapped file. Tensors are views of the mapping, private to this process.

    Throws InvalidInput naming the file (and tensor) if it is missing, truncated or corrupt.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < 8:
                    raise InvalidInput(path, "file", f"{size} bytes", "a safetensors file")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise InvalidInput(path, "file", error.strerror, "a readable file") from None
        except ValueError as error:  # a path with a zero byte
            raise InvalidInput(repr(str(path)), "file", error, "a readable file") from None
        (header_bytes,) = struct.unpack("<Q", self._map[:8])
        if header_bytes > min(size - 8, _MAX_HEADER_BYTES):
            raise InvalidInput(path, "header", f"{header_bytes} bytes in a file of {size}",
                               "a whole safetensors file")
        try:
            header = json.loads(self._map[8:8 + header_bytes].decode("utf-8"))
            if not isinstance(header, dict):
                raise ValueError
        except (ValueError, RecursionError):
            raise InvalidInput(path, "header", "text that is not a JSON object",
                               "a safetensors header") from None
        header.pop("__metadata__", None)
        self._start = 8 + header_bytes
        self._entries = {name: _entry(path, name, value, size - self._start)
                         for name, value in header.items()}
        used = max((entry.end for entry in self._entries.values()), default=0)
        if used != size - self._start:
            raise InvalidInput(path, "file", f"{size - self._start} bytes of data",
                               f"{used}, as its header says")

    def names(self) -> list[str]:
        return list(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def dtype(self, name: str) -> str:
        """As the file names it, "F32" for instance."""
        return self._entries[name].dtype

    def numpy(self, name: str) -> np.ndarray:
        """Requires: dtype float64, float32 or int64."""
        entry = self._entries[name]
        dtype = np.dtype(_TORCH_NAMES[entry.dtype])
        count = (entry.end - entry.begin) // dtype.itemsize
        flat = np.frombuffer(self._map, dtype, count, self._start + entry.begin)
        return flat.reshape(entry.shape)

    def tensor(self, name: str) -> "torch.Tensor":
        """A view of the mapping; no tensor memory is allocated."""
        import torch  # here, so that headers can be checked without loading torch

        entry = self._entries[name]
        dtype = getattr(torch, _TORCH_NAMES[entry.dtype])
        if entry.begin == entry.end:
            return torch.empty(entry.shape, dtype=dtype)
        count = (entry.end - entry.begin) // _ITEM_BYTES[entry.dtype]
        flat = torch.frombuffer(self._map, dtype=dtype, count=count,
                                offset=self._start + entry.begin)
        return flat.reshape(entry.shape)


def write_tensors(path: Path, tensors: Sequence[tuple[str, np.ndarray]]) -> dict[str, Any]:
    """Streams contiguous arrays, fsyncs, and returns {"bytes", "sha256"} of the file.

    Throws OSError (disk full, for instance); the caller removes the folder.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, array in tensors:
        header[name] = {"dtype": _CODES[array.dtype], "shape": list(array.shape),
                        "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with open(path, "wb") as file:
        parts: list[Any] = [struct.pack("<Q", len(text)), text]
        parts += [array.reshape(-1).view(np.uint8) for _, array in tensors]
        for part in parts:
            digest.update(part)
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": 8 + len(text) + offset, "sha256": digest.hexdigest()}


def file_digest(path: Path) -> str:
    """SHA-256 of the whole file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
