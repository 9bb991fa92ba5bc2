"""`bagualu generate`: continues a prompt, byte by byte, with the weights of a checkpoint."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bagualu import checkpoint
from bagualu.data import VOCAB
from bagualu.errors import EXIT_OK, BagualuError, InvalidInput, JobFailed
from bagualu.hf import Shard, TensorFolder
from bagualu.model_spec import ModelSpec, model_from_file
from bagualu.runtime_module import lone_trainer
from bagualu.train_args import WHERE, Parser

_DEFAULT_CONTEXT = 256


def _parser() -> Parser:
    parser = Parser(prog="bagualu generate", description="Continue a prompt with a checkpoint "
                    "(ours, or config.json and safetensors of Mixtral or Qwen3-MoE on bytes). One "
                    "process holds the whole model, however many ranks trained it.")
    parser.add_argument("--checkpoint", required=True, metavar="DIR",
                        help="a checkpoint, or the folder of checkpoints (its latest)")
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="at least one byte")
    parser.add_argument("--tokens", type=int, default=200, metavar="N", help="bytes to add [200]")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="T",
                        help="0 = always the likeliest byte [0.8]")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="[0]")
    return parser


def _load_spec(folder: Path) -> tuple[Path, ModelSpec, int]:
    """Folder of the weights, model, and the context length it was trained with."""
    if (folder / "state.json").exists() or (folder / "latest").exists():
        loaded = checkpoint.load(folder, verify_data=False)
        return loaded.path, loaded.spec, int(loaded.position.flags["seq"])
    spec = model_from_file(folder / "config.json")
    TensorFolder(folder).check(spec)
    return folder, spec, _DEFAULT_CONTEXT


def _make_trainer(path: Path, spec: ModelSpec, context: int) -> Any:
    trainer = lone_trainer(spec, seq=context)
    checkpoint.restore_weights(path, trainer, spec, Shard.whole(spec))
    return trainer


def choose(logits: np.ndarray, temperature: float, random: np.random.Generator) -> int:
    """A byte: the likeliest at temperature 0, else drawn from softmax(logits / temperature)."""
    if not np.isfinite(logits).all():
        raise JobFailed("the model's output is not finite: its weights are broken")
    if temperature == 0:
        return int(logits.argmax())
    scaled = (logits - logits.max()) / temperature
    weights = np.exp(scaled)
    return int(random.choice(len(weights), p=weights / weights.sum()))


def generate(trainer: Any, context: int, prompt: bytes, tokens: int, temperature: float,
             seed: int) -> bytes:
    """The added bytes. Attention is causal, so what stands behind the last byte is no matter."""
    import torch

    random = np.random.default_rng(seed)
    text = bytearray(prompt)
    window = np.zeros((1, context), "int64")
    for _ in range(tokens):
        recent = text[-context:]
        window[0, :len(recent)] = np.frombuffer(bytes(recent), np.uint8)
        logits = trainer.logits(torch.from_numpy(window))[0, len(recent) - 1, :VOCAB]
        text.append(choose(logits.double().numpy(), temperature, random))
    return bytes(text[len(prompt):])


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(list(argv))
    prompt = os.fsencode(args.prompt)  # the bytes as the shell gave them
    if not prompt:
        raise InvalidInput(WHERE, "--prompt", "an empty text", "at least one byte")
    if args.tokens < 1:
        raise InvalidInput(WHERE, "--tokens", args.tokens, "at least 1")
    if not 0 <= args.temperature <= 100:
        raise InvalidInput(WHERE, "--temperature", args.temperature, "a number from 0 to 100")
    if args.seed < 0:
        raise InvalidInput(WHERE, "--seed", args.seed, "at least 0")
    path, spec, context = _load_spec(Path(args.checkpoint))
    if spec.vocab < VOCAB:
        raise InvalidInput(args.checkpoint, "vocab", spec.vocab,
                           f"at least {VOCAB}: text is bytes")
    trainer = _make_trainer(path, spec, context)
    added = generate(trainer, context, prompt, args.tokens, args.temperature, args.seed)
    sys.stdout.flush()
    sys.stdout.buffer.write(prompt + added + b"\n")
    return EXIT_OK


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
    except BagualuError as error:
        print(f"bagualu generate: {error}", file=sys.stderr)
        code = error.exit_code
    sys.stdout.flush()
    os._exit(code)
