"""Reads run logs (JSON lines, docs/formats.md) into RunLog values that a report can trust.

Invariants of a RunLog: the first line was a "run" record of a known version; `steps` ascends and
holds each step once; every field named in _SCHEMA has the type given there.
"""

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bagualu.errors import InvalidInput
from bagualu.json_file import read_regular
from bagualu.report_steps import TracedSteps, read_steps
from bagualu.run_log import PIPELINE_FIELDS

LOG_VERSION = 1
_BOUND = 2**63  # bytes and nanoseconds are int64; this also keeps infinity out

_INT = "an integer"
_NUMBER = "a number"
_TEXT = "a string"
_BOOL = "true or false"
_LIST = "a list"
_OBJECT = "an object"
_NUMBERS = "a list of numbers"
_NUMBERS_OR_NULL = "a list of numbers (null where there is none)"
_NUMBER_MAP = "an object of numbers"
_POINTS = "a list of [nanoseconds, bytes, operator]"

_HEADER = re.compile(rb'\{"type": ?"run"')

# Per record type: field -> (kind, required, may be null). Fields that no report uses are not listed
# and pass unchecked, so a newer writer of the same version may add some.
_SCHEMA: dict[str, dict[str, tuple[str, bool, bool]]] = {
    "run": {
        "policy": (_TEXT, True, False),
        "world_size": (_INT, True, False),
        "steps": (_INT, True, False),
        "budget_bytes": (_INT, True, True),
        "ep": (_INT, False, True),
        "dtype": (_TEXT, False, True),
        "seed": (_INT, False, True),
        "floor_bytes": (_INT, False, True),
        "static_bytes": (_INT, False, True),
        "micro_batch_size": (_INT, False, True),
        "seq": (_INT, False, True),
        "microbatches": (_INT, False, True),
        "model": (_OBJECT, False, True),
        "pp": (_INT, False, True),
        "pipeline": (_TEXT, False, True),
        "stage_layers": (_NUMBERS, False, True),
        "overlap": (_BOOL, False, True),
        "trace_step": (_NUMBERS, False, True),
        "ranks": (_LIST, False, True),
    },
    "step": {
        "step": (_INT, True, False),
        "loss": (_NUMBER, True, True),
        "step_ns": (_NUMBER, True, False),
        "tokens": (_INT, False, True),
        "tokens_per_s": (_NUMBER, True, True),
        "imbalance": (_NUMBERS_OR_NULL, True, False),
        "spike": (_BOOL, False, True),
        "ranks": (_LIST, True, False),
    },
    "rank": {
        "rank": (_INT, True, False),
        "peak_bytes": (_INT, True, False),
        "predicted_peak_bytes": (_INT, False, True),
        "end_bytes": (_INT, False, True),
        "host_peak_bytes": (_INT, False, True),
        "residencies": (_NUMBER_MAP, False, True),
        "decision_ns": (_NUMBERS, False, True),
        "cache_hits": (_INT, False, True),
        **{name: (_INT, False, True) for name in PIPELINE_FIELDS},
    },
    "held": {"rank": (_INT, True, False), "stages": (_NUMBERS, False, True)},
    "start": {},  # for `bagualu simulate --validate`
    "mitigation": {
        "step": (_INT, True, False),
        "rank": (_INT, True, False),
        "microbatch": (_INT, False, True),
        "layer": (_INT, False, True),
        "load_imbalance": (_NUMBER, False, True),
        "needed_bytes": (_INT, False, True),
        "actions": (_LIST, True, False),
        "cost_ns": (_NUMBER, False, True),
    },
    "action": {
        "unit": (_TEXT, True, False),
        "residency": (_TEXT, True, False),
        "bytes": (_INT, False, True),
        "ns": (_NUMBER, False, True),
    },
    "memory": {
        "step": (_INT, True, False),
        "rank": (_INT, True, False),
        "points": (_POINTS, True, False),
    },
    "validation": {"step": (_INT, True, False), "loss": (_NUMBER, True, True)},
    "checkpoint": {"step": (_INT, True, False)},
    "oom": {
        "step": (_INT, True, False),
        "rank": (_INT, True, False),
        "microbatch": (_INT, False, True),
        "layer": (_INT, False, True),
        "op": (_TEXT, False, True),
        "wanted_bytes": (_INT, False, True),
        "left_bytes": (_INT, False, True),
        "budget_bytes": (_INT, False, True),
    },
    "summary": {
        "steps_completed": (_INT, True, False),
        "oom_count": (_INT, False, True),
        "restarts": (_INT, False, True),
        "tokens_per_s": (_NUMBER, False, True),
        "peak_bytes": (_NUMBERS, False, True),
        "loss_digest": (_TEXT, False, True),
        "grad_digest": (_TEXT, False, True),
        "spikes": (_INT, False, True),
        "spikes_survived": (_INT, False, True),
        "decision_ns": (_NUMBER_MAP, False, True),
        "plan_cache_hit_fraction": (_NUMBER, False, True),
    },
}
_NESTED = {("run", "ranks"): "held", ("step", "ranks"): "rank", ("mitigation", "actions"): "action"}


