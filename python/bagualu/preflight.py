"""Everything about a training job that can be checked before torch is loaded.

The launcher runs it once, so that bad input ends before any rank starts; each rank runs it again to
get the Job. It writes nothing.
"""

import argparse
import importlib.util
import json
import os
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bagualu import checkpoint
from bagualu.data import VOCAB, check_sources
from bagualu.errors import InvalidInput
from bagualu.hf import TensorFolder
from bagualu.json_file import read_json_object
from bagualu.layout import Layout, data_parallel_size, resolve
from bagualu.model_spec import ModelSpec, model_from_file, resolve_model, validate
from bagualu.profile_cache import cached_profile
from bagualu.routing_trace import RoutingTrace, read_trace
from bagualu.run_log import check_writable
from bagualu.train_args import ALL_FLAGS, WHERE, Flag, resumed_values

_OVERRIDES = {"dropout": "dropout", "aux_loss": "aux_loss_coef", "z_loss": "z_loss_coef",
              "router_bias_rate": "router_bias_rate"}


@dataclass
class Job:
    """What a rank trains. Invariant: passed every check below."""

    args: argparse.Namespace
    spec: ModelSpec
    layout: Layout
    resume: checkpoint.Loaded | None
    trace: RoutingTrace | None
    plan: dict[str, Any] | None
    profile: dict[str, Any] | None

    @property
    def world(self) -> int:
        return self.layout.world

    @property
    def first_step(self) -> int:
        return self.resume.position.step if self.resume else 0

    @property
    def domain_slots(self) -> int:
        return self.resume.position.domain_slots if self.resume else int(self.args.micro_batches)

    def trainer_options(self, rank: int) -> dict[str, Any]:
        args, layout = self.args, self.layout
        policy_args: dict[str, Any] = {}
        if self.plan is not None:
            policy_args["plan"] = self.plan
        if args.policy == "selective":
            policy_args["recompute_modules"] = args.recompute_modules or ["core_attn"]
        return {
            "rank": rank, "world_size": self.world, "ep_size": layout.ep,
            "pp_size": layout.pp, "virtual_per_rank": layout.vpp,
            "stage_layers": list(layout.stage_layers), "pipeline": layout.pipeline,
            "overlap": args.overlap == "on", "deadline_s": args.deadline,
            "link_bytes_per_s": round(args.slow_link.bytes_per_s) if args.slow_link else 0,
            "link_latency_us": round(args.slow_link.latency_us) if args.slow_link else 0,
            "micro_batch_size": args.micro_batch_size, "seq": args.seq,
            "microbatches": args.micro_batches, "dtype": args.dtype, "seed": args.seed,
            "policy": args.policy, "policy_args": policy_args,
            "budget_bytes": args.budget or 0, "host_budget_bytes": args.host_budget or 0,
            "chunk_rows": args.chunk_rows, "profile": self.profile,
            "weight_decay": args.weight_decay, "beta1": args.beta1, "beta2": args.beta2,
            "eps": 1e-8, "clip": args.clip, "allow_quantise": args.allow_quantise,
        }

    def position(self, step: int) -> checkpoint.Position:
        return checkpoint.Position(step, self.args.seed, self.domain_slots, self.world,
                                   self.layout.ep, resumed_values(self.args), self.layout.pp)


def _resumed_value(flag: Flag, value: Any, where: str) -> Any:
    """A value of state.json, checked as the flag itself would be."""
    items = value if flag.repeat else [value]
    if flag.parse is None or not isinstance(items, list):
        raise InvalidInput(where, f"flags.{flag.key}", json.dumps(value), "a list")
    try:
        parsed = [None if item is None else flag.parse(str(item), flag.name) for item in items]
    except InvalidInput as error:
        raise InvalidInput(where, f"flags.{flag.key}", error.found, error.allowed) from None
    return parsed if flag.repeat else parsed[0]


