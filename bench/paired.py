"""Comparing step times on a noisy machine: sides take turns in one process, ratios of medians."""

from collections.abc import Callable

import numpy as np


def alternate(sides: dict[str, Callable[[int], float]], rounds: int,
              warm_up: int = 3) -> dict[str, np.ndarray]:
    """Seconds of every side in every round; each round runs all sides, in changing order."""
    order = np.random.default_rng(0)
    times = {name: np.zeros(rounds) for name in sides}
    for number in range(warm_up + rounds):
        for name in order.permutation(list(sides)):
            elapsed = sides[name](number)
            if number >= warm_up:
                times[name][number - warm_up] = elapsed
    return times


def ratio(upper: np.ndarray, lower: np.ndarray) -> float:
    return round(float(np.median(upper) / np.median(lower)), 4)


def ratio_interval(upper: np.ndarray, lower: np.ndarray, samples: int = 2000) -> list[float]:
    """95 % bootstrap interval of ratio(), rounds drawn together."""
    picks = np.random.default_rng(0).integers(0, len(lower), (samples, len(lower)))
    ratios = np.median(upper[picks], axis=1) / np.median(lower[picks], axis=1)
    return [round(float(x), 4) for x in np.quantile(ratios, (0.025, 0.975))]
