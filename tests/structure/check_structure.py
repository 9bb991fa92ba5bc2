"""Checks what the compiler cannot: order of the rooms, where torch is included, length of files.

Usage: check_structure.py ROOT. Prints one line per violation; exit code 1 if there is any.
"""

import re
import sys
from pathlib import Path

# A room may include only itself and the rooms before it.
ROOMS = ("base", "model", "graph", "cost", "schedule", "provision", "sim", "runtime", "cli")
FORBIDDEN = {("runtime", "sim"), ("cli", "runtime")}
TORCH_ROOMS = {"runtime"}
TORCH_PREFIXES = ("torch/", "ATen/", "c10/", "caffe2/", "pybind11/", "Python.h")
MAX_LINES = 500

INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]')


def sources(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """Files of our own below folder, sorted, so that the output is stable."""
    return sorted(p for p in folder.rglob("*") if p.suffix in suffixes and p.is_file())


def room_violations(room: str, path: Path) -> list[str]:
    """Includes in one file that its room does not allow."""
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        match = INCLUDE.match(line)
        if not match:
            continue
        target = match.group(1)
        if target.startswith(TORCH_PREFIXES) and room not in TORCH_ROOMS:
            found.append(f"{path}:{number}: torch ({target}) only in runtime/ and python/")
        if not target.startswith("bagualu/"):
            continue
        other = target.split("/")[1]
        if other not in ROOMS:
            found.append(f"{path}:{number}: {target} is in no known room")
        elif ROOMS.index(other) > ROOMS.index(room) or (room, other) in FORBIDDEN:
            found.append(f"{path}:{number}: {room}/ may not include {target}")
    return found


def length_violations(path: Path) -> list[str]:
    """The file itself if it is too long."""
    count = len(path.read_text(encoding="utf-8").splitlines())
    return [f"{path}: {count} lines, at most {MAX_LINES}"] if count > MAX_LINES else []


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: check_structure.py ROOT", file=sys.stderr)
        return 2
    root = Path(sys.argv[1])
    found: list[str] = []
    checked = 0
    for folder in sorted(p for p in (root / "bagualu").iterdir() if p.is_dir()):
        if folder.name not in ROOMS:
            found.append(f"{folder}: no such room; known: {', '.join(ROOMS)}")
            continue
        for path in sources(folder, (".h", ".cpp")):
            found += room_violations(folder.name, path)
    for name in ("bagualu", "python", "tests", "bench"):
        for path in sources(root / name, (".h", ".cpp", ".py")):
            found += length_violations(path)
            checked += 1
    print("\n".join(found) if found else f"{checked} files in order")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
