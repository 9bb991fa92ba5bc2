"""`bagualu report`: run logs to a self-contained HTML page, a Perfetto trace, a text summary.

Start here: report_log (reading, checks) -> report_summary (numbers, text) -> report_figures
(plots as data) -> report_html (the page); report_pipeline, report_steps (stages, traced steps),
report_perfetto and report_browser stand beside.
"""

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path

from bagualu import report_log, report_summary
from bagualu.errors import InvalidInput
from bagualu.json_file import write_atomic


def write_report(paths: list[str | Path], output: str | Path) -> None:
    """Writes the page for these logs, whole or not at all.

    Throws: InvalidInput for a bad log or a path that cannot be written.
    """
    # Late: the page needs Plotly, the text summary does not.
    from bagualu.report_html import render
    write_text_atomic(output, render(report_log.read_logs(paths)))


def write_perfetto(paths: list[str | Path], output: str | Path) -> None:
    """Writes the Chrome trace for these logs, whole or not at all. Throws like write_report."""
    from bagualu.report_perfetto import trace_json
    write_text_atomic(output, trace_json(report_log.read_logs(paths)))


def write_text_atomic(path: str | Path, text: str) -> None:
    """Writes beside, syncs, renames: a reader sees the old file or the whole new one.

    Throws: InvalidInput if the place cannot be written.
    """
    path = Path(path)
    try:
        write_atomic(path, text.encode("utf-8", "replace"))
    except OSError as error:
        raise InvalidInput(path, "output", error.strerror or "an error",
                           "a place that can be written") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bagualu report", description="Turns run logs into one page: memory against budget, "
        "imbalance, residencies, time, losses. Several logs are compared.",
        epilog="Exit codes: 0 done, 2 bad input. Without any output option, --text is meant.")
    parser.add_argument("logs", nargs="+", metavar="run.jsonl", help="run log of bagualu train")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the HTML page here")
    parser.add_argument("--perfetto", metavar="FILE",
                        help="write a Chrome trace for ui.perfetto.dev here")
    parser.add_argument("--json", metavar="FILE", help="write the comparison here; - is stdout")
    # For the program itself, which knows where it lies.
    parser.add_argument("--program", help=argparse.SUPPRESS)
    parser.add_argument("--text", action="store_true", help="print the comparison")
    return parser


def run(args: argparse.Namespace) -> None:
    """Does what the options ask. Throws: InvalidInput; nothing is written if a log is bad."""
    outputs = [p for p in (args.output, args.perfetto, args.json) if p not in (None, "-")]
    places = [Path(p).resolve() for p in outputs + args.logs]
    for output in outputs:
        if places.count(Path(output).resolve()) > 1:
            raise InvalidInput(output, "output", "a file used twice", "a file of its own")
    logs = report_log.read_logs(args.logs, args.program)
    as_text = args.text or not (args.output or args.perfetto or args.json)
    for log in logs:
        if log.traced.note and not as_text:  # the text has it
            print(report_summary.printable(f"bagualu report: {log.path}: {log.traced.note}"),
                  file=sys.stderr)
    if args.output:
        from bagualu.report_html import render
        write_text_atomic(args.output, render(logs))
    if args.perfetto:
        from bagualu.report_perfetto import trace_json
        write_text_atomic(args.perfetto, trace_json(logs))
    if args.json:
        rows = [dataclasses.asdict(row) for row in report_summary.summarise(logs)]
        text = json.dumps({"version": 1, "runs": rows}, indent=2) + "\n"
        if args.json == "-":
            sys.stdout.write(text)
        else:
            write_text_atomic(args.json, text)
    if as_text:
        sys.stdout.write(report_summary.text_report(logs))


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0 done, 2 bad input."""
    args = _parser().parse_args(argv)
    try:
        run(args)
    except InvalidInput as error:
        print(report_summary.printable(f"bagualu: error: {error}"), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("bagualu report: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our text has gone, for instance `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
