"""Stands in for the C++ module: same interface, a bigram model, memory by formula.

The loss is the bigram cross entropy plus a penalty on expert weights, so that dense and expert
parameters, moments and every process group matter to it. Spikes raise rank 1's peak.
"""

import hashlib
import json
import math
import os
import time

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

from bagualu.layout import make_layout

MIB = 2**20
STATIC_BYTES = 8 * MIB
FLOOR_BYTES = 10 * MIB
CALM_PEAK_BYTES = 16 * MIB
OPTIONS = {"rank", "world_size", "ep_size", "micro_batch_size", "seq", "microbatches", "dtype",
           "seed", "policy", "policy_args", "budget_bytes", "host_budget_bytes", "chunk_rows",
           "profile", "weight_decay", "beta1", "beta2", "eps", "clip", "allow_quantise",
           "pp_size", "virtual_per_rank", "stage_layers", "pipeline", "overlap",
           "link_bytes_per_s", "link_latency_us", "deadline_s"}
GROUPS = ("ep", "dp", "edp", "pp", "world", "embedding")
_budget = 0


class OverBudget(RuntimeError):
    """As the C++ module raises it."""


def arena_stats():
    return {"live_bytes": 0}


def arena_install(device_budget_bytes):
    global _budget
    _budget = device_budget_bytes


def memory_forecast(spec_json, options_json):
    """The first stage needs 1 MiB more, for the micro-batches in flight."""
    options = json.loads(options_json)
    first = options.get("pp_size", 1) > 1 and options["rank"] == 0
    return json.dumps({"floor_bytes": FLOOR_BYTES + first * MIB, "static_bytes": STATIC_BYTES,
                       "calm_peak_bytes": CALM_PEAK_BYTES, "worst_save_all_bytes": 4 * MIB})


def _shapes(spec, experts):
    h, d = spec["hidden"], spec["head_dim"]
    q, kv = spec["heads"] * d, spec["kv_heads"] * d
    shapes = {"embed_tokens": (spec["vocab"], h)}
    for i in range(spec["layers"]):
        layer = {"attn_norm": (h,), "qkv": (q + 2 * kv, h), "attn_proj": (h, q), "mlp_norm": (h,)}
        if spec["qk_norm"]:
            layer |= {"q_norm": (d,), "k_norm": (d,)}
        if i in spec["dense_layers"]:
            layer |= {"mlp_fc1": (2 * spec["dense_ffn"], h), "mlp_fc2": (h, spec["dense_ffn"])}
        else:
            f = spec["expert_ffn"]
            layer |= {"router": (spec["experts"], h), "expert_fc1": (experts, 2 * f, h),
                      "expert_fc2": (experts, h, f)}
            if spec["shared_ffn"]:
                layer |= {"shared_fc1": (2 * spec["shared_ffn"], h),
                          "shared_fc2": (h, spec["shared_ffn"])}
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    head = {} if spec["tied_embeddings"] else {"lm_head": (spec["vocab"], h)}
    return shapes | {"final_norm": (h,)} | head


def _layout(spec, options):
    pipeline = options.get("pipeline", "1f1b")
    return make_layout(spec["layers"], options["world_size"], options.get("pp_size", 1),
                       options["ep_size"], options.get("virtual_per_rank", 1), pipeline,
                       options.get("stage_layers", ()))


