"""Ranks: process groups, small messages through the store, and knowing who died.

Messages between ranks use the TCP store and not collectives, because collectives on text allocate
tensors, and every tensor byte of a rank counts against its budget.
"""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from bagualu.layout import Layout

# Store waits are long: a rank may load a big checkpoint while others wait. The watchdog ends them.
_STORE_TIMEOUT = timedelta(seconds=900)
_POLL_S = 0.25
_HEARTBEAT_LOST_S = 20.0
_STOPPED_S = 10.0  # with torchrun's 30 s for a rank that ignores SIGTERM, within a minute
DIED = "died without a word (killed?)"
_NOTE_GRACE_S = 1.5  # between the death of a rank and giving up on a note from it
_ACK_WAIT_S = 5.0


@dataclass
class Groups:
    """Names for C++; "" where the group is this rank alone."""

    ep: str = ""  # ranks that share one copy of the experts
    dp: str = ""  # ranks of this rank's stages
    edp: str = ""  # of them, those with the same experts
    pp: str = ""  # ranks of all stages that work on the same tokens
    world: str = ""
    embedding: str = ""  # with tied embeddings, of the pp group the first and the last stage

    def to_json(self) -> str:
        return json.dumps(self.__dict__)


def group_members(layout: Layout, tied_embeddings: bool) -> dict[str, list[list[int]]]:
    """Every group of every kind, by rank."""
    blocks = [range(p * layout.dp_size, (p + 1) * layout.dp_size) for p in range(layout.pp)]
    of_dp = range(layout.dp_size)
    return {
        "ep": [list(b[i:i + layout.ep]) for b in blocks for i in of_dp[::layout.ep]],
        "dp": [list(b) for b in blocks],
        "edp": [list(b[e::layout.ep]) for b in blocks for e in range(layout.ep)],
        "pp": [list(range(d, layout.world, layout.dp_size)) for d in of_dp],
        "world": [list(range(layout.world))],
        "embedding": [layout.embedding_ranks(d) for d in of_dp] if tied_embeddings else [],
    }


@dataclass
class FailureNote:
    """Why a rank ended; the first note of a job is its cause."""

    rank: int
    text: str
    exit_code: int = 1
    oom: dict[str, Any] | None = None

    def to_json(self) -> str:
        return json.dumps(self.__dict__)


class Comm:
    """One rank alone: every operation is local. Ranks is the real thing."""

    rank = 0
    world = 1

    def __init__(self) -> None:
        self.groups = Groups()

    def gather(self, text: str) -> list[str]:
        """All texts by rank on rank 0, [] elsewhere."""
        return [text]

    def broadcast(self, text: str) -> str:
        """Rank 0's text, everywhere."""
        return text

    def barrier(self) -> None:
        """Every rank came here; unlike a collective it waits as long as the ranks live."""
        self.gather("")
        self.broadcast("")

    def await_cause(self, wait_s: float) -> None:
        """See Ranks."""

    def report_failure(self, note: FailureNote) -> FailureNote:
        """Tells the others; returns the note that is the cause of the job's end."""
        return note

    def acknowledge(self) -> None:
        """See Ranks."""

    def close(self) -> None:
        """This rank is done; its end is no failure."""


