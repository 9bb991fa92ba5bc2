"""Soak: 2,000 steps with a spike every 34, resident bytes and process memory after each (--full)."""

import argparse
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests/e2e"), str(ROOT / "python")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--quick", dest="steps", action="store_const", const=100)
    length.add_argument("--full", dest="steps", action="store_const", const=2000)
    steps = parser.parse_args().steps

    from test_soak import soak

    with tempfile.TemporaryDirectory() as folder:
        ranks = soak(Path(folder), steps)
    for number, rank in enumerate(ranks):
        late = rank["rss"][len(rank["rss"]) // 2:]
        print(json.dumps({
            "benchmark": "soak", "rank": number, "steps": steps,
            "spikes": len(rank["spikes"]), "mitigated": sum(given for _, given in rank["spikes"]),
            "largest_spike_rows": max(rows for rows, _ in rank["spikes"]), "out_of_memory": 0,
            "distinct_end_bytes": len(rank["end_bytes"]), "budget_bytes": rank["budget_bytes"],
            "peak_bytes": rank["peak_bytes"],
            "rss_growth_in_second_half_bytes": max(late) - late[0],
            "seconds": round(rank["seconds"], 1)}))


if __name__ == "__main__":
    main()