class Trainer:
    def __init__(self, spec_json, options_json, groups_json):
        self.spec, self.options = json.loads(spec_json), json.loads(options_json)
        assert self.spec.pop("version") == 1
        names = json.loads(groups_json)
        assert set(names) == set(GROUPS)
        self.groups = {kind: _resolve_process_group(name) if name else None
                       for kind, name in names.items()}
        unknown = set(self.options) - OPTIONS
        assert not unknown, unknown
        self.rank, self.world = self.options["rank"], self.options["world_size"]
        self.layout = layout = _layout(self.spec, self.options)
        self.local = self.spec["experts"] // layout.ep
        self.first = layout.ep_rank(self.rank) * self.local
        layers = layout.layers_of(self.rank)

        def mine(name):
            if name.startswith("layers."):
                return int(name.split(".")[1]) in layers
            return layout.has_embedding(self.rank) if name == "embed_tokens" else \
                layout.has_head(self.rank)

        shapes = {name: shape for name, shape in _shapes(self.spec, self.local).items()
                  if mine(name)}
        self._p = {name: torch.zeros(shape) for name, shape in shapes.items()}
        self._m = {f"{kind}.{name}": torch.zeros(shape) for name, shape in shapes.items()
                   for kind in ("exp_avg", "exp_avg_sq")}
        self._b = {f"layers.{i}.router_bias": torch.zeros(self.spec["experts"])
                   for i in layers if i not in self.spec["dense_layers"]}

    def parameters(self):
        return dict(self._p)

    def optimizer_state(self):
        return dict(self._m)

    def buffers(self):
        return dict(self._b)

    def parameters_changed(self):
        pass

    def init_parameters(self, seed):
        for name, p in self._p.items():
            shape = (self.spec["experts"], *p.shape[1:]) if "expert_" in name else p.shape
            key = int.from_bytes(hashlib.sha256(f"{seed},{name}".encode()).digest()[:6], "little")
            whole = torch.randn(shape, generator=torch.Generator().manual_seed(key)) * 0.1
            p.copy_(whole[self.first:self.first + self.local] if "expert_" in name else whole)

    def _sum(self, tensor, *kinds):
        for kind in kinds:
            if self.groups[kind] is not None:
                dist.all_reduce(tensor, group=self.groups[kind])
        return tensor

    def logits(self, tokens):
        return self._p["embed_tokens"][tokens] @ self._p["lm_head"].T

    def waiting_for(self):
        return os.environ.get("FAKE_WAIT", "")

    def evaluate(self, tokens):
        loss = self._loss(tokens)[0].detach().double()
        return float(self._sum(loss, "dp") / self.layout.dp_size)

    def _everywhere(self, name):
        """A parameter that one stage holds; the sum with the others' zeros is exact."""
        zeros = torch.zeros(_shapes(self.spec, self.local)[name])
        return self._sum(self._p.get(name, zeros).clone(), "pp").requires_grad_()

    def _loss(self, tokens):
        embed, head = self._everywhere("embed_tokens"), self._everywhere("lm_head")
        logits = embed[tokens[..., :-1]] @ head.T
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, -2), tokens[..., 1:].flatten())
        return loss, {"embed_tokens": embed, "lm_head": head}

    def _gradients(self, tokens):
        loss, leaves = self._loss(tokens)
        loss.backward()
        grads = {}
        penalty = torch.zeros(1, dtype=torch.float64)
        for name, p in self._p.items():
            if name in leaves:
                grads[name] = self._sum(leaves[name].grad, "dp") / self.layout.dp_size
            else:
                grads[name] = 0.1 * p
                if "expert_" in name:
                    penalty += p.double().square().sum()
        loss = self._sum(loss.detach().double(), "dp") / self.layout.dp_size
        return float(loss + 1e-4 * self._sum(penalty, "ep", "pp")[0]), grads

    def step(self, tokens, step, lr, extras_json):
        extras, o = json.loads(extras_json), self.options
        time.sleep(float(os.environ.get("FAKE_STEP_S", "0")))
        if os.environ.get("FAKE_CRASH") == f"{self.rank}:{step}":
            raise ZeroDivisionError("a bug of the test")
        hot = max((s["factor"] for s in extras["spikes"]), default=1.0)
        natural, _, factor = os.environ.get("FAKE_SPIKE", "-1:1").partition(":")
        hot = max(hot, float(factor)) if int(natural) == step else hot
        peak = int(CALM_PEAK_BYTES * (hot if self.rank == 1 % self.world else 1.0))
        mitigations = []
        if _budget and peak > _budget:
            if o["policy"] in ("static", "save-all"):
                error = OverBudget("over budget")
                error.microbatch, error.layer, error.op = 0, 2, "expert_fc1"
                error.wanted_bytes, error.left_bytes = peak - _budget + 100, 100
                error.budget_bytes = _budget
                raise error
            mitigations = [{"microbatch": 0, "layer": 2, "load_imbalance": hot,
                            "needed_bytes": peak - _budget, "cost_ns": 12345,
                            "actions": [{"unit": "layer2.expert_fc1", "residency": "recompute",
                                         "bytes": peak - _budget, "ns": 12345}]}]
            peak = _budget
        loss, grads = self._gradients(tokens)
        squares = self._sum(sum((g.double().square().sum() for n, g in grads.items()
                                 if "expert_" not in n), torch.zeros((), dtype=torch.float64)), "pp")
        for name, g in grads.items():
            m, v = self._m[f"exp_avg.{name}"], self._m[f"exp_avg_sq.{name}"]
            m.mul_(o["beta1"]).add_(g, alpha=1 - o["beta1"])
            v.mul_(o["beta2"]).addcmul_(g, g, value=1 - o["beta2"])
            scale = math.sqrt(1 - o["beta2"] ** (step + 1)) / (1 - o["beta1"] ** (step + 1))
            self._p[name].addcdiv_(m, v.sqrt().add_(1e-8), value=-lr * scale)
        for bias in self._b.values():
            bias.add_(0.001 * (step + 1))
        if os.environ.get("FAKE_NAN") == str(step):
            loss = None
        stop = self._sum(torch.tensor([float(extras["stop_requested"])]), "world")
        moe = self.spec["layers"]
        return json.dumps({
            "rank": self.rank, "peak_bytes": peak, "predicted_peak_bytes": peak, "end_bytes": 0,
            "host_peak_bytes": 0, "rows": [1] * moe, "decision_ns": [1000, 2000], "cache_hits": 1,
            "residencies": {"save": 4, "recompute": len(mitigations), "offload": 0},
            "bytes_recomputed": 7, "bytes_offloaded": 0, "wait_ns": 0, "comm_ns": 0,
            "loss": loss, "grad_norm": float(squares.sqrt()), "aux_loss": 0.0, "z_loss": 0.0,
            "imbalance": [hot] * moe, "mitigations": mitigations, "stop": bool(stop[0] > 0),
            "memory": [[0, STATIC_BYTES, "start"], [5, peak, "loss"]]
            if extras["want_memory"] else None})

    def plan_json(self):
        return json.dumps({"policy": "adaptive", "plan": {"units": {}}})

    def start_json(self):
        return json.dumps({"attention_scratch_bytes": [0, 0],
                           "profile": json.loads(self.profile_json())})

    def profile_json(self):
        exchange = {"forward": [[64, 1000], [128, 2000]]}
        return json.dumps({"version": 1,
                           "ops": {"expert_fc1": [[64, 1000]], "dispatch": exchange},
                           "d2h_bytes_per_s": 2e9, "h2d_bytes_per_s": 3e9,
                           "encode_bytes_per_s": 4e9, "copy_hidden_fraction": 0.5})
