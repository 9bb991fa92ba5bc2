"""Calm steps under three policies, in turn in one process: what adaptive costs and what it saves.

save-all has no budget; adaptive and full-recompute get the same one, just above save-all's peak, so a
calm step fits it. Figures:
  adaptive_over_full_recompute   median step time full-recompute / adaptive, beside the gain that is
                                 there: 1 + (measured forward time of what full-recompute repeats) /
                                 (step time)
  save_all_over_adaptive         median step time save-all / adaptive; 1 = adaptive costs nothing
  decide_*                       time of the decisions of a step
Then the ablation at one budget halfway between what full-recompute and save-all need, so that
something has to go:
  ablation_per_operator   median step time full-recompute / static (a choice per operator, fitted to
                          1.2 times the balanced load, or to more where that does not survive)
  ablation_dynamic        the same over adaptive (the choice made anew at every gate)
One rank has no imbalance to react to, so dynamic can gain over static only what a fit with reserve
leaves; the paper's ratios beside them are of another scale.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

from paired import alternate, ratio, ratio_interval

from bagualu.model_spec import model_from_dict
from bagualu.runtime_module import load_runtime, lone_trainer

BATCH, SEQ, MICROBATCHES = 1, 512, 1
MODEL = {"version": 1, "name": "bench", "layers": 4, "hidden": 256, "heads": 8, "kv_heads": 4,
         "head_dim": 32, "vocab": 256, "experts": 8, "top_k": 2, "expert_ffn": 512}
HEADROOM = 1.02  # of the budget over save-all's calm peak
ABLATION = ("full-recompute", "static", "adaptive")
FITS = (1.2, 1.5, 2.0, 3.0, 4.0)
PAPER = {"ablation_per_operator": 1.16, "ablation_dynamic": 1.22}  # over full recompute


def repeated_ns(profile: dict, layers: int) -> int:
    """Forward time that full-recompute adds to one micro-batch, from the measured profile.

    Not repeated: the router (pinned), and what leaves no activation behind (second expert product,
    combine).
    """
    per_layer = ("attn_norm", "qkv", "core_attn", "attn_proj", "mlp_norm", "dispatch_pack")
    ns = sum(profile["ops"][op]["forward"][0][1] for op in per_layer)
    ns += sum(points[0][1] for points in profile["rebuild"].values())
    once = sum(profile["ops"][op]["forward"][0][1] for op in ("embedding", "final_norm", "lm_head"))
    return layers * ns + once


def least_fit(step: Callable[[float], object]) -> float:
    """Of 1.2 and more, the first load factor a plan fitted to which survives a real step."""
    for fit in FITS:
        try:
            step(fit)
            return fit
        except load_runtime().OverBudget:  # an expert got more rows than the fit had
            continue
    sys.exit("policy_speed_bench.py: no static plan survives the budget of the ablation")


def ablation(trainer, tokens: torch.Tensor, rounds: int, common: dict) -> None:
    """Prints the two figures of the ablation."""
    options = dict.fromkeys(ABLATION, "{}")

    def step(policy: str, budget: int, number: int) -> tuple[float, dict]:
        trainer.set_policy(policy, options.get(policy, "{}"), budget)
        begin = time.perf_counter()
        answer = json.loads(trainer.step(tokens, number, 0.0))
        return time.perf_counter() - begin, answer

    peaks = {policy: step(policy, 0, 0)[1]["peak_bytes"]
             for policy in ("full-recompute", "save-all")}
    budget = sum(peaks.values()) // 2

    def static_step(fit: float) -> None:
        options["static"] = json.dumps({"static_fit_imbalance": fit})
        step("static", budget, 0)

    fit = least_fit(static_step)
    given_up: dict[str, int] = {}  # without what pieces rebuild: that is never there as a whole
    losses = set()

    def side(policy: str):
        def timed(number: int) -> float:
            elapsed, answer = step(policy, budget, number)
            assert answer["peak_bytes"] <= budget, (policy, answer["peak_bytes"], budget)
            losses.add(answer["loss"])
            given_up[policy] = answer["bytes_recomputed"] + answer["bytes_offloaded"]
            return elapsed
        return timed

    times = alternate({policy: side(policy) for policy in ABLATION}, rounds)
    assert len(losses) == 1, losses
    full = times["full-recompute"]
    medians = {name: round(1e3 * float(np.median(values)), 2) for name, values in times.items()}
    for figure, policy in (("ablation_per_operator", "static"), ("ablation_dynamic", "adaptive")):
        print(json.dumps({
            "figure": figure, "unit": "ratio", "value": ratio(full, times[policy]),
            "interval": ratio_interval(full, times[policy]), **common, "medians_ms": medians,
            "over_static": ratio(times["static"], times[policy]),
            "static_fit_imbalance": fit, "budget_bytes": budget, "peaks_bytes": peaks,
            "given_up_bytes": given_up, "paper": PAPER[figure],
            "paper_label": "paper, another scale"}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_const", dest="rounds", const=40, default=200)
    parser.add_argument("--full", action="store_const", dest="rounds", const=200)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    trainer = lone_trainer(model_from_dict(MODEL, "bench model"), micro_batch_size=BATCH, seq=SEQ,
                           microbatches=MICROBATCHES, clip=1.0)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 256, (MICROBATCHES, BATCH, SEQ + 1), generator=generator)
    peak = json.loads(trainer.step(tokens, 0, 0.0))["peak_bytes"]
    budget = int(peak * HEADROOM)
    decisions: list[list[int]] = []
    losses = set()

    def side(policy: str, limit: int):
        def step(number: int) -> float:
            trainer.set_policy(policy, "{}", limit)
            begin = time.perf_counter()
            answer = json.loads(trainer.step(tokens, number, 0.0))
            elapsed = time.perf_counter() - begin
            losses.add(answer["loss"])
            if policy == "adaptive":
                assert answer["residencies"]["save"] and not answer["bytes_recomputed"]
                decisions.append(answer["decision_ns"])
            return elapsed
        return step

    times = alternate({"save-all": side("save-all", 0), "adaptive": side("adaptive", budget),
                       "full-recompute": side("full-recompute", budget)}, args.rounds)
    assert len(losses) == 1, losses  # lr 0, the same tokens: every step has the same loss
    medians = {name: float(np.median(values)) for name, values in times.items()}
    repeated = MICROBATCHES * repeated_ns(json.loads(trainer.profile_json()), MODEL["layers"])
    common = {"kind": "measured", "rounds": args.rounds, "threads": args.threads,
              "tokens": MICROBATCHES * BATCH * SEQ,
              "medians_ms": {name: round(1e3 * value, 2) for name, value in medians.items()}}
    print(json.dumps({
        "figure": "adaptive_over_full_recompute", "unit": "ratio",
        "value": ratio(times["full-recompute"], times["adaptive"]),
        "interval": ratio_interval(times["full-recompute"], times["adaptive"]),
        "gain_there": round(1 + repeated / 1e9 / medians["save-all"], 4),
        "gain_of_save_all": ratio(times["full-recompute"], times["save-all"]), **common}))
    print(json.dumps({
        "figure": "save_all_over_adaptive", "unit": "ratio",
        "value": ratio(times["save-all"], times["adaptive"]),
        "interval": ratio_interval(times["save-all"], times["adaptive"]), **common}))
    flat = np.sort(np.concatenate([np.array(d) for d in decisions])) / 1e3
    totals = np.array([sum(d) for d in decisions]) / 1e3
    for figure, value in (("decide_calm_p50", np.median(flat)),
                          ("decide_calm_p99", np.quantile(flat, 0.99)),
                          ("decide_calm_step_total", np.median(totals))):
        print(json.dumps({"figure": figure, "unit": "us", "value": round(float(value), 1),
                          "kind": "measured", "decisions_per_step": len(decisions[0])}))
    ablation(trainer, tokens, args.rounds, common)


if __name__ == "__main__":
    main()
