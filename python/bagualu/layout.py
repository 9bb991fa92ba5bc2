"""Which rank holds which stages and experts, and sees which tokens.

rank = pp_rank * dp_size + dp_rank: the ranks of a pipeline rank are neighbours, blocks of ep of them
share one copy of the experts. The model is cut into virtual stages, numbered in the model's order;
the order of passes (docs/design.md, Pipeline orders) says which rank holds which. C++ has the same
rules (model/layout.h, model/job.h) and the last word; this copy refuses bad flags before any rank
starts.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from bagualu.errors import InvalidInput
from bagualu.model_spec import ModelSpec
from bagualu.train_args import WHERE

V_SHAPED = ("dualpipe-v",)


@dataclass(frozen=True)
class Layout:
    """Invariant, after resolve(): world = pp * dp_size, ep divides dp_size, the stages' layers add up
    to the model's."""

    world: int = 1
    pp: int = 1
    ep: int = 1
    vpp: int = 1  # virtual stages of a rank, as --vpp says; the V shapes have two whatever it is
    pipeline: str = "1f1b"
    stage_layers: tuple[int, ...] = ()  # by virtual stage

    @property
    def dp_size(self) -> int:
        """Ranks of one pipeline rank: each sees tokens of its own."""
        return self.world // self.pp

    def pp_rank(self, rank: int) -> int:
        return rank // self.dp_size

    def dp_rank(self, rank: int) -> int:
        return rank % self.dp_size

    def ep_rank(self, rank: int) -> int:
        return self.dp_rank(rank) % self.ep

    @property
    def stages_per_rank(self) -> int:
        return 2 if self.pipeline in V_SHAPED else self.vpp

    @property
    def stages(self) -> int:
        return self.pp * self.stages_per_rank

    def pp_rank_of_stage(self, stage: int) -> int:
        if self.pipeline in V_SHAPED:
            return min(stage, 2 * self.pp - 1 - stage)
        return stage % self.pp

    def stages_of(self, rank: int) -> list[int]:
        """Virtual stages that this rank holds, in the model's order."""
        mine = self.pp_rank(rank)
        return [s for s in range(self.stages) if self.pp_rank_of_stage(s) == mine]

    def layers_of(self, rank: int) -> list[int]:
        """Layers that this rank holds, by the model's numbers."""
        firsts = [sum(self.stage_layers[:s]) for s in range(self.stages)]
        return [firsts[s] + i for s in self.stages_of(rank) for i in range(self.stage_layers[s])]

    def has_embedding(self, rank: int) -> bool:
        return 0 in self.stages_of(rank)

    def has_head(self, rank: int) -> bool:
        return self.stages - 1 in self.stages_of(rank)

    def name_of(self, rank: int) -> str:
        """For people: "rank 3", with stages where there are several."""
        if self.stages == 1:
            return f"rank {rank}"
        stages = self.stages_of(rank)
        return f"rank {rank} (stage{'s' if len(stages) > 1 else ''} " \
               f"{' and '.join(map(str, stages))})"

    def embedding_ranks(self, dp_rank: int) -> list[int]:
        """Ranks that hold the first and the last stage; one rank in the V shapes."""
        ends = {self.pp_rank_of_stage(0), self.pp_rank_of_stage(self.stages - 1)}
        return [pp_rank * self.dp_size + dp_rank for pp_rank in sorted(ends)]


def default_stage_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Where they do not divide, the last stage is lighter, then the first, then those behind it:
    they have the head and the embedding beside their layers. As model/job.h's default_stages()."""
    each = -(-layers // stages)
    split = [each] * stages
    missing = each * stages - layers
    turn = 0
    while missing:
        place = turn % stages - 1  # -1: the last
        if split[place]:
            split[place] -= 1
            missing -= 1
        turn += 1
    return tuple(split)


def make_layout(layers: int, world: int = 1, pp: int = 1, ep: int = 1, vpp: int = 1,
                pipeline: str = "1f1b", stage_layers: Sequence[int] = ()) -> Layout:
    """Unchecked, with the default split where none is given."""
    layout = Layout(world, pp, ep, vpp, pipeline)
    return replace(layout, stage_layers=tuple(stage_layers)
                   or default_stage_layers(layers, layout.stages))


def _refuse(flag: str, found: object, allowed: str) -> NoReturn:
    raise InvalidInput(WHERE, flag, found, allowed)


def data_parallel_size(world: int, pp: int) -> int:
    """Throws InvalidInput if the ranks do not divide."""
    if world % pp:
        _refuse("--pp", pp, f"a divisor of the {world} ranks (--nproc)")
    return world // pp


def _check_stages(layout: Layout, given: bool, spec: ModelSpec) -> None:
    split = layout.stage_layers
    if len(split) != layout.stages:
        _refuse("--stages", f"{len(split)} stages",
                f"{layout.stages}: --pp {layout.pp} with {layout.stages_per_rank} per rank")
    if sum(split) != spec.layers:
        _refuse("--stages", f"{'+'.join(map(str, split))} = {sum(split)} layers",
                f"counts that add up to the model's {spec.layers}")
    if min(split) < 1:
        if given:
            _refuse("--stages", min(split), "at least 1 layer in every stage")
        _refuse("--pp", f"{layout.stages} stages", f"at most one stage per layer ({spec.layers}); "
                "--stages says other counts")


def _check_order(layout: Layout) -> None:
    if layout.pipeline == "interleaved":
        if layout.vpp < 2:
            _refuse("--vpp", layout.vpp, "at least 2 with --pipeline interleaved")
    elif layout.vpp > 1:
        always = "; dualpipe-v always has 2 stages per rank" if layout.pipeline in V_SHAPED else ""
        _refuse("--vpp", f"{layout.vpp} with --pipeline {layout.pipeline}",
                f"1, or --pipeline interleaved{always}")


def resolve(args: argparse.Namespace, spec: ModelSpec, world: int) -> Layout:
    """Fills what the flags of the layout leave open in args. Throws InvalidInput."""
    if args.nproc is not None and args.nproc != world:
        _refuse("--nproc", args.nproc, f"{world}, the ranks that were started")
    args.nproc, args.ep, args.pp, args.vpp = world, args.ep or 1, args.pp or 1, args.vpp or 1
    args.pipeline = args.pipeline or ("interleaved" if args.vpp > 1 else "1f1b")
    args.overlap = args.overlap or ("on" if args.ep > 1 else "off")
    dp_size = data_parallel_size(world, args.pp)
    if dp_size % args.ep:
        whose = "ranks (--nproc)" if args.pp == 1 else "ranks of a stage (--nproc / --pp)"
        _refuse("--ep", args.ep, f"a divisor of the {dp_size} {whose}")
    if spec.experts % args.ep:
        _refuse("--ep", args.ep, f"a divisor of the {spec.experts} experts")
    layout = make_layout(spec.layers, world, args.pp, args.ep, args.vpp, args.pipeline,
                         args.stages or ())
    _check_order(layout)
    _check_stages(layout, bool(args.stages), spec)
    return layout
