"""One rank of a training job: `torchrun ... -m bagualu.train FLAGS`, or alone without torchrun.

Exit codes: 0 done or stopped cleanly, 1 the job failed, 2 bad input, 3 infeasible.
"""

import ctypes
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from bagualu.distributed import Comm, FailureNote, start_ranks
from bagualu.errors import EXIT_OK, BagualuError, InvalidInput
from bagualu.failures import first_line, is_echo, is_expected, note_of
from bagualu.json_file import write_atomic
from bagualu.preflight import Job, preflight
from bagualu.profile_cache import store_profile
from bagualu.progress import summary_table
from bagualu.runtime_module import load_runtime, new_trainer, waiting_for
from bagualu.train_args import parse

if TYPE_CHECKING:
    from bagualu.session import Session

# Longer than the watchdog needs to find a dead rank, shorter than torchrun's patience.
_AWAIT_CAUSE_S = 8.0
_PR_SET_PDEATHSIG = 1


class StopSignals:
    """SIGTERM and SIGINT ask for a stop after the step; a second one, later, ends at once."""

    def __init__(self) -> None:
        self._asked_at: float | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._asked_at is not None and now - self._asked_at > 2.0:
            os._exit(128 + number)
        self._asked_at = self._asked_at or now

    def asked(self) -> bool:
        return self._asked_at is not None


class Rank:
    """This process's part of the job, and how it ends: once, whichever thread finds the reason."""

    def __init__(self, rank: int, status_dir: str | None, json_path: str | None) -> None:
        self.rank = rank
        self.comm: Comm = Comm()
        self.session: Session | None = None
        self.trainer: Any = None
        self._echo = ""  # of a wait that another rank's end cut short
        self._status_dir = Path(status_dir) if status_dir else None
        self._json_path = json_path
        self._ending = threading.Lock()
        if self._status_dir:
            (self._status_dir / f"rank-{rank}.pid").write_text(str(os.getpid()))

    def on_failure(self, note: FailureNote) -> None:
        """Another rank ended the job. Runs in the watchdog's thread."""
        if not self._ending.acquire(blocking=False):
            return
        try:
            self._write_down(note)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(note.exit_code)

    def fail(self, error: BaseException) -> int:
        """This rank raised. Returns the exit code."""
        if is_echo(error):
            self._echo = first_line(error).split(" failed: [")[0]  # the backend's own words follow
        if not is_expected(error):
            self.comm.await_cause(_AWAIT_CAUSE_S)
        if not self._ending.acquire(blocking=False):
            time.sleep(60)  # the watchdog is ending this process
        if not is_expected(error) and not is_echo(error):
            traceback.print_exception(error)
        step = self.session.current_step if self.session else None
        note = self.comm.report_failure(note_of(error, self.rank, step))
        self._write_down(note)
        return note.exit_code

    def _write_down(self, note: FailureNote) -> None:
        if self.rank == 0 and self.session is not None:
            try:
                write_summary(self.session.record_failure(note), self._json_path)
            except InvalidInput as error:  # mostly the same full disk that ended the job
                if error.where not in note.text:
                    print(f"bagualu train: {error}", file=sys.stderr)
        if self.rank == 0:
            self.comm.acknowledge()
        mine = note.rank == self.rank
        text = note.text if mine else f"rank {self.rank} stopped: {note.text}{self._waited_for()}"
        if self._status_dir:
            status = {"rank": self.rank, "exit_code": note.exit_code, "text": note.text,
                      "cause": note.rank}
            write_atomic(self._status_dir / f"rank-{self.rank}.json", json.dumps(status).encode())
        # launch.py prints the cause itself, and bad input need not be said by every rank.
        if (mine and not self._status_dir) or (not mine and note.exit_code == 1):
            print(f"bagualu train: {text}", file=sys.stderr, flush=True)

    def _waited_for(self) -> str:
        """Whom, and in which action, when another rank ended the job; "" where nobody."""
        text = self._echo or waiting_for(self.trainer)
        return f"; it was waiting: {text}" if text else ""


def write_summary(summary: dict[str, Any], path: str | None) -> None:
    """--json FILE|-. Throws InvalidInput if it cannot be written."""
    text = json.dumps(summary)
    try:
        if path == "-":
            print(text, flush=True)
        elif path:
            write_atomic(Path(path), (text + "\n").encode())
    except OSError as error:
        raise InvalidInput(path, "--json", error.strerror, "a place with room for it") from None


def install_runtime(job: Job) -> Any:
    """The C++ module, with the device arena: from here on every tensor byte counts."""
    import torch

    torch.set_num_threads(job.args.threads)
    runtime = load_runtime()
    runtime.arena_install(job.args.budget or 0)
    return runtime


def _train(me: Rank, job: Job, stop: StopSignals) -> int:
    from bagualu.session import Session, dry_run_report, forecast_all

    args = job.args
    me.comm = start_ranks(me.rank, job.layout, job.spec.tied_embeddings, args.deadline, args.store,
                          me.on_failure)
    runtime = install_runtime(job)
    forecasts = forecast_all(runtime, job, me.comm)
    me.trainer = trainer = new_trainer(runtime, job.spec, job.trainer_options(me.rank),
                                       me.comm.groups)
    if args.write_profile:
        if me.rank == 0:
            store_profile(Path(args.write_profile), trainer.profile_json())
    elif args.dry_run:
        report = dry_run_report(trainer, job, me.comm, forecasts)
        if me.rank == 0:
            print(json.dumps(report, indent=1), flush=True)
            if args.json and args.json != "-":
                write_summary(report, args.json)
    else:
        me.session = Session(job, me.comm, trainer, forecasts, stop.asked)
        summary = me.session.run()
        if me.rank == 0:
            write_summary(summary, args.json)
            if not args.quiet and args.json != "-":
                print(summary_table(summary), flush=True)
    me.comm.close()
    return EXIT_OK


def _end_with_launcher() -> None:
    """A launcher that was killed cannot stop its ranks: the kernel asks them to stop."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    rank = int(os.environ.get("RANK", "0"))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    stop = StopSignals()
    me: Rank | None = None
    try:
        args = parse(argv)
        me = Rank(rank, args.status_dir, args.json)
        if args.status_dir and world > 1:
            _end_with_launcher()
        job = preflight(args, world, thorough=rank == 0 and not args.status_dir)
        return _train(me, job, stop)
    except BagualuError as error:
        if me is not None:
            return me.fail(error)
        if rank == 0:
            print(f"bagualu train: {error}", file=sys.stderr)
        return error.exit_code
    except Exception as error:
        return me.fail(error) if me is not None else _crash(error)


def _crash(error: Exception) -> int:
    traceback.print_exception(error)
    return 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of the C++ module and of c10d may outlive a failed job: nothing may wait for them.
    os._exit(code)
