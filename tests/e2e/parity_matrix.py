"""`scripts/parity_matrix`: PP 1, 2, 4 x EP 1, 2 x every order x overlap x residencies, compared.

Every case runs the same sequences, under save-all and under random residencies and budgets. Bits
have to be the same among all cases with the same number of expert and data ranks; between those
numbers gradients are equal within the tolerance of parity.py.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/e2e"), str(ROOT / "python")]

PIPELINES = ("1f1b", "interleaved", "zb-h1", "dualpipe-v")


def matrix(runs: int) -> list[dict]:
    """Without dropout, whose random numbers differ between data ranks, to compare all with all."""
    from parity import case

    plain = {"model": {"dropout": 0.0}, "runs": runs}
    cases = []
    for pp in (1, 2, 4):
        for ep, copies in ((1, 1), (2, 1), (1, 2)):
            for pipeline in PIPELINES:
                for overlap in (False, True):
                    cases.append(case(pp, ep, pipeline, overlap, copies, **plain))
    return cases


def compare(results, cases: list[dict]) -> list[dict]:
    """One row per case: against the first with as many expert and data ranks, and the first."""
    from parity import worst_difference

    first = cases[0]["name"]
    rows = []
    same: dict[tuple, str] = {}
    for entry in cases:
        name = entry["name"]
        key = (entry["ep"], entry["world"] // entry["pp"])
        base = same.setdefault(key, name)
        found = results.gradients(name)
        ranks = results.of(name)
        peaks = [(p - m) / m for rank in ranks for p, m in rank["peaks"]]
        rows.append({
            "name": name, "runs": sum(rank["runs"] for rank in ranks),
            "different_runs": sum(len(rank["different"]) for rank in ranks),
            "against": base, "difference": worst_difference(found, results.gradients(base))[0],
            "loss_equal": results.loss(name) == results.loss(base),
            "difference_from_one_rank": worst_difference(found, results.gradients(first))[0],
            "peak_error": [min(peaks), max(peaks)],
            "unaccounted_bytes": max(rank["unaccounted"] for rank in ranks),
            "seconds": max(rank["seconds"] for rank in ranks)})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/parity_matrix", description=__doc__)
    parser.add_argument("--runs", type=int, default=4, help="random policies per case and rank")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--json", default="-", metavar="FILE|-")
    args = parser.parse_args()

    from parity import TOLERANCE, Results

    cases = matrix(args.runs)
    cases = cases[:1] + [entry for entry in cases[1:] if args.only in entry["name"]]
    with tempfile.TemporaryDirectory() as folder:
        results = Results(Path(folder), cases, max(entry["world"] for entry in cases), 7200)
        rows = compare(results, cases)
    bad = [row for row in rows if row["difference"] or not row["loss_equal"]
           or row["different_runs"] or row["unaccounted_bytes"]
           or row["difference_from_one_rank"] > TOLERANCE]
    text = json.dumps({"benchmark": "parity_matrix", "cases": len(rows),
                       "runs": sum(row["runs"] for row in rows), "tolerance": TOLERANCE,
                       "worst_between_layouts": max(r["difference_from_one_rank"] for r in rows),
                       "bad": [row["name"] for row in bad], "rows": rows}, indent=1)
    print(text) if args.json == "-" else Path(args.json).write_text(text + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