@dataclass
class RunLog:
    """One run: its header, its records by type, and what was wrong with the file.

    `torn_lines` counts lines that a killed writer left unfinished, `ignored_records` those of a
    type unknown here. `label` is the policy, made unique among the logs of one report.
    """

    path: Path
    run: dict[str, Any]
    steps: list[dict[str, Any]] = field(default_factory=list)
    mitigations: list[dict[str, Any]] = field(default_factory=list)
    memory: list[dict[str, Any]] = field(default_factory=list)
    validation: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    ooms: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] | None = None
    resumes: int = 0
    torn_lines: int = 0
    ignored_records: int = 0
    label: str = ""
    traced: TracedSteps = field(default_factory=TracedSteps)


def read_logs(paths: list[str | Path], program: str | None = None) -> list[RunLog]:
    """Reads every log and the step traces beside it, and gives each log a unique label.

    program: bagualu, which replays the traces; None: report_steps.find_program()
    Throws: InvalidInput naming file and line if one is no run log, or is given twice.
    """
    logs: list[RunLog] = []
    for path in paths:
        if any(Path(path).resolve() == log.path.resolve() for log in logs):
            raise InvalidInput(str(path), "log", "given twice", "each log once")
        logs.append(read_log(path))
        logs[-1].traced = read_steps(logs[-1].path, logs[-1].run, program)
    _label(logs)
    return logs


def read_log(path: str | Path) -> RunLog:
    """Reads one log. A torn last line is counted, not an error.

    Throws: InvalidInput naming file, line and field.
    """
    path = Path(path)
    data = read_regular(path, "log", "a file")
    lines = data.split(b"\n")
    if not data.strip():
        raise InvalidInput(str(path), "log", "an empty file", "a run log (JSON lines)")
    records, torn = _parse(path, lines)
    if not records or records[0][1].get("type") != "run":
        raise InvalidInput(f"{path}:1", "type", _first_type(records), '"run" (a run log)')
    return _assemble(path, records, torn)


def _first_type(records: list[tuple[int, dict[str, Any]]]) -> str:
    return json.dumps(records[0][1].get("type")) if records else "no whole line"


def _parse(path: Path, lines: list[bytes]) -> tuple[list[tuple[int, dict[str, Any]]], int]:
    """Records with their line numbers, and the count of torn lines.

    A killed writer leaves half a line. It is the file's last, or, if the run was resumed into the
    same file, the new header follows it: on the next line, or glued to the torn half.
    """
    filled = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    records: list[tuple[int, dict[str, Any]]] = []
    torn = 0
    for index, (number, line) in enumerate(filled):
        record = _load(line)
        if record is None and records:
            last = index + 1 == len(filled)
            header = _HEADER.search(line)
            record = _load(line[header.start():]) if header else None
            if record is None and (last or _is_run(_load(filled[index + 1][1]))):
                torn += 1
                continue
            torn += 1
        if record is None:
            shown = line[:40].decode("utf-8", "replace")
            raise InvalidInput(f"{path}:{number}", "line", repr(shown), "a JSON object")
        records.append((number, record))
    return records, torn


def _load(line: bytes) -> dict[str, Any] | None:
    try:
        # NaN and Infinity are no JSON, yet Python writes them for a loss that blew up.
        value = json.loads(line, parse_constant=lambda _: None)
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        return None
    return value if isinstance(value, dict) else None


def _is_run(record: dict[str, Any] | None) -> bool:
    return record is not None and record.get("type") == "run"


