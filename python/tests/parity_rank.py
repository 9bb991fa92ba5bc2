"""One rank of test_parity: one step on its share of the tokens, gradients to a file.

Arguments: folder with model and tokens, rank, ranks, ep_size.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from bagualu.hf import Shard, TensorFolder
from bagualu.layout import make_layout
from bagualu.model_spec import model_from_file
from bagualu.runtime_module import load_runtime


def main(folder, rank, ranks, ep_size):
    runtime = load_runtime()
    runtime.arena_install(0)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), ranks), rank=rank,
                            world_size=ranks)
    assert ep_size == ranks, "experts are not replicated here"
    everyone = dist.new_group(range(ranks)).group_name
    spec = model_from_file(folder / "config.json")
    tokens = load_file(folder / "tokens.safetensors")["tokens"].chunk(ranks)[rank]
    options = {"rank": rank, "world_size": ranks, "ep_size": ep_size, "microbatches": 1,
               "micro_batch_size": tokens.shape[0], "seq": tokens.shape[1] - 1, "dtype": "fp32",
               "policy": "save-all", "chunk_rows": 24}
    trainer = runtime.Trainer(spec.to_json(), json.dumps(options), everyone, everyone, "")
    TensorFolder(folder).copy_into(trainer.parameters(), spec, 
                                  Shard.of(spec, make_layout(spec.layers, ranks, ep=ep_size), rank))
    report = trainer.step(tokens.unsqueeze(0).contiguous(), 0, 0.0)
    (folder / f"report-{rank}.json").write_text(report)
    gradients = {name: gradient.clone() for name, gradient in trainer.gradients().items()}
    save_file(gradients, folder / f"gradients-{rank}.safetensors")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
