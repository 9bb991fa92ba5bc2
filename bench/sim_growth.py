#!/usr/bin/env python3
"""How the cost of a simulation grows with ranks and with iterations: CPU time of whole processes.

Usage: bench/sim_growth.py BAGUALU [--svg FILE]

Ranks: the scenario bw1000-12288 with fewer replicas of its 512 ranks under 72 GiB, 32 iterations.
Iterations: bw1000-128. Prints a table for every series with the line fitted to it, and draws both.
"""

import argparse
import json
import resource
import subprocess
import tempfile
from pathlib import Path

import numpy as np

SCENARIOS = Path(__file__).resolve().parent.parent / "configs" / "scenarios"
WORLDS = [1536, 3072, 6144, 9216, 12288]
ITERATIONS = [125, 250, 500, 1000]
POLICIES = ["full-recompute", "adaptive"]
COLORS = {"full-recompute": "#888", "adaptive": "#06c"}


def cpu_seconds(command: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def simulate(program: str, scenario: str, policy: str, iterations: int) -> float:
    return cpu_seconds([program, "simulate", "--scenario", scenario, "--policy", policy,
                        "--iterations", str(iterations), "--quiet"])


def by_ranks(program: str, policy: str, folder: Path) -> list[tuple[int, float]]:
    scenario = json.loads((SCENARIOS / "bw1000-12288.json").read_text())
    scenario["budget"] = "72GiB"  # fewer replicas share an optimizer state: more of it on each rank
    points = []
    for world in WORLDS:
        scenario["strategy"]["world_size"] = world
        path = folder / f"{world}.json"
        path.write_text(json.dumps(scenario))
        points.append((world, simulate(program, str(path), policy, 32)))
    return points


def by_iterations(program: str, policy: str) -> list[tuple[int, float]]:
    return [(n, simulate(program, "bw1000-128", policy, n)) for n in ITERATIONS]


def line_of(points: list[tuple[int, float]]) -> tuple[float, float, float]:
    """Slope, value at 0 and coefficient of determination of the least-squares line."""
    x, y = np.array(points, dtype=float).T
    slope, start = np.polyfit(x, y, 1)
    unexplained = np.sum((y - start - slope * x) ** 2)
    return slope, start, 1 - unexplained / np.sum((y - y.mean()) ** 2)


def plot(series: dict[str, list[tuple[int, float]]], title: str, left: int) -> str:
    most_x = max(x for points in series.values() for x, _ in points)
    most_y = max(y for points in series.values() for _, y in points)

    def at(x: float, y: float) -> str:
        return f"{left + 50 + 260 * x / most_x:.1f},{220 - 180 * y / most_y:.1f}"

    parts = [f'<text x="{left + 50}" y="20">{title}</text>',
             f'<path d="M{at(0, most_y)}L{at(0, 0)}L{at(most_x, 0)}" fill="none" stroke="#000"/>',
             f'<text x="{left + 280}" y="240">{most_x:,}</text>',
             f'<text x="{left}" y="44">{most_y:.0f} s</text>']
    for number, (policy, points) in enumerate(series.items()):
        slope, start, _ = line_of(points)
        parts.append(f'<path d="M{at(0, max(start, 0))}L{at(most_x, start + slope * most_x)}" '
                     f'stroke="{COLORS[policy]}"/>')
        for x, y in points:
            cx, cy = at(x, y).split(",")
            parts.append(f'<circle cx="{cx}" cy="{cy}" r="3" fill="{COLORS[policy]}"/>')
        parts.append(f'<text x="{left + 60 + 110 * number}" y="34" fill="{COLORS[policy]}">'
                     f'{policy}</text>')
    return "".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("bagualu", help="the program")
    parser.add_argument("--svg", help="file for the picture")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ranks = {p: by_ranks(args.bagualu, p, Path(folder)) for p in POLICIES}
    iterations = {p: by_iterations(args.bagualu, p) for p in POLICIES}
    for title, series in (("ranks", ranks), ("iterations", iterations)):
        for policy, points in series.items():
            slope, start, explained = line_of(points)
            row = " | ".join(f"{x:,}: {y:.2f} s" for x, y in points)
            print(f"| {title} | {policy} | {row} | {start:.2f} s + {1000 * slope:.3f} ms each, "
                  f"r2 {explained:.3f} |")
    if args.svg:
        Path(args.svg).write_text(
            '<svg xmlns="http://www.w3.org/2000/svg" width="740" height="250" '
            'font-family="sans-serif" font-size="12">'
            '<rect width="740" height="250" fill="#fff"/>'
            + plot(ranks, "32 iterations of bw1000-12288: CPU time over ranks", 0)
            + plot(iterations, "bw1000-128: CPU time over iterations", 370) + "</svg>\n")


if __name__ == "__main__":
    main()