def _assemble(path: Path, records: list[tuple[int, dict[str, Any]]], torn: int) -> RunLog:
    log = RunLog(path, records[0][1], torn_lines=torn)
    segments: list[list[dict[str, Any]]] = []
    for number, record in records:
        kind = record.get("type")
        where = f"{path}:{number}"
        if kind == "run":
            _check_version(where, record)
            segments.append([])
            log.run = record
        if kind not in _SCHEMA or kind in ("held", "rank", "action"):
            log.ignored_records += 1
            continue
        _check(where, kind, record)
        segments[-1].append(record)
    log.resumes = len(segments) - 1
    # A resumed run repeats the steps after its checkpoint: the later record of a step counts.
    first_later = math.inf
    lists = {"step": log.steps, "mitigation": log.mitigations, "memory": log.memory,
             "validation": log.validation, "checkpoint": log.checkpoints}
    for segment in reversed(segments):
        for kind, kept in lists.items():
            kept[:0] = [r for r in segment if r["type"] == kind and r["step"] < first_later]
        log.ooms[:0] = [r for r in segment if r["type"] == "oom"]
        first_later = min([first_later] + [r["step"] for r in segment if r["type"] == "step"])
    log.summary = next((r for r in reversed(segments[-1]) if r["type"] == "summary"), None)
    log.steps = list({r["step"]: r for r in sorted(log.steps, key=lambda r: r["step"])}.values())
    return log


def _check_version(where: str, record: dict[str, Any]) -> None:
    version = record.get("version")
    if version != LOG_VERSION or isinstance(version, bool):
        raise InvalidInput(where, "version", json.dumps(version), f"{LOG_VERSION}")


def _check(where: str, kind: str, record: dict[str, Any]) -> None:
    for name, (wanted, required, nullable) in _SCHEMA[kind].items():
        value = record.get(name)
        if name not in record:
            if required:
                raise InvalidInput(where, f"{kind}.{name}", "nothing", wanted)
        elif value is None:
            if not nullable:
                raise InvalidInput(where, f"{kind}.{name}", "null", wanted)
        elif not _matches(value, wanted):
            raise InvalidInput(where, f"{kind}.{name}", json.dumps(value)[:60], wanted)
        nested = _NESTED.get((kind, name))
        for entry in value if nested and isinstance(value, list) else []:
            if not isinstance(entry, dict):
                raise InvalidInput(where, f"{kind}.{name}", json.dumps(entry)[:60], "objects")
            _check(where, nested, entry)


def _matches(value: Any, wanted: str) -> bool:
    if wanted == _NUMBERS:
        return isinstance(value, list) and all(_is_number(v) for v in value)
    if wanted == _NUMBERS_OR_NULL:
        return isinstance(value, list) and all(v is None or _is_number(v) for v in value)
    if wanted == _NUMBER_MAP:
        return isinstance(value, dict) and all(v is None or _is_number(v) for v in value.values())
    if wanted == _POINTS:
        return isinstance(value, list) and all(
            isinstance(p, list) and len(p) >= 2 and _is_number(p[0]) and _is_number(p[1])
            for p in value)
    if wanted == _NUMBER:
        return _is_number(value)
    if wanted == _INT:
        return isinstance(value, int) and _is_number(value)
    return isinstance(value, {_TEXT: str, _BOOL: bool, _LIST: list, _OBJECT: dict}[wanted])


def _is_number(value: Any) -> bool:
    return (isinstance(value, (int, float)) and not isinstance(value, bool)
            and -_BOUND < value < _BOUND)


def _label(logs: list[RunLog]) -> None:
    for log in logs:
        same = [other for other in logs if other.run["policy"] == log.run["policy"]]
        log.label = log.run["policy"]
        if len({bool(other.run.get("slow_link")) for other in same}) > 1:
            log.label += ", slow link" if log.run.get("slow_link") else ""
            same = [o for o in same if bool(o.run.get("slow_link")) == bool(log.run.get("slow_link"))]
        if len({other.run.get("overlap") for other in same}) > 1:
            log.label += f", overlap {'on' if log.run.get('overlap') else 'off'}"
    for name in {log.label for log in logs}:
        same = [log for log in logs if log.label == name]
        for log in same if len(same) > 1 else []:
            log.label = f"{name} ({log.path.stem})"
    for index, log in enumerate(logs):
        if any(other.label == log.label for other in logs[:index]):
            log.label = f"{log.label} #{index + 1}"
