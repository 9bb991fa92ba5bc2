"""The demo: one model, one seed, one budget; two pipeline stages of two expert-parallel ranks.

First four policies go through the same routing spikes. The reference keeps every activation and has
no budget; the others get the same one. `static` is the cheapest plan that fits the budget at calm
load and never changes, so a spike ends it; that is the point of the comparison. Then the adaptive
policy runs over an emulated slow link between expert ranks, without and with overlap: there the
exchanges of one micro-batch hide behind the compute of another. Each run is a `bagualu train` of its
own, as a user would start it. This program fails if any run ends otherwise than expected or if a
loss differs by one bit.
"""

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from bagualu.report import write_report
from bagualu.report_log import RunLog, read_logs
from bagualu.report_summary import text_report

# A quarter, a half and three quarters of the way.
SPIKES = ("layers=2-3,factor=1.8", "layers=0-3,factor=1.8", "layers=1-2,factor=2")


@dataclass(frozen=True)
class DemoRun:
    """One run and how it has to end."""

    policy: str
    budgeted: bool = True
    exit_code: int = 0
    overlap: bool = True
    slow_link: bool = False

    @property
    def name(self) -> str:
        return self.policy + (f"-slow-link-overlap-{'on' if self.overlap else 'off'}"
                              if self.slow_link else "")


RUNS = (DemoRun("save-all", budgeted=False), DemoRun("static", exit_code=1),
        DemoRun("full-recompute"), DemoRun("adaptive"),
        DemoRun("adaptive", overlap=False, slow_link=True),
        DemoRun("adaptive", overlap=True, slow_link=True))


def train_command(bagualu: Path, run: DemoRun, args: argparse.Namespace, log: Path) -> list[str]:
    """The command line of one run; printed, so that it can be repeated by hand."""
    command = [str(bagualu), "train", "--model", args.model, "--nproc", "4", "--pp", str(args.pp),
               "--ep", str(4 // args.pp), "--seq", "128", "--micro-batch-size", "2",
               "--micro-batches", str(args.micro_batches), "--steps", str(args.steps),
               "--lr", "3e-4", "--warmup", "0", "--seed", "7", "--dtype", args.dtype,
               "--policy", run.policy, "--overlap", "on" if run.overlap else "off",
               "--log", str(log)]
    if run.slow_link:
        command += ["--slow-link", args.slow_link]
    if args.init:
        command += ["--init", args.init]
    if run.budgeted:
        command += ["--budget", args.budget]
    for number, spike in enumerate(SPIKES, start=1):
        command += ["--spike", f"step={number * args.steps // 4},{spike}"]
    return command


def check(runs: list[DemoRun], logs: list[RunLog], codes: list[int]) -> list[str]:
    """What did not end as it has to; empty when all is well."""
    wrong = [f"{run.name}: exit code {code}, expected {run.exit_code}"
             for run, code in zip(runs, codes) if code != run.exit_code]
    digests = {run.name: (log.summary or {}).get("loss_digest")
               for run, log in zip(runs, logs) if run.exit_code == 0}
    if len(set(digests.values())) != 1 or None in digests.values():
        wrong.append(f"loss digests differ: {digests}")
    for run, log in zip(runs, logs):
        summary = log.summary or {}
        budget, peaks = summary.get("budget_bytes"), summary.get("peak_bytes") or []
        if budget and any(peak > budget for peak in peaks):
            wrong.append(f"{run.name}: a peak of {max(peaks)} bytes is over the budget {budget}")
        if run.exit_code == 1 and not log.ooms:
            wrong.append(f"{run.name}: ended without an out-of-memory record")
    return wrong


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__)
    parser.add_argument("--bagualu", default="build/bin/bagualu", help="the program to run")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--init", default="assets/warm", help="weights to start from; '' = random")
    parser.add_argument("--budget", default="29MiB", help="device memory of each rank")
    parser.add_argument("--pp", type=int, default=2, choices=(1, 2, 4), help="pipeline ranks")
    parser.add_argument("--micro-batches", type=int, default=6)
    parser.add_argument("--slow-link", default="20MB/s,500us", help="of the last two runs")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--out", default="build/demo", help="folder for logs and the report")
    args = parser.parse_args(argv)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    logs, codes = [], []
    for run in RUNS:
        log = out / f"{run.name}.jsonl"
        log.unlink(missing_ok=True)
        command = train_command(Path(args.bagualu), run, args, log)
        print("\n$ " + " ".join(command), flush=True)
        codes.append(subprocess.run(command, check=False).returncode)
        logs.append(log)
    for log in logs:
        if not log.exists():
            print(f"scripts/demo: no log {log}: the run never started", file=sys.stderr)
            return 1
    write_report(logs, out / "report.html")
    records = read_logs(logs)
    wrong = check(list(RUNS), records, codes)
    print("\n" + text_report(records), flush=True)
    for line in wrong:
        print(f"scripts/demo: {line}", file=sys.stderr)
    print(f"report: {out / 'report.html'}   ({time.monotonic() - begin:.0f} s for the {len(RUNS)} runs)")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
