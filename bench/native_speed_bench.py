"""One whole training step, ours (save-all) against transformers' same model, interleaved.

Both sides: the same weights and tokens, fp32, one process, the same threads; forward, backward,
clipping, fused AdamW. transformers runs its sdpa attention and each of its experts implementations;
the faster one counts. Its tensors go through our counting allocator too, which calls torch's own.
Prints one JSON line; value = transformers' median step time over ours, so above 1 we are faster.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

try:
    from transformers import MixtralConfig, MixtralForCausalLM, logging
except ImportError:
    sys.exit("native_speed_bench.py needs transformers, which 'make test' installs")

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

from bagualu.hf import Shard, TensorFolder
from bagualu.model_spec import model_from_file
from bagualu.runtime_module import lone_trainer

BATCH, SEQ, VOCAB = 4, 256, 256
CLIP, LR, WARM_UP = 1.0, 1e-3, 3
IMPLEMENTATIONS = ("eager", "grouped_mm")  # batched_mm copies a weight matrix per token
ADAMW = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


def make_transformers():
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(
        vocab_size=VOCAB, hidden_size=256, intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=4, num_local_experts=8, num_experts_per_tok=2,
        max_position_embeddings=SEQ, attn_implementation="sdpa"))


class Transformers:
    def __init__(self, model):
        self._model = model
        decayed = [p for n, p in model.named_parameters() if "norm" not in n]
        norms = [p for n, p in model.named_parameters() if "norm" in n]
        self._optimizer = torch.optim.AdamW(
            [{"params": decayed}, {"params": norms, "weight_decay": 0.0}], lr=LR, fused=True,
            betas=(ADAMW["beta1"], ADAMW["beta2"]), eps=ADAMW["eps"],
            weight_decay=ADAMW["weight_decay"])

    def use(self, implementation):
        self._model.set_experts_implementation(implementation)

    def step(self, tokens, number):
        self._optimizer.zero_grad(set_to_none=True)
        logits = self._model(input_ids=tokens[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), CLIP, foreach=True)
        self._optimizer.step()
        return loss.item()


class Native:
    def __init__(self, model):
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            spec = model_from_file(Path(folder) / "config.json")
            self.trainer = lone_trainer(spec, micro_batch_size=BATCH, seq=SEQ, clip=CLIP, **ADAMW)
            files = TensorFolder(Path(folder))
            files.check(spec)
            files.copy_into(self.trainer.parameters(), spec, Shard.whole(spec))
            self.trainer.parameters_changed()

    def step(self, tokens, number):
        return json.loads(self.trainer.step(tokens.unsqueeze(0), number, LR))["loss"]


def seconds(side, tokens, number):
    begin = time.perf_counter()
    loss = side.step(tokens, number)
    return time.perf_counter() - begin, loss


def bootstrap(ours, theirs, samples=2000):
    """95 % interval of what `ratio` gives, rounds drawn whole."""
    picks = np.random.default_rng(0).integers(0, len(ours), (samples, len(ours)))
    ratios = [ratio(ours[pick], {k: v[pick] for k, v in theirs.items()}) for pick in picks]
    return [round(float(x), 4) for x in np.quantile(ratios, (0.025, 0.975))]


def ratio(ours, theirs):
    """The median of their faster implementation over our median."""
    return float(min(np.median(times) for times in theirs.values()) / np.median(ours))


def run_rounds(native, theirs, tokens, rounds):
    """Every round steps each side once, in turning order. Returns: ours, theirs by name."""
    sides = ["native", *IMPLEMENTATIONS]
    times = {name: [] for name in sides}
    for number in range(WARM_UP + rounds):
        turn = number % len(sides)
        for name in sides[turn:] + sides[:turn]:
            if name == "native":
                elapsed, _ = seconds(native, tokens, number)
            else:
                theirs.use(name)
                elapsed, _ = seconds(theirs, tokens, number)
            if number >= WARM_UP:
                times[name].append(elapsed)
    arrays = {name: np.array(values) for name, values in times.items()}
    return arrays.pop("native"), arrays


def measure(rounds):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=generator)
    model = make_transformers()
    native, theirs = Native(model), Transformers(model)
    theirs.use(IMPLEMENTATIONS[0])
    for number in range(3):  # the same model, or the comparison is void
        first, other = native.step(tokens, number), theirs.step(tokens, number)
        assert abs(first - other) < 1e-3 * other, (number, first, other)
    ours, reference = run_rounds(native, theirs, tokens, rounds)
    medians = {name: round(1e3 * float(np.median(values)), 2)
               for name, values in reference.items()}
    return {"value": round(ratio(ours, reference), 4), "unit": "ratio",
            "interval": bootstrap(ours, reference),
            "native_ms": round(1e3 * float(np.median(ours)), 2),
            "transformers_ms": min(medians.values()), "implementations_ms": medians}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_const", dest="rounds", const=30, default=200)
    parser.add_argument("--full", action="store_const", dest="rounds", const=200)
    parser.add_argument("--rounds", type=int, help="measured steps of each side")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    print(json.dumps({"figure": "native_vs_transformers", **measure(args.rounds),
                      "rounds": args.rounds, "threads": args.threads, "tokens": BATCH * SEQ,
                      "torch": torch.__version__, "simulated": False}))


if __name__ == "__main__":
    main()
