"""One prediction of a training job beside llm-analysis (closed form, from PyPI): as a process and
in its own process.

llm-analysis pins an old transformers, so it gets a virtual environment of its own under build/;
where it cannot be installed, nothing is printed but a line that says so. Both predict Llama-2 70B,
tp 8, pp 4, dp 8, on 256 GPUs of 80 GB; sides are interleaved, medians of REPEATS.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / "build/rivals-venv"
PACKAGE = "llm-analysis==0.2.2"
RIVAL_FLAGS = ["--model_name=upstage_Llama-2-70b-instruct-v2", "--gpu_name=a100-sxm-80gb",
               "--batch_size_per_gpu=1", "--gradient_accumulation_steps=16", "--seq_len=4096",
               "--total_num_tokens=1000000000", "--ds_zero=1", "--dp_size=8", "--tp_size=8",
               "--pp_size=4", "--total_num_gpus=256", "--log_level=ERROR"]
OUR_FLAGS = ["plan", "--model", "llama-2-70b", "--system", "a100", "--layout",
             "tp=8,pp=4,dp=8", "--seq", "4096", "--micro-batches", "16", "--json", "-"]
IN_PROCESS = """
import logging, time, json, sys
from llm_analysis.analysis import train
logging.disable(logging.CRITICAL)
flags = {k: (int(v) if v.isdigit() else v) for k, v in
         (f[2:].split("=") for f in sys.argv[1:])}
times = []
for _ in range(30):
    begin = time.perf_counter()
    train(**flags)
    times.append(time.perf_counter() - begin)
sys.stderr.write(json.dumps(sorted(times)[len(times) // 2]))
"""


def rival_python() -> Path | None:
    """Interpreter with llm-analysis, installed on first use; None where that fails."""
    python = VENV / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", VENV], check=True)
    known = subprocess.run([python, "-c", "import llm_analysis"], capture_output=True).returncode
    if known != 0 and subprocess.run([python, "-m", "pip", "install", "-q", PACKAGE],
                                     capture_output=True).returncode != 0:
        return None
    return python


def program() -> Path:
    for folder in ("build", "build-core"):
        found = ROOT / folder / "bin/bagualu"
        if found.exists():
            return found
    sys.exit("error: no build*/bin/bagualu; scripts/build core makes it")


def seconds(command: list) -> float:
    begin = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--quick", action="store_true")
    mode.add_argument("--full", action="store_true")
    repeats = 5 if parser.parse_args().quick else 21
    ours = [program(), *OUR_FLAGS]
    seconds(ours)  # the first reads files from disk
    rival = rival_python()
    if rival is None:
        print(f"{PACKAGE} cannot be installed here: not compared", file=sys.stderr)
    times: dict[str, list[float]] = {"ours": [], "rival": []}
    for _ in range(repeats):
        times["ours"].append(seconds(ours))
        if rival is not None:
            times["rival"].append(
                seconds([rival, "-m", "llm_analysis.analysis", "train", *RIVAL_FLAGS]))
    median = statistics.median(times["ours"])
    figure = {"figure": "plan_process", "unit": "ms", "kind": "measured",
              "value": round(1e3 * median, 2), "worst": round(1e3 * max(times["ours"]), 2),
              "repeats": repeats}
    if rival is not None:
        figure["llm_analysis_ms"] = round(1e3 * statistics.median(times["rival"]), 1)
        inside = subprocess.run([rival, "-c", IN_PROCESS, *RIVAL_FLAGS], check=True,
                                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        figure["llm_analysis_in_process_ms"] = round(1e3 * float(inside.stderr.split("\n")[-1]), 3)
    print(json.dumps(figure))


if __name__ == "__main__":
    main()
