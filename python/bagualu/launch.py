"""`python -m bagualu.launch COMMAND ...`: what the `bagualu` program runs for its Python commands.

For train it checks all input first, without loading torch, then starts the ranks through torchrun's
own agent and turns however they end into one line and one exit code.
"""

import json
import logging
import os
import signal
import socket
import sys
import tempfile
import uuid
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

from bagualu.distributed import DIED
from bagualu.errors import EXIT_BAD_INPUT, EXIT_JOB_FAILED, EXIT_OK, BagualuError, InvalidInput
from bagualu.failures import is_expected, note_of
from bagualu.layout import Layout
from bagualu.preflight import Job, preflight
from bagualu.train_args import WHERE, parse

COMMANDS = ("train", "profile", "generate")
_STORE_TIMEOUT = timedelta(seconds=900)


def _listen(job: Job) -> socket.socket:
    """The rendezvous socket; loopback unless asked otherwise.

    TCPStore by itself would listen on every interface, so it gets a socket that is bound already.
    """
    host, port = "127.0.0.1", job.args.master_port
    if job.args.rdzv_endpoint:
        host, _, text = job.args.rdzv_endpoint.rpartition(":")
        if not host:
            host, text = text, "0"
        if not text.isdigit() or int(text) > 65535:
            raise InvalidInput(WHERE, "--rdzv-endpoint", job.args.rdzv_endpoint, "HOST[:PORT]")
        port = int(text)
    try:
        return socket.create_server((host, port), backlog=1024)
    except OSError as error:
        raise InvalidInput(WHERE, "rendezvous", f"{host}:{port}: {error.strerror}",
                           "an address of this machine and a free port") from None


def _forward_signals(status_dir: Path, world: int) -> None:
    """SIGTERM and SIGINT go to the ranks, which finish the step and save; we wait for them."""

    def forward(number: int, _frame: FrameType | None) -> None:
        files = [status_dir / f"rank-{rank}.pid" for rank in range(world)]
        if not all(file.exists() for file in files):
            raise KeyboardInterrupt  # before training began: the agent ends what it started
        for file in files:
            try:
                os.kill(int(file.read_text()), number)
            except ProcessLookupError:
                continue

    signal.signal(signal.SIGTERM, forward)
    signal.signal(signal.SIGINT, forward)


def _start(job: Job, argv: Sequence[str], status_dir: Path) -> dict[int, Any]:
    """Runs the ranks to their end. Returns torchrun's failures by rank, empty if there are none."""
    listener = _listen(job)
    host, port = listener.getsockname()[:2]
    # The agent's own rendezvous is a file: with one machine it needs no socket at all.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no stack trace for each lost peer
    os.environ.setdefault("OMP_NUM_THREADS", str(job.args.threads))
    import torch.distributed as dist
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)  # pages; we say one line
    store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False,
                          timeout=_STORE_TIMEOUT, master_listen_fd=listener.detach())
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=job.world, run_id=uuid.uuid4().hex,
        rdzv_backend="c10d", rdzv_endpoint=str(status_dir / "rendezvous"),
        rdzv_configs={"store_type": "file"}, max_restarts=0, local_addr="127.0.0.1",
        logs_specs=DefaultLogsSpecs(log_dir=str(status_dir)), signals_to_handle="SIGQUIT")
    rank_argv = ["-m", "bagualu.train", *argv, "--status-dir", str(status_dir),
                 "--store", f"{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"]
    try:
        elastic_launch(config, sys.executable)(*rank_argv)
    except ChildFailedError as error:
        return dict(error.failures)
    finally:
        del store
    return {}


def _outcome(status_dir: Path, failures: dict[int, Any], layout: Layout) -> tuple[int, str]:
    """Exit code and the one line; a rank that wrote its own reason goes before torchrun's view."""
    statuses = []
    for file in sorted(status_dir.glob("rank-*.json")):
        statuses.append(json.loads(file.read_text()))
    own = [s for s in statuses if s["cause"] == s["rank"]]
    if own:
        return own[0]["exit_code"], own[0]["text"]
    killed = {rank: failure for rank, failure in failures.items()
              if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM}
    # The launcher itself kills a rank that stood still; the others know the reason.
    known = [s for s in statuses if s["cause"] in killed and DIED not in s["text"]]
    if killed and not known:
        rank, failure = min(killed.items())
        return EXIT_JOB_FAILED, f"{layout.name_of(rank)} was killed by {failure.signal_name()}"
    if statuses:
        told = (known or statuses)[0]
        return told["exit_code"], told["text"]
    if failures:
        rank, failure = min(failures.items())
        return EXIT_JOB_FAILED, f"{layout.name_of(rank)} ended with exit code {failure.exitcode}"
    return EXIT_OK, ""


def train(argv: Sequence[str]) -> int:
    """Exit code of the job."""
    args = parse(argv)
    job = preflight(args, args.nproc or 1, thorough=True)
    if job.world == 1:
        from bagualu.train import main as train_main

        for name in ("RANK", "WORLD_SIZE"):  # of an outer launcher, such as a batch system's
            os.environ.pop(name, None)
        return train_main(argv)
    with tempfile.TemporaryDirectory(prefix="bagualu-") as folder:
        status_dir = Path(folder)
        _forward_signals(status_dir, job.world)
        try:
            failures = _start(job, argv, status_dir)
        except KeyboardInterrupt:
            print("bagualu train: stopped before training began", file=sys.stderr)
            return EXIT_JOB_FAILED
        code, text = _outcome(status_dir, failures, job.layout)
    if code != EXIT_OK:
        print(f"bagualu train: {text}", file=sys.stderr)
    return code


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    command = argv[0] if argv else ""
    try:
        if command == "train":
            return train(argv[1:])
        if command == "profile":
            from bagualu.profile import main as profile_main

            return profile_main(argv[1:])
        if command == "generate":
            from bagualu.generate import main as generate_main

            return generate_main(argv[1:])
        raise InvalidInput(WHERE, "command", repr(command), ", ".join(COMMANDS))
    except BagualuError as error:
        print(f"bagualu {command or 'launch'}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"bagualu {command}: stopped", file=sys.stderr)
        return 128 + signal.SIGINT
    except OSError as error:  # a name too long for the system, for instance
        if error.filename is None:
            raise
        print(f"bagualu {command}: {os.fsdecode(error.filename)}: file: found {error.strerror}; "
              "allowed a path that can be used", file=sys.stderr)
        return EXIT_BAD_INPUT
    except Exception as error:
        if not is_expected(error):
            raise
        note = note_of(error, 0, None)  # of the C++ module
        print(f"bagualu {command}: {note.text}", file=sys.stderr)
        return note.exit_code


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
