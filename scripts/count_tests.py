"""Adds up JUnit files and prints 'total: N passed, N failed, N skipped'.

Usage: count_tests.py FILE... Exit code 1 if a file is missing or no test ran at all.
"""

import sys
import xml.etree.ElementTree as ElementTree


def count(path: str) -> tuple[int, int, int]:
    """Passed, failed (errors included) and skipped test cases of one file."""
    passed = failed = skipped = 0
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            failed += 1
        elif "skipped" in kinds:
            skipped += 1
        else:
            passed += 1
    return passed, failed, skipped


def main() -> int:
    totals = [0, 0, 0]
    complete = True
    for path in sys.argv[1:]:
        try:
            totals = [a + b for a, b in zip(totals, count(path))]
        except (OSError, ElementTree.ParseError) as error:
            print(f"no results in {path}: {error}", file=sys.stderr)
            complete = False
    print(f"total: {totals[0]} passed, {totals[1]} failed, {totals[2]} skipped")
    return 0 if complete and totals[0] > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
