"""The report: reading of logs, numbers, page, trace, command line; the page in a real browser."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "data_report"))

import synthetic_log

from bagualu import report, report_browser, report_log, report_summary
from bagualu.errors import InvalidInput

plotly = pytest.importorskip("plotly", reason="plotly is not installed: pip install plotly")

from bagualu import report_figures, report_html, report_perfetto  # noqa: E402

needs_chromium = pytest.mark.skipif(report_browser.find_chromium() is None,
                                    reason="no chromium is installed: apt install chromium")


@pytest.fixture(name="demo", scope="module")
def _demo(tmp_path_factory):
    return synthetic_log.write_demo(tmp_path_factory.mktemp("logs"))


def _write(path: Path, records: list) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return path


def _drawn_traces(dom: str) -> dict[str, int]:
    """Per plot the traces with ink, from the document after the browser ran the page's scripts."""
    ink = re.compile(r'<g class="trace scatter(?:(?!<g class="trace).)*?'
                     r'(?: d="M|class="point")|<image [^>]*href="data:image', re.DOTALL)
    parts = re.split(r'<div class="plot(?: js-plotly-plot)?" id="([\w-]+)"', dom)[1:]
    return {name: len(ink.findall(part)) for name, part in zip(parts[::2], parts[1::2])}


# ---- reading

def test_log_reads_whole_run(demo):
    log = report_log.read_log(demo[3])
    assert (log.run["policy"], len(log.steps), len(log.mitigations)) == ("adaptive", 60, 3)
    assert [r["step"] for r in log.memory] == [1, 20, 34, 48]
    assert log.torn_lines == 0


def test_log_counts_torn_last_line(tmp_path, demo):
    data = demo[3].read_bytes()
    path = tmp_path / "torn.jsonl"
    # At every cut inside the last line but its end the summary is torn, never an error.
    start = data.rstrip(b"\n").rfind(b"\n") + 1
    for cut in (start + 1, start + 40, len(data) - 2):
        path.write_bytes(data[:cut])
        log = report_log.read_log(path)
        assert (log.torn_lines, len(log.steps), log.summary) == (1, 60, None)
    assert "torn" in report_summary.text_report([log])


def test_log_survives_cut_at_any_byte_after_the_header(tmp_path):
    data = b"".join(json.dumps(r).encode() + b"\n" for r in synthetic_log.records("static", 2))
    path = tmp_path / "cut.jsonl"
    for cut in range(data.index(b"\n") + 1, len(data), 37):
        path.write_bytes(data[:cut])
        assert report_log.read_log(path).torn_lines <= 1


@pytest.mark.parametrize("glued", [True, False])
def test_log_resumed_after_a_kill_keeps_the_later_steps(tmp_path, glued):
    records = synthetic_log.records("full-recompute", 8)
    steps = [r for r in records if r["type"] == "step"]
    again = [dict(r, loss=9.0) for r in steps[4:]]
    lines = [json.dumps(r) for r in records[:1] + steps[:6]]
    torn = json.dumps(steps[6])[:50] + ("" if glued else "\n")
    tail = [json.dumps(r) for r in records[:1] + again + records[-1:]]
    path = tmp_path / "resumed.jsonl"
    path.write_text("\n".join(lines) + "\n" + torn + "\n".join(tail) + "\n", encoding="utf-8")
    log = report_log.read_log(path)
    assert (log.resumes, log.torn_lines) == (1, 1)
    assert [s["step"] for s in log.steps] == list(range(1, 9))
    assert [s["loss"] == 9.0 for s in log.steps] == [False] * 4 + [True] * 4


def test_log_ignores_record_types_of_later_writers(tmp_path):
    records = synthetic_log.records("adaptive", 2)
    path = _write(tmp_path / "a.jsonl", records[:2] + [{"type": "novel"}] + records[2:])
    assert report_log.read_log(path).ignored_records == 1


_RUN = synthetic_log.records("adaptive", 2)[0]
_STEP = next(r for r in synthetic_log.records("adaptive", 2) if r["type"] == "step")


