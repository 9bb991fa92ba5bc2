"""One rank of test_parity: one step on its share of the tokens, gradients to a file.

Arguments: folder with model and tokens, rank, JSON of the layout.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from bagualu.distributed import Groups, group_members
from bagualu.hf import Shard, TensorFolder
from bagualu.layout import Layout
from bagualu.model_spec import model_from_file
from bagualu.runtime_module import load_runtime, new_trainer

MICRO_BATCH = 2


def groups_of(layout, rank, tied):
    names = {}
    for kind, members in group_members(layout, tied).items():
        for ranks in members:
            if len(ranks) > 1:
                group = dist.new_group(ranks)
                if rank in ranks:
                    names[kind] = group.group_name
    return Groups(**names)


def main(folder, rank, layout):
    runtime = load_runtime()
    runtime.arena_install(0)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), layout.world),
                            rank=rank, world_size=layout.world)
    spec = model_from_file(folder / "config.json")
    tokens = load_file(folder / "tokens.safetensors")["tokens"]
    tokens = tokens.chunk(layout.dp_size)[layout.dp_rank(rank)].unflatten(0, (-1, MICRO_BATCH))
    options = {"rank": rank, "world_size": layout.world, "ep_size": layout.ep,
               "pp_size": layout.pp, "virtual_per_rank": layout.vpp, "pipeline": layout.pipeline,
               "stage_layers": list(layout.stage_layers), "overlap": True,
               "microbatches": tokens.shape[0], "micro_batch_size": MICRO_BATCH,
               "seq": tokens.shape[2] - 1, "dtype": "fp32", "policy": "save-all", "chunk_rows": 24}
    trainer = new_trainer(runtime, spec, options, groups_of(layout, rank, spec.tied_embeddings))
    TensorFolder(folder).copy_into(trainer.parameters(), spec, Shard.of(spec, layout, rank))
    trainer.parameters_changed()
    report = trainer.step(tokens.contiguous(), 0, 0.0)
    (folder / f"report-{rank}.json").write_text(report)
    gradients = {name: gradient.clone() for name, gradient in trainer.gradients().items()}
    save_file(gradients, folder / f"gradients-{rank}.safetensors")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]), Layout(**json.loads(sys.argv[3])))
