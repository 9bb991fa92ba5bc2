"""`scripts/soak`: trains through routing spikes, kills and resumes, for any length of time.

One run is disturbed: again and again one of its ranks or its launcher is killed, or it is asked to
stop, and it is resumed from its last checkpoint. Then the same steps are run undisturbed. Both must
have the same losses, bit for bit; no rank may run out of memory, keep a byte after a step, or grow.
The learning rate is constant, so that a run does not depend on how many steps it will have.

state.json in the folder says how far it came: the same command line goes on after an interruption.
"""

import argparse
import json
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from bagualu.json_file import write_atomic
from bagualu.report_log import read_log

DISTURBED_SHARE = 0.55  # of the time; starts cost time, so the same steps take less undisturbed
# Drawn from: SIGKILL or SIGSTOP of a random rank, SIGKILL of the launcher, SIGTERM (a clean stop).
KILLS = ("rank", "rank", "rank", "launcher", "stop", "freeze")
ENDS_WITHIN_S = 60.0
RSS_GROWTH_BYTES = 8 << 20  # of a rank, in the second half of the undisturbed run
SPIKES = ("step=20,every=33,layers=1-2,factor={ep}", "step=31,every=50,layers=0-3,factor={half}")
_SAMPLES_TO_JUDGE = 36  # three minutes: caches of torch, the arena and Python fill up before
_POLL_S = 0.2
_TAIL_BYTES = 1 << 20
_START_S = 300.0  # longest from a start to its first step


@dataclass
class State:
    """What is kept in state.json. Times in seconds."""

    budget_bytes: int = 0
    disturbed_s: float = 0.0
    undisturbed_s: float = 0.0
    starts: int = 0
    kills: dict[str, int] = field(default_factory=dict)
    slowest_end_s: float = 0.0  # from a kill until the last process was gone
    reference_starts: int = 0
    reference_steps: int = 0  # 0: the disturbed run is not finished
    rss: dict[str, list[int]] = field(default_factory=dict)  # by rank, of the undisturbed run
    wrong: list[str] = field(default_factory=list)


