"""Traced steps in the report: replayed by the program, drawn as executed and as scheduled."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "data_report"))

import synthetic_log
import synthetic_trace
from test_report import _drawn_traces, needs_chromium

from bagualu import (report, report_browser, report_html, report_log, report_perfetto,
                     report_perfetto_steps, report_step_figures, report_steps, report_summary)

needs_program = pytest.mark.skipif(report_steps.find_program() is None,
                                   reason="no program bagualu was built: make build")
SLOW, PLAIN = 4, (2, 3, 5)


def write_log(folder, wanted=(2, 3, 4, 5), name="run.jsonl"):
    """A log of six steps on two ranks that says which steps were traced."""
    records = synthetic_log.records("adaptive", 6)
    records[0] |= {"world_size": 2, "trace_step": list(wanted) or None}
    for record in records:
        if record["type"] == "step":
            record["ranks"] = record["ranks"][:2]
    path = Path(folder) / name
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return path


@pytest.fixture(name="log", scope="module")
def _log(tmp_path_factory):
    path = write_log(tmp_path_factory.mktemp("traced"))
    synthetic_trace.write_traces(path, (2, 3, 4, 5), slow=(SLOW,))
    return path


@pytest.fixture(name="traced", scope="module")
def _traced(log):
    return report_log.read_logs([log])[0]


@needs_program
def test_equal_steps_are_predicted_and_a_slow_one_is_not(traced):
    steps = {step["step"]: step for step in traced.traced.steps}
    assert list(steps) == [2, 3, 4, 5] and traced.traced.note == ""
    for step in PLAIN:  # their times are all alike, but for messages that came before the receive
        assert abs(report_steps.off_fraction(steps[step])) < 0.03
    assert report_steps.off_fraction(steps[SLOW]) < -0.1
    assert steps[SLOW]["predicted_ns"] == steps[2]["predicted_ns"]
    assert traced.traced.median_error_fraction < 0.03
    text = report_summary.text_report([traced])
    assert f"  step {SLOW}: " in text and "median of 4 steps" in text


@needs_program
def test_spans_cover_what_a_rank_did(traced):
    step = traced.traced.steps[0]
    for rank in step["ranks"]:
        done = list(report_steps.spans(step, rank, "executed"))
        compute = [span for span in done if span.track == "compute"]
        assert all(a.end_ns <= b.start_ns for a, b in zip(compute, compute[1:]))
        assert {span.kind for span in compute} >= {"forward", "backward", "weight gradient"}
        assert len([s for s in done if s.track == "stages"]) == 6
        assert len([s for s in done if s.track == "d2h"]) == 3
    # F = 400 us: micro-batch 0 leaves stage 0 after 400 + 100 + 200 us and the 201 us that are left
    # of its exchange, arrives 20 us later; until then stage 1, 7 us late, waits.
    first = next(s for s in report_steps.spans(step, step["ranks"][1], "executed")
                 if s.name == "receive stage_recv")
    assert (first.start_ns, first.end_ns) == (7_000, 921_000)
    assert first.wait_ns == 914_000
    message = next(s for s in report_steps.spans(step, step["ranks"][1], "executed")
                   if s.by == "post")
    assert message.start_ns == 901_000  # posted at 7, sent at 901


@needs_program
def test_page_has_table_and_timelines(traced):
    page = report_html.render([traced])
    assert "<h2>Step</h2>" in page and "executed / scheduled" in page
    figures = report_step_figures.build_step_figures([traced])
    assert [f.id for f in figures] == ["step-0-2", "step-0-3", "step-0-4"]  # three of four
    assert [f.layout["yaxis"]["ticktext"] for f in figures[:1]] == [
        ["rank 0 compute", "comm", "stages", "d2h", "rank 1 compute", "comm", "stages", "d2h"]]
    names = {trace["name"] for trace in figures[0].data}
    assert names == {"forward", "backward", "weight gradient", "other", "wait", "communication",
                     "copy"}
    wait = [t for t in figures[0].data if t["name"] == "wait"]
    assert [t["showlegend"] for t in wait] == [True, False]
    rows = report_steps.rows(traced.traced.steps)
    assert [row[0] for row in rows][::3] == ["2", "3", "4", "5"]
    assert rows[6][3].startswith("-")  # the slow step took longer than predicted


@needs_program
def test_a_step_with_many_pieces_says_what_is_left_out(traced, monkeypatch):
    monkeypatch.setattr(report_step_figures, "_MAX_SPANS", 10)
    monkeypatch.setattr(report_step_figures, "_MAX_RANKS", 1)
    figure = report_step_figures.build_step_figures([traced])[0]
    assert "shortest of" in figure.note and "The first 1 of 2 ranks." in figure.note


@needs_program
def test_perfetto_has_one_process_per_rank_executed_above_scheduled(traced):
    events = json.loads(report_perfetto.trace_json([traced]))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {1: "adaptive", 2: "rank 0", 3: "rank 1"}
    threads = {e["tid"]: e["args"]["name"] for e in events
               if e["pid"] == 3 and e["name"] == "thread_name"}
    assert [threads[tid] for tid in sorted(threads) if threads[tid][-1] != "2"] == [
        f"{side}: {track}" for side in report_steps.SIDES
        for track in ("compute", "comm", "comm between stages", "d2h")]
    begin = next(e["ts"] for e in events if e["name"] == "step 2" and e["ph"] == "X")
    slices = [e for e in events if e["ph"] == "X" and e["pid"] in (2, 3)]
    assert min(e["ts"] for e in slices) == begin
    assert _nesting_fault(slices) is None
    flows = [e for e in events if e["ph"] in "sf"]
    starts = {e["id"]: e for e in flows if e["ph"] == "s"}
    assert len(starts) == 4 * 6 * 2 and len(flows) == 2 * len(starts)  # steps, messages, sides
    for end in (e for e in flows if e["ph"] == "f"):
        assert end["pid"] != starts[end["id"]]["pid"] and end["ts"] >= starts[end["id"]]["ts"]


def _nesting_fault(slices):
    """The first slice that sticks out of one on its track that it begins in."""
    tracks = {}
    for event in sorted(slices, key=lambda e: (e["ts"], -e["dur"])):
        stack = tracks.setdefault((event["pid"], event["tid"]), [])
        while stack and stack[-1] <= event["ts"] + 1e-6:
            stack.pop()
        if stack and event["ts"] + event["dur"] > stack[-1] + 1e-6:
            return event
        stack.append(event["ts"] + event["dur"])
    return None


def test_transfers_side_by_side_get_tracks_of_their_own():
    spans = [report_steps.Span("comm", "communication", "x", start, 0, end)
             for start, end in ((0, 10), (2, 4), (4, 6), (10, 12))]
    assert [lane for lane, _ in report_perfetto_steps._in_lanes(spans)] == [0, 1, 1, 0]


def test_a_log_without_its_traces_is_drawn_and_noted(tmp_path, capsys):
    log = write_log(tmp_path)
    assert report.main([str(log), "-o", str(tmp_path / "run.html")]) == 0
    assert "no step trace run.trace-0.jsonl beside the log" in capsys.readouterr().err
    assert "<h2>Step</h2>" not in (tmp_path / "run.html").read_text(encoding="utf-8")
    # Traces of another run: this one's log does not speak of any.
    log = write_log(tmp_path, wanted=())
    synthetic_trace.write_traces(log, (2,))
    assert report_log.read_logs([log])[0].traced == report_steps.TracedSteps()


@needs_program
def test_bad_traces_are_noted_with_file_and_line(tmp_path, capsys):
    log = write_log(tmp_path)
    first, second = synthetic_trace.write_traces(log, (2, 3))
    lines = second.read_text(encoding="utf-8").splitlines(keepends=True)
    second.write_text("".join(lines[:-1]), encoding="utf-8")  # rank 1 was killed in step 3
    traced = report_log.read_logs([log])[0].traced
    assert [step["step"] for step in traced.steps] == [2]
    assert traced.note == "traces of step(s) 3 are not whole"
    first.write_text('{"type": "action"}\n', encoding="utf-8")
    assert report.main([str(log)]) == 0
    assert "run.trace-0.jsonl line 1: step" in capsys.readouterr().out
    traced = report_steps.read_steps(log, {"trace_step": [2], "world_size": 2}, "/no/program")
    assert "/no/program" in traced.note


@needs_program
@needs_chromium
def test_timelines_are_drawn_without_console_messages(tmp_path, log, traced):
    page = tmp_path / "run.html"
    assert report.main([str(log), "-o", str(page)]) == 0
    loaded = report_browser.load_page(page)
    assert loaded.console == []
    drawn = _drawn_traces(loaded.dom)
    for figure in report_step_figures.build_step_figures([traced]):
        assert drawn[figure.id] == len(figure.data)
