"""Three real runs against their simulation: calm, with spikes under a budget, two stages.

Each is profiled, trained at once and validated (`bagualu simulate --validate`): decisions and bytes
have to be equal, times are reported. Usage: validate_runs.py FOLDER [MODEL]; keeps logs and answers
there, prints one line per run. Exit code 1 if a byte or a decision differs. On a busy machine times
say little: run it alone.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHAPE = ["--seq", "128", "--micro-batch-size", "2"]
STEPS = 30
RUNS = {
    "calm": ["--nproc", "2", "--ep", "2"],
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


def main() -> int:
    folder, model = Path(sys.argv[1]), (sys.argv[2:] or ["demo"])[0]
    folder.mkdir(parents=True, exist_ok=True)
    code = 0
    for name, flags in RUNS.items():
        ep = flags[flags.index("--ep") + 1] if "--ep" in flags else "1"
        profile, log = folder / f"{name}.profile.json", folder / f"{name}.jsonl"
        bagualu("profile", "--model", model, "--ep", ep, *SHAPE, "--threads", "1",
                "--cache", str(folder / "cache"), "--json", str(profile))
        budget = ["--budget", budget_of(model, flags)] if name == "spiky" else []
        bagualu("train", "--model", model, *SHAPE, *flags, *budget, "--threads", "1",
                "--micro-batches", "4", "--steps", str(STEPS), "--profile", str(profile),
                "--quiet", "--log", str(log))
        text = bagualu("simulate", "--validate", str(log), "--json", "-", "--quiet", code=1)
        (folder / f"{name}.validation.json").write_text(text)
        found = json.loads(text)
        code |= not found["equal"]
        different = {key: entry["different"] for key, entry in found["total"].items()
                     if entry["different"]}
        print(f"{name}: {'equal' if found['equal'] else different}, "
              f"{found['total']['residencies']['compared']} residencies, "
              f"{found['total']['passes']['compared']} bytes of passes, "
              f"{found['total']['points']['compared']} of actions; step time "
              f"{100 * found['median_error_fraction']:.1f}% median, "
              f"{100 * found['p90_error_fraction']:.1f}% at 90 of 100, bias "
              f"{100 * found['bias_fraction']:+.1f}%, {found['timed_steps']} steps", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
