"""Writes step traces of a job with two stages: 1F1B, exchanges, copies to the host.

Times are invented but hang together: what is awaited has ended, what is sent arrives. In a slow
step stage 1 computes half as long again.
"""

import json
from pathlib import Path

US = 1000
# (rank, pass, micro-batch): a global order that 1F1B on two stages allows.
_PASSES = [(0, "F", 0), (0, "F", 1), (1, "F", 0), (1, "B", 0), (0, "B", 0), (1, "F", 1),
           (1, "B", 1), (0, "F", 2), (0, "B", 1), (1, "F", 2), (1, "B", 2), (0, "B", 2)]


class _Rank:
    """Its clock and what it has done."""

    def __init__(self, rank: int, step: int, start_ns: int) -> None:
        self.head = {"rank": rank, "step": step}
        self.rank, self.start_ns, self.now = rank, start_ns, start_ns
        self.events: list[dict] = []
        self.transfers: list[dict] = []

    def do(self, action: str, name: str, microbatch: int, ns: int, issues=(), awaits=()) -> None:
        """Waits for what it awaits, then works for `ns`."""
        end = max([self.now, *(self.transfers[n]["end_ns"] for n in awaits)]) + ns
        self.events.append({"type": "action", **self.head, "slot": microbatch, "stage": self.rank,
                            "microbatch": microbatch, "action": action, "op": 0, "name": name,
                            "start_ns": self.now, "end_ns": end, "issues": list(issues),
                            "awaits": list(awaits)})
        self.now = end

    def start(self, stream: str, name: str, start_ns: int, end_ns: int, key: str = "") -> int:
        number = len(self.transfers)
        self.transfers.append({"type": "transfer", **self.head, "transfer": number,
                               "stream": stream, "name": name, "channel": "" if key else stream,
                               "key": key, "bytes": 4096, "start_ns": start_ns, "end_ns": end_ns})
        return number

    def lines(self) -> list[dict]:
        return [*self.transfers, *self.events,
                {"type": "rank_step", **self.head, "start_ns": self.start_ns,
                 "end_ns": self.now + 5 * US}]


def _run_pass(ranks: list[_Rank], arrived: dict[str, int], rank: int, kind: str, microbatch: int,
              compute_ns: int) -> None:
    at = ranks[rank]
    takes = (kind == "F") == (rank == 1)
    verb = "forward" if kind == "F" else "input_grad"
    if takes:
        key = f"p2p0:{1 - rank}{kind}{microbatch}"
        message = at.start("comm", "stage_recv", at.now, max(at.now, arrived[key]), key)
        at.do("post", "stage_recv", microbatch, 0, issues=[message])
        at.do("receive", "stage_recv", microbatch, 0, awaits=[message])
    at.do(verb, f"layer{rank}.qkv", microbatch, compute_ns)
    begun = at.now + compute_ns // 4
    exchange = at.start("comm", f"layer{rank}.dispatch", begun, begun + compute_ns)
    copy = at.start("d2h", f"layer{rank}.moe_act", begun, begun + compute_ns // 2) \
        if kind == "F" else None
    at.do(verb, f"layer{rank}.router", microbatch, compute_ns // 4, issues=[exchange])
    if copy is not None:
        at.do("offload", f"layer{rank}.moe_act", microbatch, 0, issues=[copy])
    at.do(verb if kind == "F" else "weight_grad", f"layer{rank}.shared_fc1", microbatch,
          compute_ns // 2)
    at.do("forward_end" if kind == "F" else "backward_end", f"layer{rank}.dispatch", microbatch, US,
          awaits=[exchange])
    if copy is not None:
        at.do("drain", f"layer{rank}.moe_act", microbatch, 0, awaits=[copy])
    if not takes:
        key = f"p2p0:{rank}{kind}{microbatch}"
        arrived[key] = at.now + 20 * US
        message = at.start("comm", "stage_send", at.now, arrived[key], key)
        at.do("send", "stage_send", microbatch, 0, issues=[message])


def step_lines(step: int, slow: bool = False) -> list[list[dict]]:
    """By rank, the lines of one step."""
    begin = 10**12 + step * 10**7
    ranks = [_Rank(rank, step, begin + rank * 7 * US) for rank in range(2)]
    arrived: dict[str, int] = {}
    for rank, kind, microbatch in _PASSES:
        compute_ns = 400 * US if kind == "F" else 800 * US
        if slow and rank == 1:
            compute_ns += compute_ns // 2
        _run_pass(ranks, arrived, rank, kind, microbatch, compute_ns)
    for at in ranks:
        at.do("other", "optimizer", -1, 150 * US)
    return [at.lines() for at in ranks]


def write_traces(log: Path, steps: tuple[int, ...], slow: tuple[int, ...] = ()) -> list[Path]:
    """Beside the log, one file per rank."""
    by_step = [step_lines(step, step in slow) for step in steps]
    paths = [log.with_name(f"{log.stem}.trace-{rank}.jsonl") for rank in range(2)]
    for rank, path in enumerate(paths):
        path.write_text("".join(json.dumps(line) + "\n" for lines in by_step
                                for line in lines[rank]), encoding="utf-8")
    return paths