@pytest.mark.parametrize("text, line, field", [
    ("", "", "log"),
    ("\n\n", "", "log"),
    ("hello\n", ":1", "line"),
    ("[1, 2]\n", ":1", "line"),
    ("\x00\x01\xff", ":1", "line"),
    ('{"loss": 1}\n', ":1", "type"),
    (json.dumps(_STEP) + "\n", ":1", "type"),
    (json.dumps(dict(_RUN, version=2)) + "\n", ":1", "version"),
    (json.dumps(dict(_RUN, version=True)) + "\n", ":1", "version"),
    (json.dumps({"type": "run", "policy": "adaptive"}) + "\n", ":1", "version"),
    (json.dumps(dict(_RUN, budget_bytes="96MiB")) + "\n", ":1", "run.budget_bytes"),
    (json.dumps(dict(_RUN, world_size=1.5)) + "\n", ":1", "run.world_size"),
    (json.dumps(_RUN) + "\nnonsense\n" + json.dumps(_STEP) + "\n", ":2", "line"),
    (json.dumps(_RUN) + "\n" + json.dumps(dict(_STEP, ranks=[7])) + "\n", ":2", "step.ranks"),
    (json.dumps(_RUN) + "\n" + json.dumps(dict(_STEP, ranks=[{"rank": 0}])) + "\n", ":2",
     "rank.peak_bytes"),
    (json.dumps(_RUN) + "\n" + json.dumps(dict(_STEP, step_ns=None)) + "\n", ":2", "step.step_ns"),
    (json.dumps(_RUN) + "\n" + json.dumps(dict(_STEP, step=10**30)) + "\n", ":2", "step.step"),
])
def test_bad_log_is_refused_with_file_line_and_field(tmp_path, capsys, text, line, field):
    path = tmp_path / "bad.jsonl"
    path.write_text(text, encoding="utf-8")
    page = tmp_path / "run.html"
    assert report.main([str(path), "-o", str(page)]) == 2
    error = capsys.readouterr().err
    assert f"{path}{line}: {field}: found" in error and "allowed" in error
    assert [p.name for p in tmp_path.iterdir()] == ["bad.jsonl"]


def test_missing_log_folder_and_twice_are_refused(tmp_path, demo, capsys):
    for argv in ([str(tmp_path / "none.jsonl")], [str(tmp_path)], [str(demo[0]), str(demo[0])]):
        assert report.main(argv) == 2
        assert "allowed" in capsys.readouterr().err


def test_labels_are_unique(tmp_path):
    paths = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        paths.append(synthetic_log.write_log(tmp_path / folder / "run.jsonl", "adaptive", 2))
    paths.append(synthetic_log.write_log(tmp_path / "other.jsonl", "adaptive", 2))
    labels = [log.label for log in report_log.read_logs(paths)]
    assert labels == ["adaptive (run)", "adaptive (run) #2", "adaptive (other)"]


# ---- numbers

def test_summary_compares_the_policies(demo):
    rows = report_summary.summarise(report_log.read_logs(demo))
    assert [row.finished for row in rows] == [True, False, True, True]
    assert [row.losses_equal for row in rows] == ["reference", "equal to step 19", "equal", "equal"]
    assert rows[1].oom_at == "step 20, rank 1, layer 3 expert_fc1"
    assert rows[3].peak_bytes == synthetic_log.BUDGET_BYTES - 700_000
    assert (rows[3].spike_steps, rows[3].mitigations) == (3, 3)
    assert (rows[3].decision_p99_ns, rows[3].decision_max_ns) == (640_000, 1_900_000)
    # Only adaptive searches, so only there is a hit rate of any meaning.
    assert [row.plan_cache_hit_fraction for row in rows] == [None, None, None, 0.985]


def test_summary_of_a_killed_run_counts_its_own_decisions(tmp_path):
    records = [r for r in synthetic_log.records("adaptive", 3) if r["type"] != "summary"]
    for record in records:
        for number, rank in enumerate(record.get("ranks", [])):
            rank["cache_hits"] = 4 if number else 3
    row = report_summary.summarise([report_log.read_log(_write(tmp_path / "a.jsonl", records))])[0]
    assert row.plan_cache_hit_fraction == (3 + 3 * 4) / (4 * synthetic_log.LAYERS)
    assert row.decision_max_ns == 20_000 + 900 * 10


def test_summary_finds_different_losses(tmp_path, demo):
    records = synthetic_log.records("full-recompute")
    records[-1]["loss_digest"] = "other"
    changed = _write(tmp_path / "full.jsonl", records)
    records = [r for r in synthetic_log.records("static") if r["type"] != "summary"]
    next(r for r in records if r.get("step") == 7)["loss"] = 0.5
    cut = _write(tmp_path / "cut.jsonl", records)
    rows = report_summary.summarise(report_log.read_logs([demo[0], changed, cut]))
    assert [row.losses_equal for row in rows][1:] == ["different", "different from step 7"]


