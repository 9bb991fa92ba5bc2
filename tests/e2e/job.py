"""Jobs of tests: one launch of several ranks, trainers without the training loop around them."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Dense and MoE layers, a shared expert, query and key norms, dropout, both router losses.
MODEL = {"version": 1, "name": "tiny", "layers": 3, "hidden": 32, "heads": 4, "kv_heads": 2,
         "head_dim": 16, "vocab": 64, "experts": 8, "top_k": 2, "expert_ffn": 32, "shared_ffn": 16,
         "dense_layers": [0], "dense_ffn": 48, "qk_norm": True, "dropout": 0.1,
         "aux_loss_coef": 0.01, "z_loss_coef": 0.001}


def run_job(worker: str, nproc: int, *arguments, timeout_s: int = 500) -> None:
    """Runs tests/e2e/<worker> on nproc ranks; its output is shown where it fails."""
    paths = [str(ROOT / "python"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
               f"--nproc-per-node={nproc}", str(Path(__file__).parent / worker),
               *map(str, arguments)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]


class Rank:
    """This process as a rank of the job."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist

        from bagualu.runtime_module import load_runtime

        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.runtime = load_runtime()
        self.runtime.arena_install(0)
        self._groups: dict = {}

    def groups(self, layout, tied=False):
        """Names of this rank's groups; all ranks of the job call this in the same order."""
        import torch.distributed as dist

        from bagualu.distributed import Groups, group_members

        names = {}
        for kind, members in group_members(layout, tied).items():
            for ranks in members:
                if len(ranks) > 1:
                    key = (kind, tuple(ranks))
                    if key not in self._groups:
                        self._groups[key] = dist.new_group(ranks)
                    if self.rank in ranks:
                        names[kind] = self._groups[key].group_name
        return Groups(**names)

    def trainer(self, ep_size: int, model=MODEL, world=None, **options):
        """A trainer without a budget; options as bagualu._runtime.Trainer takes them.

        world: ranks of the layout, the first of the job; None on the others.
        """
        from bagualu.layout import make_layout
        from bagualu.model_spec import model_from_dict
        from bagualu.runtime_module import new_trainer

        world = world or self.world
        layout = make_layout(model["layers"], world, options.get("pp_size", 1), ep_size,
                             options.get("virtual_per_rank", 1),
                             options.get("pipeline", "1f1b"), options.get("stage_layers", ()))
        groups = self.groups(layout, model.get("tied_embeddings", False))
        if self.rank >= world:
            return None
        defaults = {"rank": self.rank, "world_size": world, "ep_size": ep_size,
                    "micro_batch_size": 2, "seq": 12, "microbatches": 1, "dtype": "fp32",
                    "seed": 3, "policy": "save-all", "chunk_rows": 5, "profile": None}
        return new_trainer(self.runtime, model_from_dict(model, "model"), defaults | options,
                           groups)


def tokens_of(rank: int, step: int, microbatches: int = 1):
    """int64 [microbatches, 2, 13], random, other ones for each rank and step."""
    import torch

    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(64, (microbatches, 2, 13), generator=generator)


def digest(trainer, report: dict) -> str:
    """Of the losses and of every bit of every gradient of this rank."""
    found = hashlib.sha256()
    for key in ("loss", "aux_loss", "z_loss", "grad_norm"):
        found.update(float(report[key]).hex().encode())
    for name, gradient in trainer.gradients().items():
        found.update(name.encode())
        found.update(gradient.numpy().tobytes())
    return found.hexdigest()
