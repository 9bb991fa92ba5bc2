"""Real runs against their simulation: calm with and without pairs of passes, spikes, two stages.

In every round each is profiled, trained at once and validated (`bagualu simulate --validate`):
decisions and bytes have to be equal, times are reported, by round and of all steps together. Usage:
validate_runs.py FOLDER [MODEL [ROUNDS]]; keeps logs and answers there. Exit code 1 if a byte or a
decision differs. On a busy machine times say little: run it alone.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
SHAPE = ["--seq", "128", "--micro-batch-size", "2"]
STEPS = 24
RUNS = {
    "calm": ["--nproc", "2", "--ep", "2"],
    "no pairs": ["--nproc", "2", "--ep", "2", "--overlap", "off"],
    "spiky": ["--nproc", "2", "--ep", "2",
              "--spike", "step=6-7,layers=1-2,factor=1.7,every=6"],
    "pipeline": ["--nproc", "2", "--pp", "2"],
}


def bagualu(*arguments: str, code: int = 0) -> str:
    env = os.environ | {"PYTHONPATH": str(ROOT / "python"), "OMP_NUM_THREADS": "1"}
    if arguments[0] == "simulate":
        program = next(p for p in (ROOT / "build/bin/bagualu", ROOT / "build-core/bin/bagualu")
                       if p.exists())
        command = [str(program)]
    else:
        command = [sys.executable, "-m", "bagualu.launch"]
    done = subprocess.run([*command, *arguments], env=env, cwd=ROOT, capture_output=True,
                          text=True)
    if done.returncode not in (0, code):
        sys.exit(done.stdout[-2000:] + done.stderr)
    return done.stdout


def budget_of(model: str, flags: list[str]) -> str:
    """Calm routing fits, the worst does not."""
    floor = json.loads(bagualu("train", "--model", model, *SHAPE, *flags, "--threads", "1",
                               "--dry-run"))["floor"]
    return str((floor["floor_bytes"] + 9 * floor["calm_peak_bytes"]) // 10)


def validate(folder: Path, model: str, name: str, number: int) -> dict:
    flags = RUNS[name]
    ep = flags[flags.index("--ep") + 1] if "--ep" in flags else "1"
    stem = f"{name.replace(' ', '-')}-{number}"
    profile, log = folder / f"{stem}.profile.json", folder / f"{stem}.jsonl"
    bagualu("profile", "--model", model, "--ep", ep, *SHAPE, "--threads", "1",
            "--cache", str(folder / f"cache-{stem}"), "--json", str(profile))
    budget = ["--budget", budget_of(model, flags)] if name == "spiky" else []
    bagualu("train", "--model", model, *SHAPE, *flags, *budget, "--threads", "1",
            "--micro-batches", "4", "--steps", str(STEPS), "--profile", str(profile),
            "--quiet", "--log", str(log))
    text = bagualu("simulate", "--validate", str(log), "--json", "-", "--quiet", code=1)
    (folder / f"{stem}.validation.json").write_text(text)
    return json.loads(text)


def summary(name: str, rounds: list[dict]) -> str:
    """One line; times of steps that were simulated."""
    different: dict[str, int] = {}
    compared: dict[str, int] = {}
    for found in rounds:
        for key, entry in found["total"].items():
            compared[key] = compared.get(key, 0) + entry["compared"]
            different[key] = different.get(key, 0) + entry["different"]
    steps = [[s for s in found["steps"] if s["predicted_ns"]] for found in rounds]
    ratios = [median(s["predicted_ns"] for s in one) / median(s["measured_ns"] for s in one)
              for one in steps]
    errors = [s["predicted_ns"] / s["measured_ns"] - 1 for one in steps for s in one]
    return (f"{name}: {sum(different.values())} different of {compared['residencies']} "
            f"residencies, {compared['passes']} bytes of passes, {compared['points']} of actions; "
            f"{len(errors)} steps, error {100 * median(map(abs, errors)):.1f}% median, signed "
            f"{100 * median(errors):+.1f}%; predicted over measured by round "
            f"{', '.join(f'{r:.2f}' for r in ratios)}, median {median(ratios):.2f}")


def main() -> int:
    folder, model = Path(sys.argv[1]), (sys.argv[2:] or ["demo"])[0]
    count = int((sys.argv[3:] or ["5"])[0])
    folder.mkdir(parents=True, exist_ok=True)
    rounds: dict[str, list[dict]] = {name: [] for name in RUNS}
    for number in range(count):
        for name in RUNS:
            rounds[name].append(validate(folder, model, name, number))
    for name, found in rounds.items():
        print(summary(name, found), flush=True)
    return 0 if all(one["equal"] for found in rounds.values() for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())