def test_percentile_is_nearest_rank():
    values = [float(v) for v in range(1, 101)]  # 1..100: the 99th percentile is the 99th value
    assert report_summary.percentile(values, 0.99) == 99
    assert report_summary.percentile(values, 0.5) == 50
    assert report_summary.percentile([7.0], 0.99) == 7
    assert report_summary.percentile([], 0.5) is None


def test_text_summary_holds_table_and_no_control_characters(tmp_path, demo, capsys):
    assert report.main([str(p) for p in demo]) == 0
    text = capsys.readouterr().out
    assert "out of memory after 19 of 60" in text and "95.3 MiB of 96.0 MiB (99.3%)" in text
    assert "recompute layer2.moe_act (3.0 MiB)" in text
    assert ("decisions p50 21.0 us, p99 640.0 us, max 1.90 ms; plan known without a search in "
            "98.5 %; 3 mitigation(s)") in text
    records = synthetic_log.records("adaptive", 2)
    records[0]["policy"] = "\x1b[31mred\ud800"
    assert report.main([str(_write(tmp_path / "a.jsonl", records)), "--text"]) == 0
    assert "\x1b" not in capsys.readouterr().out


# ---- page

def test_figures_are_valid_plotly_and_cover_the_run(demo):
    import plotly.graph_objects
    figures = report_figures.build_figures(report_log.read_logs(demo))
    assert [f.id for f in figures] == [
        "memory-steps", "memory-calm", "memory-spike", "imbalance-0", "residencies-0",
        "residencies-1", "residencies-2", "residencies-3", "step-time", "speed", "loss",
        "decisions"]
    assert "adaptive knew the plan without a search in 98.5 %" in figures[-1].note
    for figure in figures:
        light = json.loads(re.sub(r'"@([\w-]+)"', lambda m: json.dumps(
            report_figures.PALETTE[m.group(1)][0]), json.dumps([figure.data, figure.layout])))
        plotly.graph_objects.Figure(data=light[0], layout=light[1])  # raises on an unknown property
        for axis in ("xaxis", "yaxis"):
            assert figure.layout[axis]["title"]["text"]


def test_page_escapes_text_of_the_log(tmp_path):
    evil = "<script>alert(1)</script><!--SCRIPT-->\u2028&\"'"
    records = synthetic_log.records("adaptive", 50)
    records[0]["policy"] = evil
    records[0]["model"]["name"] = evil
    for record in records:
        for action in record.get("actions", []):
            action["unit"] = evil
    page = report_html.render([report_log.read_log(_write(tmp_path / "a.jsonl", records))])
    assert "<script>alert(1)" not in page and "&lt;script&gt;alert(1)" in page
    assert page.count("<script") - plotly.offline.get_plotlyjs().count("<script") == 4


def test_page_needs_no_network(demo):
    page = report_html.render(report_log.read_logs(demo))
    own = page.replace(plotly.offline.get_plotlyjs(), "")
    assert len(page) - len(own) > 1_000_000
    assert "http://" not in own and "https://" not in own and "src=" not in own.replace("-src", "")
    assert "default-src 'none'" in own


def test_page_takes_losses_that_blew_up(tmp_path):
    records = synthetic_log.records("adaptive", 4)
    steps = [r for r in records if r["type"] == "step"]
    steps[2]["loss"], steps[3]["loss"] = float("nan"), None
    steps[1]["imbalance"][0] = float("nan")
    log = report_log.read_log(_write(tmp_path / "a.jsonl", records))
    report_html.render([log])
    assert "NaN" not in report_perfetto.trace_json([log])


@pytest.mark.parametrize("count", [1, 2])
def test_page_of_a_run_without_or_with_one_step(tmp_path, count):
    records = [r for r in synthetic_log.records("adaptive", 3) if r["type"] in ("run", "step")]
    path = _write(tmp_path / "a.jsonl", records[:count])
    page = report_html.render([report_log.read_log(path)])
    assert ("nothing to plot" in page) == (count == 1)
    assert "log ends after" in report_summary.text_report([report_log.read_log(path)])


def test_output_is_whole_or_absent(tmp_path, demo, capsys, monkeypatch):
    page = tmp_path / "run.html"
    page.write_text("old", encoding="utf-8")

    def full(*_):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr("os.fsync", full)
    assert report.main([str(demo[0]), "-o", str(page)]) == 2
    assert "No space left" in capsys.readouterr().err
    assert page.read_text(encoding="utf-8") == "old" and len(list(tmp_path.iterdir())) == 1


