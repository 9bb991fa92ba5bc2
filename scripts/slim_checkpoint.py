"""Weights and router biases of a checkpoint as one small folder: bf16, one file, no optimizer.

Usage: slim_checkpoint.py CHECKPOINT OUT
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def main(checkpoint: Path, out: Path) -> None:
    weights = {}
    for shard in sorted(checkpoint.glob("model-*.safetensors")):
        weights |= load_file(shard)
    out.mkdir(parents=True, exist_ok=True)
    half = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in weights.items()}
    save_file(half, out / "model.safetensors", metadata={"format": "pt"})
    state = load_file(checkpoint / "state.safetensors")
    save_file({name: t for name, t in state.items() if name.endswith("router_bias")},
              out / "state.safetensors")
    config = (checkpoint / "config.json").read_text().replace('"float32"', '"bfloat16"')
    (out / "config.json").write_text(config)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
