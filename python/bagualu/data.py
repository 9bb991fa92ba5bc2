"""Byte-level text, sampled without state.

Which bytes row n of the global batch of step s gets is a function of (seed, s, n) alone, so the
data position of a checkpoint is its step, and every number of ranks sees the same global batch.
Invariant: a micro-batch comes from one domain (one file).
"""

import hashlib
import lzma
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bagualu.errors import InvalidInput
from bagualu.json_file import read_regular

VOCAB = 256
VALIDATION_FRACTION = 0.05
_STDLIB_BYTES = 4_000_000


@dataclass
class Domain:
    """One corpus; the last part is for validation."""

    name: str
    train: NDArray[np.uint8]
    validation: NDArray[np.uint8]


def corpora_folder() -> Path:
    """Package data, or assets/ of a source tree."""
    here = Path(__file__).resolve().parent
    installed = here / "corpora"
    return installed if installed.is_dir() else here.parents[1] / "assets" / "corpora"


def _read(path: Path) -> bytes:
    data = read_regular(path, "data", "a readable text file")
    if path.suffix != ".xz":
        return data
    try:
        return lzma.decompress(data)
    except lzma.LZMAError as error:
        raise InvalidInput(path, "data", error, "a whole .xz file") from None


def _python_source() -> bytes:
    """The running interpreter's own modules, in sorted order, cut at a fixed size."""
    root = Path(sysconfig.get_paths()["stdlib"])
    parts: list[bytes] = []
    total = 0
    for path in sorted(root.glob("*.py")) + sorted(root.glob("[a-z]*/*.py")):
        if "-packages" in str(path) or "/test" in str(path):
            continue
        parts.append(path.read_bytes())
        total += len(parts[-1])
        if total >= _STDLIB_BYTES:
            break
    return b"".join(parts)[:_STDLIB_BYTES]


def _domain(name: str, text: bytes, seq: int, where: object) -> Domain:
    if not text:
        raise InvalidInput(where, "data", "an empty file", f"at least {seq + 1} bytes")
    cut = len(text) - int(len(text) * VALIDATION_FRACTION)
    if cut < seq + 1:
        raise InvalidInput(where, "data", f"{cut} bytes to train on",
                           f"at least one sequence ({seq + 1} bytes)")
    array = np.frombuffer(text, dtype=np.uint8)
    validation = array[cut:] if len(array) - cut >= seq + 1 else array[-(seq + 1):]
    return Domain(name, array[:cut], validation)


def check_sources(names: list[str], seq: int) -> None:
    """The cheap part of load_domains, for before any rank starts. Throws as it does."""
    for name in names:
        if name != "builtin":
            _domain(name, _read(Path(name)), seq, name)


def load_domains(names: list[str], seq: int) -> list[Domain]:
    """Throws InvalidInput if a file is missing, empty or shorter than one sequence."""
    domains = []
    for name in names:
        if name == "builtin":
            for stem in ("shakespeare", "kjv"):
                path = corpora_folder() / f"{stem}.txt.xz"
                domains.append(_domain(stem, _read(path), seq, path))
            domains.append(_domain("python", _python_source(), seq, "builtin python"))
        else:
            domains.append(_domain(Path(name).stem, _read(Path(name)), seq, name))
    return domains


def _draw(*key: int | str) -> int:
    """64 random bits of a key, the same on every machine and version."""
    text = ",".join(map(str, key)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


@dataclass
class Sampler:
    """domain_slots: how many domains a step visits; micro-batches per step of the first run, kept
    by checkpoints so that a resume under another layout sees the same bytes."""

    domains: list[Domain]
    seed: int
    seq: int
    domain_slots: int

    def domain_of(self, step: int, row: int, rows: int) -> Domain:
        """Of row `row` of the `rows` of the global batch."""
        slot = row * self.domain_slots // rows
        return self.domains[_draw(self.seed, "domain", step, slot) % len(self.domains)]

    def step_tokens(self, step: int, dp_rank: int, dp_size: int, shape: tuple[int, int],
                    out: NDArray[np.int64]) -> list[str]:
        """Fills out [microbatches, micro_batch_size, seq + 1]; returns the domain per micro-batch.

        Rows are numbered micro-batch first, then data-parallel rank: a micro-batch is the same domain
        everywhere. All stages of a pipeline draw the same rows.
        """
        microbatches, size = shape
        rows = microbatches * dp_size * size
        names = []
        for m in range(microbatches):
            for b in range(size):
                row = (m * dp_size + dp_rank) * size + b
                text = self.domain_of(step, row, rows)
                start = _draw(self.seed, "row", step, row) % (len(text.train) - self.seq)
                out[m, b] = text.train[start:start + self.seq + 1]
            names.append(self.domain_of(step, m * dp_size * size, rows).name)
        return names

    def validation_tokens(self, dp_rank: int, dp_size: int, shape: tuple[int, int],
                          out: NDArray[np.int64]) -> None:
        """As step_tokens, but evenly spaced windows of the validation parts, the same each time."""
        microbatches, size = shape
        rows = microbatches * dp_size * size
        for m in range(microbatches):
            for b in range(size):
                row = (m * dp_size + dp_rank) * size + b
                text = self.domains[row % len(self.domains)].validation
                start = (len(text) - self.seq - 1) * row // rows
                out[m, b] = text[start:start + self.seq + 1]
