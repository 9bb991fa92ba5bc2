"""Flags of `bagualu train`: one table gives parsing, defaults and --help."""

import argparse
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from bagualu.errors import InvalidInput
from bagualu.units import parse_bytes

WHERE = "command line"
PIPELINES = ("1f1b", "interleaved", "zb-h1", "dualpipe-v")
POLICIES = ("save-all", "full-recompute", "selective", "static", "threshold", "adapipe", "kwai",
            "retry", "adaptive")


class Parser(argparse.ArgumentParser):
    """argparse that reports as InvalidInput does, and takes no abbreviated flags."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        match = re.fullmatch(r"argument ([^:]+): (.*)", message, re.DOTALL)
        field, found = match.groups() if match else ("flags", message)
        raise InvalidInput(WHERE, field, found, f"what `{self.prog} --help` lists")


@dataclass(frozen=True)
class Spike:
    """Router bias on layers first..last in steps first..last, so that the load really rises; and
    again `every` steps later."""

    first_step: int
    last_step: int
    layers: tuple[int, ...]
    factor: float
    every: int = 0  # 0: once

    def active(self, step: int) -> bool:
        since = step - self.first_step
        if self.every and since > 0:
            since %= self.every
        return 0 <= since <= self.last_step - self.first_step


def _span(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if not match or (match[2] and int(match[2]) < int(match[1])):
        raise ValueError
    return int(match[1]), int(match[2] or match[1])


def parse_spike(text: str) -> Spike:
    """ "step=40,layers=2-3,factor=2.6"; step may be a span as well, every=N repeats it."""
    allowed = "step=N[-M],layers=N[-M],factor=F[,every=N] with F from 1 to 1000"
    try:
        items = dict(part.split("=", 1) for part in text.split(","))
        count = len(text.split(","))
        every = int(items.pop("every", "0"))
        if set(items) != {"step", "layers", "factor"} or len(items) + (every > 0) != count:
            raise ValueError
        steps, layers, factor = _span(items["step"]), _span(items["layers"]), float(items["factor"])
        if not 1.0 <= factor <= 1000.0 or layers[1] > 100_000:
            raise ValueError
        if every and every <= steps[1] - steps[0]:
            raise ValueError
    except ValueError:
        raise InvalidInput(WHERE, "--spike", repr(text), allowed) from None
    return Spike(*steps, tuple(range(layers[0], layers[1] + 1)), factor, every)


@dataclass(frozen=True)
class SlowLink:
    """Emulated: what every exchange of expert rows takes at least."""

    bytes_per_s: float
    latency_us: float


_RATES = {"KB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9, "KiB/s": 2**10, "MiB/s": 2**20, "GiB/s": 2**30}
_TIMES_US = {"us": 1.0, "ms": 1e3}


def _slow_link(text: str, flag: str) -> SlowLink:
    """ "50MB/s,200us"; the latency may be left out."""
    number = r"([0-9]+(?:\.[0-9]+)?)"
    match = re.fullmatch(rf"{number}({'|'.join(_RATES)})(?:,{number}({'|'.join(_TIMES_US)}))?",
                         text)
    rate = float(match[1]) * _RATES[match[2]] if match else 0.0
    latency = float(match[3]) * _TIMES_US[match[4]] if match and match[3] else 0.0
    if not 1e3 <= rate <= 1e15 or not 0.0 <= latency <= 1e6:
        raise InvalidInput(WHERE, flag, repr(text), "RATE[,LATENCY] such as 50MB/s,200us: from "
                           "1KB/s, to 1000ms")
    return SlowLink(rate, latency)


def _counts(low: int) -> Callable[[str, str], list[int]]:
    def parse(text: str, flag: str) -> list[int]:
        words = text.split(",")
        if not all(re.fullmatch(r"[0-9]{1,6}", word) and int(word) >= low for word in words):
            raise InvalidInput(WHERE, flag, repr(text),
                               f"integers from {low} with commas between them")
        return [int(word) for word in words]
    return parse


def _int(low: int, high: int = 2**31 - 1) -> Callable[[str, str], int]:
    def parse(text: str, flag: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]{1,20}", text) or not low <= int(text) <= high:
            raise InvalidInput(WHERE, flag, repr(text), f"an integer from {low} to {high}")
        return int(text)
    return parse


def _float(low: float, high: float = math.inf, below: bool = False) -> Callable[[str, str], float]:
    def parse(text: str, flag: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        inside = low <= value < high if below else low <= value <= high
        if not inside or not math.isfinite(value):
            raise InvalidInput(WHERE, flag, repr(text), f"a number from {low:g} to {high:g}")
        return value
    return parse


def _bytes(text: str, flag: str) -> int:
    return parse_bytes(text, WHERE, flag)


def _text(text: str, flag: str) -> str:
    if not text:
        raise InvalidInput(WHERE, flag, "an empty text", "a name or path")
    return text


def _names(text: str, flag: str) -> list[str]:
    names = text.split(",")
    if not all(re.fullmatch(r"[a-z_0-9]+", name) for name in names):
        raise InvalidInput(WHERE, flag, repr(text), "module names with commas between them")
    return names


def _choice(*names: str) -> Callable[[str, str], str]:
    def parse(text: str, flag: str) -> str:
        if text not in names:
            raise InvalidInput(WHERE, flag, repr(text), ", ".join(names))
        return text
    return parse


@dataclass(frozen=True)
class Flag:
    """One flag. resumed: taken from the checkpoint where a resumed run does not give it."""

    name: str
    parse: Callable[[str, str], Any] | None  # None: a switch
    default: Any
    meta: str
    help: str
    resumed: bool = False
    repeat: bool = False

    @property
    def key(self) -> str:
        return self.name.replace("-", "_")


_R = {"resumed": True}
FLAGS: dict[str, tuple[Flag, ...]] = {
    "model": (
        Flag("model", _text, None, "FILE|NAME", "model as JSON (native or config.json), or a name "
             "from configs/models"),
        Flag("hf", _text, None, "DIR", "config.json and safetensors of Mixtral or Qwen3-MoE"),
        Flag("init", _text, None, "DIR", "start from the weights of this checkpoint, at step 0"),
        Flag("dropout", _float(0, 1, below=True), None, "P", "hidden-state dropout [the model's]"),
        Flag("aux-loss", _float(0), None, "C", "balancing loss per layer [the model's]"),
        Flag("z-loss", _float(0), None, "C", "router z-loss per layer [the model's]"),
        Flag("router-bias-rate", _float(0), None, "R",
             "loss-free balancing: bias change per step [the model's]"),
    ),
    "ranks": (
        Flag("nproc", _int(1, 4096), None, "N", "ranks to start on this machine [1]"),
        Flag("ep", _int(1, 4096), None, "N", "expert-parallel size; divides nproc / pp [1]"),
        Flag("threads", _int(1, 4096), None, "N", "threads per rank [cores / nproc]"),
        Flag("master-port", _int(0, 65535), 0, "PORT", "rendezvous port; 0 = a free one"),
        Flag("rdzv-endpoint", _text, None, "HOST[:PORT]",
             "address the rendezvous binds to [127.0.0.1]"),
        Flag("deadline", _int(1, 3600), 30, "SECONDS",
             "longest wait for another rank before the job ends and says who was waited for"),
    ),
    "pipeline": (
        Flag("pp", _int(1, 4096), None, "N", "pipeline-parallel size; divides nproc [1]"),
        Flag("vpp", _int(1, 1024), None, "N",
             "virtual stages per rank, for --pipeline interleaved [1]"),
        Flag("pipeline", _choice(*PIPELINES), None, "NAME",
             " | ".join(PIPELINES) + " [1f1b; interleaved if --vpp > 1]"),
        Flag("stages", _counts(0), None, "3,5,...",
             "layers of every virtual stage, in the model's order [even; first and last lighter]"),
        Flag("overlap", _choice("on", "off"), None, "on|off", "run the forward of one micro-batch "
             "and the backward of another as one, exchanges of one under compute of the other "
             "[on if --ep > 1]"),
        Flag("slow-link", _slow_link, None, "RATE[,LATENCY]", "emulate a slower link between expert "
             "ranks, for measurements: 50MB/s,200us"),
    ),
    "data": (
        Flag("data", _text, ["builtin"], "FILE|builtin", "text; each file is one domain; builtin "
             "= Shakespeare, King James Bible, Python source; may be repeated", True, True),
        Flag("seq", _int(1), 256, "TOKENS", "tokens per sequence", **_R),
        Flag("micro-batch-size", _int(1), 1, "N", "sequences per micro-batch and rank", **_R),
        Flag("micro-batches", _int(1), 4, "N", "micro-batches per step, of each data-parallel rank", **_R),
        Flag("validate-every", _int(0), 0, "STEPS", "validation loss each N steps; 0 = never"),
    ),
    "memory": (
        Flag("budget", _bytes, None, "SIZE", "device memory per rank, e.g. 96MiB; without it: "
             "measure, and propose one at the end"),
        Flag("host-budget", _bytes, None, "SIZE", "host memory per rank for offloaded activations "
             "[no limit]"),
        Flag("policy", _choice(*POLICIES), "adaptive", "NAME", " | ".join(POLICIES)),
        Flag("plan", _text, None, "FILE", "plan for --policy static [fitted to calm load]"),
        Flag("recompute-modules", _names, None, "A,B", "for --policy selective [core_attn]"),
        Flag("chunk-rows", _int(1), 256, "ROWS",
             "most rows of one expert computed at once; changes the last bits", **_R),
        Flag("allow-quantise", None, False, "", "allow INT8/FP8 residencies (changes numerics)"),
        Flag("profile", _text, None, "FILE", "operator times of this machine [the cached ones]"),
    ),
    "optimizer": (
        Flag("steps", _int(1), 100, "N", "optimizer steps in total", **_R),
        Flag("lr", _float(0), 1e-3, "RATE", "peak learning rate", **_R),
        Flag("min-lr", _float(0), None, "RATE", "final learning rate [lr / 10]", **_R),
        Flag("warmup", _int(0), 20, "STEPS", "linear warm-up", **_R),
        Flag("weight-decay", _float(0), 0.1, "W", "AdamW weight decay", **_R),
        Flag("beta1", _float(0, 1, below=True), 0.9, "B", "AdamW", **_R),
        Flag("beta2", _float(0, 1, below=True), 0.95, "B", "AdamW", **_R),
        Flag("clip", _float(0), 1.0, "NORM", "gradient norm limit; 0 = none", **_R),
        Flag("dtype", _choice("fp32", "bf16"), "fp32", "TYPE",
             "fp32 | bf16 (fp32 master weights)", **_R),
        Flag("seed", _int(0), 0, "N", "seed of weights, data and dropout", **_R),
    ),
    "files": (
        Flag("log", _text, None, "FILE", "run log, JSON lines (see `bagualu report`)"),
        Flag("trace-step", _counts(0), None, "N[,M...]",
             "write what each rank really did in these steps, beside --log: LOG.trace-RANK.jsonl"),
        Flag("tensorboard", _text, None, "DIR", "also write TensorBoard events"),
        Flag("checkpoint", _text, None, "DIR", "folder of checkpoints; also written at the end"),
        Flag("checkpoint-every", _int(0), 0, "STEPS", "0 = only at the end and on SIGTERM"),
        Flag("keep", _int(1), 2, "N", "checkpoints kept"),
        Flag("resume", _text, None, "DIR|latest", "continue; latest = the newest of --checkpoint"),
        Flag("json", _text, None, "FILE|-", "the final summary object as JSON"),
        Flag("quiet", None, False, "", "no progress"),
    ),
    "spikes": (
        Flag("spike", _text, [], "SPEC", "step=40,layers=2-3,factor=2.6: bias the router so that "
             "one rank gets factor times the mean; every=N repeats it; may be repeated", False, True),
        Flag("routing-trace", _text, None, "FILE",
             "replay recorded counts (.csv, .csv.gz, .jsonl)"),
        Flag("dry-run", None, False, "", "floor, plan, predicted peak and time; no training"),
    ),
}
ALL_FLAGS = tuple(flag for group in FLAGS.values() for flag in group)
# Set by launch.py for its ranks, and by profile.py.
_HIDDEN = ("status-dir", "store", "write-profile")

# torchrun reads --log as one of its own flags, wherever it stands.
_ALIASES = {"log": ("run-log",)}


def _parser(prog: str) -> Parser:
    parser = Parser(prog=prog, description="Train a mixture-of-experts model under a memory "
                    "budget. Sizes: KiB, MiB, GiB = 2^10, 2^20, 2^30 bytes; KB, MB, GB = powers "
                    "of 1000. Defaults in [brackets].")
    for title, flags in FLAGS.items():
        group = parser.add_argument_group(title)
        for flag in flags:
            silent = flag.default in (None, False, [], ["builtin"]) or "[" in flag.help
            text = (flag.help + ("" if silent else f" [{flag.default}]")).replace("%", "%%")
            if flag.parse is None:
                group.add_argument(f"--{flag.name}", action="store_true",
                                   default=argparse.SUPPRESS, help=text)
                continue
            names = [f"--{flag.name}", *(f"--{alias}" for alias in _ALIASES.get(flag.name, ()))]
            group.add_argument(*names, metavar=flag.meta, help=text, default=argparse.SUPPRESS,
                               action="append" if flag.repeat else "store")
    for name in _HIDDEN:
        parser.add_argument(f"--{name}", default=None, help=argparse.SUPPRESS)
    return parser


def _contradictions(given: dict[str, Any], args: argparse.Namespace) -> None:
    def refuse(flag: str, found: str, allowed: str) -> NoReturn:
        raise InvalidInput(WHERE, flag, found, allowed)

    if args.model and args.hf:
        refuse("--hf", "with --model", "one of the two")
    if not (args.model or args.hf or args.resume or args.init):
        refuse("--model", "nothing", "--model, --hf, --init or --resume")
    if args.resume and (args.hf or args.init):
        refuse("--resume", "with --hf or --init", "one source of weights")
    if args.hf and args.init:
        refuse("--init", "with --hf", "one source of weights")
    if args.resume == "latest" and not args.checkpoint:
        refuse("--resume", "latest without --checkpoint", "a folder, or with --checkpoint DIR")
    for key in ("checkpoint_every", "keep"):
        if given.get(key) and not args.checkpoint:
            refuse(f"--{key.replace('_', '-')}", "no --checkpoint", "only with --checkpoint DIR")
    if args.trace_step and not args.log:
        refuse("--trace-step", "no --log", "only with --log FILE")
    if args.plan and args.policy != "static":
        refuse("--plan", f"with --policy {args.policy}", "only with --policy static")
    if args.recompute_modules and args.policy != "selective":
        refuse("--recompute-modules", f"with --policy {args.policy}",
               "only with --policy selective")
    if args.spike and args.routing_trace:
        refuse("--spike", "with --routing-trace", "one of the two")
    if args.rdzv_endpoint and args.master_port:
        refuse("--master-port", "with --rdzv-endpoint", "HOST:PORT in --rdzv-endpoint")


def parse(argv: Sequence[str], prog: str = "bagualu train") -> argparse.Namespace:
    """All flags as attributes, and `given`: the keys that stood on the command line.

    Throws InvalidInput on unknown, malformed or contradictory flags.
    """
    raw = vars(_parser(prog).parse_args(list(argv)))
    values: dict[str, Any] = {flag.key: flag.default for flag in ALL_FLAGS}
    given: dict[str, Any] = {}
    for flag in ALL_FLAGS:
        if flag.key not in raw:
            continue
        text, name = raw[flag.key], f"--{flag.name}"
        if flag.parse is None:
            given[flag.key] = text
        elif flag.repeat:
            given[flag.key] = [flag.parse(item, name) for item in text]
        else:
            given[flag.key] = flag.parse(text, name)
    values |= given
    values["spike"] = [parse_spike(text) for text in values["spike"]]
    hidden = {name.replace("-", "_"): raw[name.replace("-", "_")] for name in _HIDDEN}
    args = argparse.Namespace(**values, **hidden, given=frozenset(given), argv=list(argv))
    _contradictions(given, args)
    return args


def resumed_values(args: argparse.Namespace) -> dict[str, Any]:
    """The flags a checkpoint has to remember."""
    return {flag.key: getattr(args, flag.key) for flag in ALL_FLAGS if flag.resumed}
