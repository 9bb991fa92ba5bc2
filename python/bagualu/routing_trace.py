"""Recorded routing: tokens per expert of each (step, micro-batch, layer), validated on reading."""

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bagualu.errors import InvalidInput
from bagualu.json_file import read_regular
from bagualu.model_spec import ModelSpec

Row = tuple[int, int, int, list[int]]  # step, micro-batch, layer, counts


@dataclass
class RoutingTrace:
    """counts[s][m][i]: of the s-th recorded step, m-th micro-batch, i-th MoE layer."""

    counts: list[list[list[list[int]]]]

    def routing(self, step: int, microbatches: int, spec: ModelSpec) -> list[list[list[int]]]:
        """What Trainer.step takes as "routing". Steps and micro-batches past the end wrap round."""
        recorded = self.counts[step % len(self.counts)]
        moe = spec.moe_layers()
        result = []
        for m in range(microbatches):
            layers: list[list[int]] = [[] for _ in range(spec.layers)]
            for index, layer in enumerate(moe):
                layers[layer] = recorded[m % len(recorded)][index]
            result.append(layers)
        return result


def _read_text(path: Path) -> str:
    data = read_regular(path, "file", "a readable trace")
    try:
        if path.suffix == ".gz":
            data = gzip.decompress(data)
        return data.decode("utf-8")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InvalidInput(path, "gzip data", error, "a whole gzip file") from None
    except UnicodeDecodeError:
        raise InvalidInput(path, "text", "bytes that are not UTF-8", "CSV or JSON lines") from None


def _csv_lines(text: str, path: Path) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader(io.StringIO(text))
    try:
        yield from enumerate(reader, start=1)
    except csv.Error as error:
        raise InvalidInput(path, f"line {reader.line_num}", error, "CSV") from None


def _csv_rows(text: str, path: Path) -> Iterator[tuple[int, Row]]:
    for number, cells in _csv_lines(text, path):
        if not cells or cells[0].startswith("#"):
            continue
        try:
            step, microbatch, layer = (int(cell) for cell in cells[1:4])
            counts = [int(word) for word in cells[4].split()]
            if len(cells) != 5:
                raise ValueError
        except (ValueError, IndexError):
            raise InvalidInput(path, f"line {number}", repr(",".join(cells))[:80],
                               "run,step,micro_batch,layer,counts with spaces") from None
        yield number, (step, microbatch, layer, counts)


def _json_rows(text: str, path: Path) -> Iterator[tuple[int, Row]]:
    allowed = '{"step","micro_batch","layer","counts":[...]}'
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            value: dict[str, Any] = json.loads(line)
            row = (value["step"], value["micro_batch"], value["layer"], value["counts"])
            if not all(type(n) is int for n in (*row[:3], *row[3])):
                raise TypeError
        except (ValueError, KeyError, TypeError, RecursionError):
            raise InvalidInput(path, f"line {number}", repr(line)[:80], allowed) from None
        yield number, row


def _check_counts(counts: list[int], rows: int, most: int, spec: ModelSpec, where: str,
                  path: Path) -> None:
    if len(counts) != spec.experts:
        raise InvalidInput(path, where, f"{len(counts)} counts", f"{spec.experts} (experts)")
    for count in counts:
        if not 0 <= count <= most:
            raise InvalidInput(path, where, f"a count of {count}", f"0 to {most} (EP * tokens)")
    if sum(counts) != rows:
        raise InvalidInput(path, where, f"a sum of {sum(counts)}",
                           f"{rows} (EP * tokens * top_k)")


def read_trace(path: Path, spec: ModelSpec, ep_size: int, tokens: int) -> RoutingTrace:
    """tokens: per micro-batch and rank. Throws InvalidInput naming the line."""
    text = _read_text(path)
    jsonl = path.name.removesuffix(".gz").endswith(".jsonl")
    most = ep_size * tokens
    moe = len(spec.moe_layers())
    steps: dict[int, dict[int, dict[int, list[int]]]] = {}
    for number, (step, microbatch, layer, counts) in (_json_rows if jsonl else _csv_rows)(
            text, path):
        where = f"line {number}"
        if not 0 <= layer < moe:
            raise InvalidInput(path, where, f"layer {layer}", f"0 to {moe - 1} (MoE layers)")
        _check_counts(counts, most * spec.top_k, most, spec, where, path)
        layers = steps.setdefault(step, {}).setdefault(microbatch, {})
        if layer in layers:
            raise InvalidInput(path, where, f"step {step}, micro-batch {microbatch}, layer {layer} "
                               "again", "each once")
        layers[layer] = counts
    if not steps:
        raise InvalidInput(path, "rows", "none", "at least one")
    for step, microbatches in steps.items():
        for microbatch, layers in microbatches.items():
            if len(layers) != moe:
                raise InvalidInput(path, f"step {step}, micro-batch {microbatch}",
                                   f"{len(layers)} layers", f"{moe} (MoE layers of the model)")
    return RoutingTrace([[[layers[i] for i in range(moe)] for _, layers in sorted(ms.items())]
                         for _, ms in sorted(steps.items())])