def test_outputs_that_cannot_be_are_refused(tmp_path, demo, capsys):
    for argv in (["-o", str(tmp_path / "no" / "run.html")], ["-o", str(demo[0])],
                 ["-o", str(tmp_path / "x"), "--perfetto", str(tmp_path / "x")],
                 ["-o", str(tmp_path)]):
        assert report.main([str(demo[0]), *argv]) == 2
        assert "output" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


# ---- trace and command line

def test_perfetto_trace_has_steps_counters_and_mitigations(demo):
    trace = json.loads(report_perfetto.trace_json(report_log.read_logs(demo)))
    events = trace["traceEvents"]
    adaptive = [e for e in events if e["pid"] == 4]
    assert sum(e["ph"] == "X" for e in adaptive) == 60 * 5  # the job and four ranks
    assert sum(e["ph"] == "C" for e in adaptive) == 60 * 4 + 4 * 120  # peaks, four recorded steps
    acted = [e for e in adaptive if e["ph"] == "i"]
    assert [e["name"] for e in acted] == [f"mitigate step {s}" for s in synthetic_log.SPIKES]
    start = {e["name"]: e["ts"] for e in adaptive if e["ph"] == "X"}
    assert acted[0]["ts"] == start["step 20"] and acted[0]["tid"] == 2
    assert [e["name"] for e in events if e["ph"] == "i" and e["pid"] == 2] == ["out of memory"]
    assert all(e["dur"] > 0 for e in events if e["ph"] == "X")


def test_command_writes_every_output(tmp_path, demo):
    done = subprocess.run(
        [sys.executable, "-m", "bagualu.report", *map(str, demo), "-o", "run.html", "--perfetto",
         "trace.json", "--json", "-"], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={"PYTHONPATH": str(Path(report.__file__).parent.parent)}, timeout=60)
    assert done.returncode == 0, done.stderr
    runs = json.loads(done.stdout)["runs"]
    assert [r["finished"] for r in runs] == [True, False, True, True]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.html", "trace.json"]


# ---- browser

@needs_chromium
@pytest.mark.parametrize("dark", [False, True])
def test_every_plot_is_drawn_without_console_messages(tmp_path, demo, dark):
    page = tmp_path / "run.html"
    report.write_report(demo, page)
    loaded = report_browser.load_page(page, dark=dark)
    assert loaded.console == []
    figures = report_figures.build_figures(report_log.read_logs(demo))
    assert _drawn_traces(loaded.dom) == {f.id: len(f.data) for f in figures}
    assert 'data-drawn="36"' in loaded.dom  # three layers of graphics for each of 12 plots
    colour = report_figures.PALETTE["adaptive"][dark].lstrip("#")
    red, green, blue = bytes.fromhex(colour)
    assert f"stroke: rgb({red}, {green}, {blue})" in loaded.dom


@needs_chromium
def test_browser_check_sees_a_broken_page(tmp_path, demo):
    page = tmp_path / "run.html"
    report.write_report(demo[3:], page)
    text = page.read_text(encoding="utf-8")
    page.write_text(text.replace("Plotly.react(", "Plotly.wrong("), encoding="utf-8")
    loaded = report_browser.load_page(page)
    assert any("Plotly.wrong" in line for line in loaded.console)
    assert set(_drawn_traces(loaded.dom).values()) == {0}


@needs_chromium
def test_hostile_log_runs_no_script(tmp_path):
    records = synthetic_log.records("adaptive", 50)
    records[0]["policy"] = "<img src=x onerror=document.title='owned'><a href='javascript:0'>x</a>"
    page = tmp_path / "run.html"
    report.write_report([_write(tmp_path / "a.jsonl", records)], page)
    loaded = report_browser.load_page(page)
    assert loaded.console == [] and "<title>owned" not in loaded.dom
    assert "javascript:0\"" not in loaded.dom and not re.search(r"<img [^>]*onerror", loaded.dom)


@needs_chromium
def test_screenshot_writes_a_picture_of_the_asked_size(tmp_path, demo):
    report.write_report(demo[3:], tmp_path / "run.html")
    report_browser.screenshot(tmp_path / "run.html", tmp_path / "run.png", width=900, height=700)
    data = (tmp_path / "run.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    # The header chunk holds width and height, big-endian.
    assert (int.from_bytes(data[16:20]), int.from_bytes(data[20:24])) == (900, 700)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.html", "run.png"]