class Soak:
    """Owns: the folder. Progress goes to standard error."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.out = Path(args.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self._file = self.out / "state.json"
        self.state = State(**json.loads(self._file.read_text())) if self._file.exists() else State()
        self._random = random.Random(f"{args.seed} {self.state.starts}")

    def save(self) -> None:
        write_atomic(self._file, json.dumps(asdict(self.state), indent=1).encode())

    def say(self, text: str) -> None:
        print(f"soak {self.state.disturbed_s + self.state.undisturbed_s:6.0f} s: {text}",
              file=sys.stderr, flush=True)

    def command(self, name: str, steps: int) -> list[str]:
        args = self.args
        half = 1 + (args.ep - 1) / 2
        command = [args.bagualu, "train", "--model", args.model, "--nproc", str(args.nproc),
                   "--pp", str(args.pp), "--ep", str(args.ep), "--seq", "128",
                   "--micro-batch-size", "1", "--micro-batches", str(args.micro_batches),
                   "--lr", "3e-4", "--min-lr", "3e-4", "--warmup", "0", "--seed", str(args.seed),
                   "--validate-every", "25", "--steps", str(steps), "--quiet", *args.train]
        if args.init:
            command += ["--init", args.init]
        for spike in SPIKES:
            command += ["--spike", spike.format(ep=args.ep, half=half)]
        if name:
            folder = self.out / name
            command += ["--log", f"{folder}.jsonl", "--checkpoint", str(folder),
                        "--checkpoint-every", "10", "--budget", str(self.state.budget_bytes)]
            if (folder / "latest").exists():
                at = command.index("--init") if args.init else len(command)
                command[at:at + 2] = []
                command += ["--resume", "latest"]
        return command

    def find_budget(self) -> None:
        """Less than a spike needs if all is kept, so that spikes have to be survived."""
        done = subprocess.run([*self.command("", 1), "--dry-run"], capture_output=True, text=True,
                              check=False)
        if done.returncode:
            raise SystemExit(done.stderr)
        report = json.loads(done.stdout)
        ranks = [entry["floor"] for entry in report.get("ranks", [{"floor": report["floor"]}])]
        floor, calm, worst = (max(r[key] for r in ranks) for key in (
            "floor_bytes", "calm_peak_bytes", "worst_save_all_bytes"))
        self.state.budget_bytes = max(floor, calm + (worst - calm) // 8)
        self.say(f"budget {self.state.budget_bytes} bytes; floor {floor}, calm {calm}, worst {worst}")

    def steps_of(self, name: str) -> int:
        """Steps in the log: one more than the number of the last."""
        path = self.out / f"{name}.jsonl"
        if not path.exists():
            return 0
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            numbers = re.findall(rb'\n\{"type": "step", "step": (\d+),', file.read())
        return int(numbers[-1]) + 1 if numbers else 0

    def run(self) -> dict[str, Any]:
        if not self.state.budget_bytes:
            self.find_budget()
            self.save()
        total_s = self.args.minutes * 60
        while self.state.disturbed_s < total_s * DISTURBED_SHARE:
            self.disturb()
        if not self.state.reference_steps:
            self.settle()
        self.undisturbed()
        return self.result()

    def disturb(self) -> None:
        """One start, and one end of it."""
        begin = time.monotonic()
        kind = self._random.choice(KILLS)
        self.state.starts += 1
        before = self.steps_of("disturbed")
        job = Job(self.command("disturbed", 10_000_000))
        first = job.wait(lambda: self.steps_of("disturbed") != before, _START_S)
        if first:
            job.wait(lambda: False, self._random.uniform(2.0, self.args.longest_s))
        if job.process.poll() is not None:
            self.fail(f"ended by itself, exit code {job.process.returncode}: {job.errors()}")
        took = job.end(kind, self._random)
        self.check_end(kind, job, took)
        self.state.kills[kind] = self.state.kills.get(kind, 0) + 1
        self.state.slowest_end_s = max(self.state.slowest_end_s, took)
        self.state.disturbed_s += time.monotonic() - begin
        self.save()
        self.say(f"{self.steps_of('disturbed')} steps, start {self.state.starts}, {kind} ended after "
                 f"{took:.1f} s")

    def check_end(self, kind: str, job: "Job", took: float) -> None:
        if took > ENDS_WITHIN_S:
            self.fail(f"{kind}: the last process ended after {took:.0f} s")
        text, code = job.errors(), job.process.returncode
        if kind in ("rank", "freeze") and (code != 1 or f"rank {job.victim}" not in text):
            self.fail(f"{kind} {job.victim} was hit, exit code {code}: {text}")
        if kind == "stop" and code != 0:
            self.fail(f"asked to stop, exit code {code}: {text}")

    def fail(self, text: str) -> None:
        self.state.wrong.append(text)
        self.save()
        self.say(f"WRONG: {text}")

    def settle(self) -> None:
        """Runs the disturbed run to its end: the next multiple of ten steps."""
        steps = -(-self.steps_of("disturbed") // 10) * 10 + 10
        job = Job(self.command("disturbed", steps))
        job.wait(lambda: False, None)
        if job.process.returncode:
            self.fail(f"the last start failed, exit code {job.process.returncode}: {job.errors()}")
        self.state.reference_steps = steps
        self.save()

    def undisturbed(self) -> None:
        """The same steps in one start. Interrupted, it goes on from its checkpoint."""
        if self.steps_of("undisturbed") >= self.state.reference_steps:
            return
        begin, spent = time.monotonic(), self.state.undisturbed_s
        self.state.reference_starts += 1
        self.state.rss = {}
        job = Job(self.command("undisturbed", self.state.reference_steps))
        while not job.wait(lambda: False, 5.0) and job.process.poll() is None:
            for rank, process in job.ranks().items():
                with_rank = self.state.rss.setdefault(str(rank), [])
                with_rank.append(process.memory_info().rss)
            self.state.undisturbed_s = spent + time.monotonic() - begin
            self.save()
            self.say(f"undisturbed, {self.steps_of('undisturbed')} of "
                     f"{self.state.reference_steps} steps")
        if job.process.returncode:
            self.fail(f"undisturbed, exit code {job.process.returncode}: {job.errors()}")
        self.save()

    def result(self) -> dict[str, Any]:
        logs = {name: read_log(self.out / f"{name}.jsonl") for name in ("disturbed", "undisturbed")}
        losses = {name: [(s["loss"], s["grad_norm"]) for s in log.steps]
                  for name, log in logs.items()}
        ranks = [s["ranks"] for log in logs.values() for s in log.steps]
        ends = [len({(step[r]["end_bytes"], step[r].get("host_end_bytes", 0)) for step in ranks})
                for r in range(self.args.nproc)]
        growth = {rank: median(values[-len(values) // 10:]) - median(values[len(values) // 2:][:9])
                  for rank, values in self.state.rss.items() if len(values) >= _SAMPLES_TO_JUDGE}
        peak = max((entry["peak_bytes"] for step in ranks for entry in step), default=0)
        result = {
            "benchmark": "soak", "minutes": self.args.minutes, "nproc": self.args.nproc,
            "pp": self.args.pp, "ep": self.args.ep, "train_flags": self.args.train,
            "steps": len(losses["disturbed"]), "starts": self.state.starts,
            "kills": self.state.kills, "slowest_end_s": round(self.state.slowest_end_s, 1),
            "spikes": sum(s.get("spike", False) for s in logs["disturbed"].steps),
            "mitigations": len(logs["disturbed"].mitigations),
            "out_of_memory": sum(len(log.ooms) for log in logs.values()),
            "losses_equal": losses["disturbed"] == losses["undisturbed"],
            "distinct_end_bytes": ends, "rss_growth_in_second_half_bytes": growth,
            "budget_bytes": self.state.budget_bytes, "peak_bytes": peak,
            "unaccounted_bytes": max((e.get("unaccounted_bytes", 0) for s in ranks for e in s),
                                     default=0),
            "reference_starts": self.state.reference_starts}
        result["wrong"] = self.state.wrong + list(complaints(result))
        return result


def complaints(result: dict[str, Any]) -> Iterator[str]:
    if not result["losses_equal"]:
        yield "losses or gradient norms differ from the undisturbed run"
    if result["out_of_memory"]:
        yield "a rank ran out of memory"
    if any(count != 1 for count in result["distinct_end_bytes"]):
        yield "bytes are left after some steps"
    if result["peak_bytes"] > result["budget_bytes"] or result["unaccounted_bytes"]:
        yield "a peak is over the budget, or bytes are not accounted for"
    if any(growth > RSS_GROWTH_BYTES for growth in
           result["rss_growth_in_second_half_bytes"].values()):
        yield "a process grows"
    if not result["spikes"] or not result["mitigations"]:
        yield "no spike had to be survived"


class Job:
    """A running `bagualu train` and its processes."""

    def __init__(self, command: list[str]) -> None:
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                        text=True)
        self.victim = -1
        self._errors = ""

    def wait(self, until: Any, seconds: float | None) -> bool:
        """True once until() holds; False when the time is up or the job ended."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while self.process.poll() is None:
            if until():
                return True
            if deadline is not None and time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return False

    def ranks(self) -> dict[int, psutil.Process]:
        found = {}
        try:
            children = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return {}
        for child in children:
            try:
                if "bagualu.train" in child.cmdline():
                    found[int(child.environ()["RANK"])] = child
            except (psutil.Error, KeyError):
                continue
        return found

    def end(self, kind: str, draw: random.Random) -> float:
        """Seconds until every process was gone."""
        ranks = self.ranks()
        begin = time.monotonic()
        if kind in ("rank", "freeze") and ranks:
            self.victim = draw.choice(sorted(ranks))
            ranks[self.victim].send_signal(signal.SIGKILL if kind == "rank" else signal.SIGSTOP)
        else:
            self.process.send_signal(signal.SIGTERM if kind == "stop" else signal.SIGKILL)
        try:
            _, self._errors = self.process.communicate(timeout=4 * ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
        _, alive = psutil.wait_procs(list(ranks.values()), timeout=2 * ENDS_WITHIN_S)
        took = time.monotonic() - begin
        for process in alive:
            process.kill()
        return took

    def errors(self) -> str:
        if not self._errors and self.process.poll() is not None and self.process.stderr and \
                not self.process.stderr.closed:
            self._errors = self.process.stderr.read()
        return self._errors.strip()[-2000:]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--longest-s", type=float, default=45.0, help="between a first step and a kill")
    parser.add_argument("--bagualu", default="build/bin/bagualu", help="the program to run")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--init", default="assets/warm", help="weights to start from; '' = random")
    parser.add_argument("--nproc", type=int, default=4)
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--ep", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--out", default="build/soak", help="folder of logs, checkpoints and state")
    parser.add_argument("train", nargs="*", help="after --: more flags of bagualu train")
    soak = Soak(parser.parse_args(argv))
    result = soak.run()
    text = json.dumps(result)
    write_atomic(soak.out / "result.json", (text + "\n").encode())
    print(text)
    for line in result["wrong"]:
        print(f"scripts/soak: {line}", file=sys.stderr)
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
