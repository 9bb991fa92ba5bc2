"""The router's losses: values and gradients against autograd on transformers' router logits."""

from pathlib import Path

import pytest

import bagualu

if not list(Path(bagualu.__file__).parent.glob("_runtime*.so")):
    pytest.skip("the C++ module is not built: make build", allow_module_level=True)

import torch
import transformers_reference as reference


class RouterLosses:
    """Both losses of every layer that `model` ran since the last take(), with their graph.

    Balancing: E * sum_e f_e P_e, f_e the share of assignments, P_e the mean probability of expert
    e; z: the mean of logsumexp(logits)^2. Per layer, summed over layers.
    """

    def __init__(self, model, top_k):
        self._top_k = top_k
        self._layers = []
        for name, module in model.named_modules():
            if name.endswith("mlp.gate"):
                module.register_forward_hook(lambda _module, _in, out: self._layers.append(out[0]))

    def take(self):
        balancing, z = 0.0, 0.0
        for logits in self._layers:
            tokens, experts = logits.shape
            probabilities = logits.softmax(-1)
            chosen = probabilities.topk(self._top_k).indices.flatten()
            share = torch.bincount(chosen, minlength=experts) / (tokens * self._top_k)
            balancing = balancing + experts * (share * probabilities.mean(0)).sum()
            z = z + logits.logsumexp(-1).square().mean()
        count = len(self._layers)
        self._layers.clear()
        return balancing, z, count


@pytest.mark.parametrize("aux, z", [(0.05, 0.0), (0.0, 0.02), (0.3, 0.1)])
@pytest.mark.parametrize("name, moe_layers", [("mixtral", 3), ("qwen3_moe_dense", 1)])
def test_router_losses_and_their_gradients(name, moe_layers, aux, z, tmp_path):
    model = reference.make_reference(name)
    folder = reference.save(model, tmp_path / "model")
    spec = reference.spec_of(folder, aux_loss_coef=aux, z_loss_coef=z)
    trainer = reference.trainer_for(folder, spec, microbatches=2)
    tokens = reference.random_tokens(2 * reference.BATCH)
    report = reference.step(trainer, tokens)
    router = RouterLosses(model, spec.top_k)
    totals = torch.zeros(3)
    for microbatch in tokens.split(reference.BATCH):  # balanced by micro-batch, then averaged
        loss = reference.cross_entropy(model, microbatch)
        balancing, squares, count = router.take()
        assert count == moe_layers
        terms = torch.stack([loss, aux * balancing, z * squares]) / 2
        terms.sum().backward()
        totals += terms.detach()
    found = torch.tensor([report["loss"], report["aux_loss"], report["z_loss"]])
    torch.testing.assert_close(found, totals, rtol=1e-5, atol=0.0)
    wanted = reference.reference_gradients(model, tmp_path / "gradients", spec,
                                           trainer.parameters())
    worst = reference.worst_difference(trainer.gradients(), wanted)
    print(f"worst gradient {worst.name}: {worst.difference:.1e}")
    assert worst.difference <= 1e-5, worst.name


def test_perfect_balance_costs_the_coefficient(tmp_path):
    """Equal logits: P_e = 1/E, so E * sum f_e / E = 1, whatever is chosen."""
    model = reference.make_reference("mixtral")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "mlp.gate.weight" in name:
                parameter.zero_()
    folder = reference.save(model, tmp_path)
    spec = reference.spec_of(folder, aux_loss_coef=0.25, z_loss_coef=1.0)
    report = reference.step(reference.trainer_for(folder, spec), reference.random_tokens())
    assert report["aux_loss"] == pytest.approx(3 * 0.25, rel=1e-6)  # three layers
    log_experts = torch.tensor(float(spec.experts)).log()
    assert report["z_loss"] == pytest.approx(3 * log_experts.square().item(), rel=1e-6)