def _process(pid: int) -> tuple[str, str | None]:
    """State letter and start time of a living process; the latter None if it is gone or a zombie.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return "X", None
    return fields[0], None if fields[0] in "ZX" else fields[19]


@dataclass
class _Peer:
    host: str
    pid: int
    identity: str | None
    beat: bytes = b""
    seen: float = field(default_factory=time.monotonic)
    dead_since: float | None = None
    stopped_since: float | None = None
    how: str = DIED

    def alive(self, store: Any, rank: int) -> bool:
        """A rank that was stopped (SIGSTOP) for long counts as dead: the others would wait for it.
        """
        if self.host == socket.gethostname() and self.identity is not None:
            state, identity = _process(self.pid)
            if state != "T" or identity != self.identity:
                self.stopped_since = None
                return identity == self.identity
            self.stopped_since = self.stopped_since or time.monotonic()
            if time.monotonic() - self.stopped_since < _STOPPED_S:
                return True
            self.how = f"stands still since {_STOPPED_S:.0f} s (stopped by a signal?)"
            return False
        key = f"beat/{rank}"
        beat = store.get(key) if store.check([key]) else b""
        if beat != self.beat:
            self.beat, self.seen = beat, time.monotonic()
        return time.monotonic() - self.seen < _HEARTBEAT_LOST_S


class Ranks(Comm):
    """The ranks of a job. Owns: the process groups and a watchdog thread.

    Threads: the watchdog has its own store connection; on_failure(note) runs in it, once, and must
    end the process unless the main thread is about to, which may be stuck in a collective.
    """

    def __init__(self, store: Any, rank: int, layout: Layout, tied_embeddings: bool,
                 deadline_s: int, backend: str,
                 on_failure: Callable[[FailureNote], None]) -> None:
        """deadline_s: of every wait inside the groups."""
        import torch.distributed as dist

        self.rank, self.world, self._layout = rank, layout.world, layout
        self._deadline = timedelta(seconds=deadline_s)
        world = layout.world
        store.set_timeout(_STORE_TIMEOUT)
        self._store, self._watch_store = store, store.clone()
        self._round = 0
        self._on_failure = on_failure
        self._stop = threading.Event()
        me = [socket.gethostname(), os.getpid(), _process(os.getpid())[1]]
        store.set(f"who/{rank}", json.dumps(me))
        self._peers = {r: _Peer(*json.loads(store.get(f"who/{r}")))
                       for r in range(world) if r != rank}
        self._watchdog = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._watchdog.start()
        dist.init_process_group(backend, store=dist.PrefixStore("pg", store), rank=rank,
                                world_size=world, timeout=self._deadline)
        self.groups = self._make_groups(group_members(layout, tied_embeddings))

    def _make_groups(self, members_of: dict[str, list[list[int]]]) -> Groups:
        """Every rank creates every group, in the same order, as c10d asks."""
        import torch.distributed as dist

        names = {}
        for kind, members in members_of.items():
            for ranks in members:
                if len(ranks) > 1:
                    group = dist.new_group(ranks, timeout=self._deadline)
                    if self.rank in ranks:
                        names[kind] = group.group_name
        return Groups(**names)

    def gather(self, text: str) -> list[str]:
        self._round += 1
        if self.rank != 0:
            self._store.set(f"gather/{self._round}/{self.rank}", text)
            return []
        texts = [text]
        for rank in range(1, self.world):
            key = f"gather/{self._round}/{rank}"
            texts.append(self._store.get(key).decode())
            self._store.delete_key(key)
        return texts

    def broadcast(self, text: str) -> str:
        self._round += 1
        key = f"broadcast/{self._round}"
        if self.rank == 0:
            self._store.set(key, text)
            return text
        value: str = self._store.get(key).decode()
        if self._store.add(f"{key}/readers", 1) == self.world - 1:
            self._store.delete_key(key)
            self._store.delete_key(f"{key}/readers")
        return value

    def report_failure(self, note: FailureNote) -> FailureNote:
        self._stop.set()
        try:
            first = FailureNote(**json.loads(
                self._watch_store.compare_set("failure", "", note.to_json())))
            # Rank 0 has to write the log before torchrun tears the job down.
            deadline = time.monotonic() + _ACK_WAIT_S
            while self.rank != 0 and time.monotonic() < deadline and \
                    not self._watch_store.check(["failure/ack"]):
                time.sleep(0.05)
        except RuntimeError:  # the store's host is gone: nobody is left to tell
            return note
        return first

    def await_cause(self, wait_s: float) -> None:
        """Gives the watchdog time to end this process if another rank's end is the cause.

        A failed collective is mostly the echo of another rank's end.
        """
        time.sleep(wait_s)

    def close(self) -> None:
        import torch.distributed as dist

        self._watch_store.set(f"done/{self.rank}", "1")
        self._stop.set()
        self._watchdog.join()
        dist.destroy_process_group()

    def acknowledge(self) -> None:
        """Rank 0 has written down why the job ended."""
        with contextlib.suppress(RuntimeError):  # the store may be what failed
            self._watch_store.set("failure/ack", "1")

    def _watch(self) -> None:
        beats = 0
        while not self._stop.wait(_POLL_S):
            try:
                beats += 1
                self._watch_store.set(f"beat/{self.rank}", str(beats))
                note = self._failure()
            except Exception as error:  # the store's host is gone, and with it the job
                note = FailureNote(-1, f"the rendezvous store is gone ({error})".split("\n")[0])
            if note is not None and not self._stop.is_set():
                self._on_failure(note)
                return

    def _failure(self) -> FailureNote | None:
        if self._watch_store.check(["failure"]):
            return FailureNote(**json.loads(self._watch_store.get("failure")))
        for rank, peer in self._peers.items():
            if self._watch_store.check([f"done/{rank}"]) or peer.alive(self._watch_store, rank):
                continue
            peer.dead_since = peer.dead_since or time.monotonic()
            if time.monotonic() - peer.dead_since > _NOTE_GRACE_S:
                note = FailureNote(rank, f"{self._layout.name_of(rank)} {peer.how}")
                text = self._watch_store.compare_set("failure", "", note.to_json())
                return FailureNote(**json.loads(text))
        return None


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def start_ranks(rank: int, layout: Layout, tied_embeddings: bool, deadline_s: int,
                endpoint: str | None, on_failure: Callable[[FailureNote], None]) -> Comm:
    """endpoint: HOST:PORT of launch.py's store; None: torchrun's environment."""
    if layout.world == 1:
        return Comm()
    import torch
    import torch.distributed as dist

    host = endpoint.rsplit(":", 1)[0] if endpoint else os.environ.get("MASTER_ADDR", "127.0.0.1")
    if _is_loopback(host):  # Gloo would listen on the interface of the host name
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if endpoint:
        store = dist.TCPStore(host, int(endpoint.rsplit(":", 1)[1]), is_master=False,
                              timeout=_STORE_TIMEOUT)
    else:
        store, rank, _ = next(dist.rendezvous("env://", timeout=_STORE_TIMEOUT))
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    return Ranks(store, rank, layout, tied_embeddings, deadline_s, backend, on_failure)