def _apply_resumed(args: argparse.Namespace, position: checkpoint.Position, world: int,
                   where: str) -> None:
    """Flags that were not given come from the checkpoint; the global batch stays what it was."""
    flags = position.flags
    for flag in ALL_FLAGS:
        if not flag.resumed or flag.key in args.given:
            continue
        setattr(args, flag.key, _resumed_value(flag, flags.get(flag.key, flag.default), where))
    if args.seed != position.seed:
        raise InvalidInput(WHERE, "--seed", args.seed, f"{position.seed}, as in the checkpoint")
    rows = flags["micro_batches"] * flags["micro_batch_size"] * position.dp_size
    per_microbatch = args.micro_batch_size * data_parallel_size(world, args.pp or 1)
    if "micro_batches" not in args.given:
        args.micro_batches = max(1, rows // per_microbatch)
    if args.micro_batches * per_microbatch != rows:
        raise InvalidInput(WHERE, "--micro-batches", f"{args.micro_batches} x {per_microbatch} "
                           "sequences per step", f"{rows} sequences per step, as before")


def _model(args: argparse.Namespace, resume: checkpoint.Loaded | None) -> ModelSpec:
    if resume is not None:
        spec = resume.spec
        if args.model:
            asked = _overridden(resolve_model(args.model), args)
            _refuse_other_shape(asked, _overridden(spec, args), args.model)
    elif args.hf:
        spec = model_from_file(Path(args.hf) / "config.json")
    elif args.model:
        spec = resolve_model(args.model)
    else:
        folder = Path(args.init)
        spec = model_from_file(folder / "config.json") if _is_plain(args.init) \
            else checkpoint.load(folder, verify_data=False).spec
    spec = _overridden(spec, args)
    validate(spec, args.model or args.hf or args.init or args.resume)
    if spec.vocab < VOCAB:
        raise InvalidInput(args.model or args.hf or WHERE, "vocab", spec.vocab,
                           f"at least {VOCAB}: training is on bytes")
    return spec


def _is_plain(folder: str) -> bool:
    """A folder with weights that is no checkpoint of ours."""
    path = Path(folder)
    return not (path / "state.json").exists() and not (path / "latest").exists()


def _overridden(spec: ModelSpec, args: argparse.Namespace) -> ModelSpec:
    values = {field: getattr(args, key) for key, field in _OVERRIDES.items()
              if getattr(args, key) is not None}
    return replace(spec, **values)


def _refuse_other_shape(asked: ModelSpec, found: ModelSpec, where: str) -> None:
    for key, value in asdict(asked).items():
        if key not in ("name", "family") and value != getattr(found, key):
            raise InvalidInput(where, key, value, f"{getattr(found, key)}, as in the checkpoint")


def _check_layout(args: argparse.Namespace, spec: ModelSpec, world: int) -> Layout:
    layout = resolve(args, spec, world)
    if args.slow_link and args.ep == 1:
        raise InvalidInput(WHERE, "--slow-link", "one expert-parallel rank", "--ep above 1")
    for spike in args.spike:
        if spike.factor > args.ep:
            raise InvalidInput(WHERE, "--spike", f"factor {spike.factor:g}",
                               f"at most {args.ep} (--ep): all rows on one rank")
        bad = [layer for layer in spike.layers if layer not in spec.moe_layers()]
        if bad:
            raise InvalidInput(WHERE, "--spike", f"layer {bad[0]}", f"MoE layers: "
                               f"{', '.join(map(str, spec.moe_layers()))}")
    if args.min_lr is None:
        args.min_lr = args.lr / 10
    if args.threads is None:
        args.threads = max(1, len(os.sched_getaffinity(0)) // world)
    most = max(64, os.cpu_count() or 1)
    if args.threads > most:
        raise InvalidInput(WHERE, "--threads", args.threads, f"at most {most} on this machine")
    return layout


def check_folder(folder: Path) -> None:
    """Writes a nameless file there; folders made for that are removed again."""
    missing: list[Path] = []
    try:
        missing += [p for p in (folder, *folder.parents) if not p.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InvalidInput(folder, "folder", error.strerror,
                           "a folder that can be written") from None
    finally:
        for made in missing:
            if made.is_dir():
                made.rmdir()


def check_file(text: str | None) -> None:
    """A file that will be written, if any; - is standard output."""
    if text and text != "-":
        check_writable(Path(text))


def _check_outputs(args: argparse.Namespace) -> None:
    check_file(args.log)
    check_file(args.json)
    for text in (args.checkpoint, args.tensorboard):
        if text:
            check_folder(Path(text))
    if args.checkpoint and Path(args.checkpoint).is_dir():
        os.close(checkpoint.claim(Path(args.checkpoint)))
    if args.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise InvalidInput(WHERE, "--tensorboard", "no package tensorboard",
                           "after `pip install tensorboard`")


def _check_weights(args: argparse.Namespace, spec: ModelSpec) -> None:
    if args.hf:
        TensorFolder(Path(args.hf)).check(spec)
    elif args.init:
        plain = _is_plain(args.init)
        TensorFolder(Path(args.init) if plain else checkpoint.find(Path(args.init))).check(spec)


def _read_plan(args: argparse.Namespace) -> dict[str, Any] | None:
    """A plan, or what --dry-run --json wrote, which has one inside."""
    if not args.plan:
        return None
    plan = read_json_object(Path(args.plan))
    while isinstance(plan.get("plan"), dict):
        plan = plan["plan"]
    return plan


def preflight(args: argparse.Namespace, world: int, thorough: bool) -> Job:
    """Throws InvalidInput. thorough: also digests of the checkpoint and writability of outputs;
    once per job, before any rank writes.

    Fills what flags leave open in args (the layout, the resumed values, threads).
    """
    resume = None
    if args.resume:
        root = Path(args.checkpoint if args.resume == "latest" else args.resume)
        resume = checkpoint.load(root, thorough)
        _apply_resumed(args, resume.position, world, str(resume.path / "state.json"))
    spec = _model(args, resume)
    layout = _check_layout(args, spec, world)
    if resume and resume.position.step >= args.steps:
        raise InvalidInput(WHERE, "--steps", args.steps,
                           f"more than the {resume.position.step} steps already done")
    _check_weights(args, spec)
    check_sources(args.data, args.seq)
    trace = None
    if args.routing_trace:
        trace = read_trace(Path(args.routing_trace), spec, args.ep,
                           args.micro_batch_size * args.seq)
    profile = None
    if args.profile:
        profile = read_json_object(Path(args.profile))
    elif not args.write_profile:
        profile = cached_profile(spec, args)
    if thorough:
        _check_outputs(args)
    return Job(args, spec, layout, resume, trace, _read_plan(args), profile)
