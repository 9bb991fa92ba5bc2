"""Sampling: stateless, deterministic, the same global batch for every number of ranks."""

import numpy as np
import pytest

from bagualu.data import Domain, Sampler, load_domains
from bagualu.errors import InvalidInput

SEQ = 8
KNOWN = (["a", "b", "b", "a"], [56, 114, 107, 63])


def sampler(slots=2):
    texts = [np.arange(n, n + 90, dtype=np.uint8) for n in (0, 100)]
    domains = [Domain(name, t, t[-20:]) for name, t in zip("ab", texts, strict=True)]
    return Sampler(domains, 3, SEQ, slots)


def batch(s, step, world, microbatches, size):
    """[microbatch, world * size, seq + 1]: all ranks together."""
    parts = []
    for rank in range(world):
        out = np.empty((microbatches, size, SEQ + 1), "int64")
        names = s.step_tokens(step, rank, world, (microbatches, size), out)
        parts.append(out)
    return np.concatenate(parts, axis=1), names


@pytest.mark.parametrize("world, microbatches, size", [(1, 2, 4), (2, 2, 2), (4, 2, 1), (2, 4, 1),
                                                       (1, 8, 1), (1, 1, 8)])
def test_global_batch_does_not_depend_on_layout(world, microbatches, size):
    want, _ = batch(sampler(), 5, 1, 2, 4)
    found, _ = batch(sampler(), 5, world, microbatches, size)
    assert np.array_equal(found.reshape(8, -1), want.reshape(8, -1))


def test_a_microbatch_is_one_domain_and_steps_differ():
    s = sampler()
    seen = set()
    for step in range(20):
        tokens, names = batch(s, step, 2, 2, 2)
        for m in range(2):
            assert len(np.unique(tokens[m] >= 100)) == 1
            assert names[m] == ("b" if tokens[m, 0, 0] >= 100 else "a")
        seen.add(tokens.tobytes())
    assert len(seen) == 20


def test_known_values():
    # Fixed by definition: resuming an old checkpoint must see the same bytes.
    tokens, names = batch(sampler(slots=4), 1, 1, 4, 1)
    assert (names, tokens[:, 0, 0].tolist()) == KNOWN


def test_builtin_has_three_domains_with_validation_parts():
    domains = load_domains(["builtin"], 256)
    assert [d.name for d in domains] == ["shakespeare", "kjv", "python"]
    assert all(len(d.train) > 1_000_000 for d in domains)
    assert all(0.04 < len(d.validation) / len(d.train) < 0.06 for d in domains)


def test_validation_windows_stay_inside():
    s = sampler()
    out = np.empty((2, 2, SEQ + 1), "int64")
    s.validation_tokens(1, 2, (2, 2), out)
    assert out.min() >= 70


def test_short_text_is_refused(tmp_path):
    path = tmp_path / "short.txt"
    path.write_bytes(b"x" * SEQ)
    with pytest.raises(InvalidInput, match="at least one sequence"):
        load_domains([str(path)], SEQ)
