"""The pipeline's table of a report, and its sums in the summary."""

import json

from bagualu import report_html, report_pipeline, report_summary
from bagualu.report_log import read_log, read_logs
from bagualu.run_log import PIPELINE_FIELDS, Totals, step_record

# Per rank and step, in units of 1 ms of a step of 100 ms.
FIELDS = {"overlapped_segments": 6, "serialised_segments": 2, "deferred_passes": 3,
          "undeferred_passes": 0, "compute_ns": 60_000_000, "comm_ns": 40_000_000,
          "comm_beside_ns": 30_000_000, "comm_wait_ns": 10_000_000, "copy_ns": 8_000_000,
          "copy_beside_ns": 7_600_000, "copy_wait_ns": 400_000, "p2p_wait_ns": 25_000_000, "bubble_ns": 4_600_000}


def answer(rank):
    return {"rank": rank, "peak_bytes": (2 + rank) << 20, "predicted_peak_bytes": (2 + rank) << 20,
            "end_bytes": 0, "residencies": {}, "decision_ns": [], "loss": 2.0, "aux_loss": 0.0,
            "z_loss": 0.0, "grad_norm": 1.0, "imbalance": [1.0], "mitigations": [], "stop": False,
            **FIELDS}


def write_log(path, overlap, fields=True):
    run = {"type": "run", "version": 1, "policy": "adaptive", "world_size": 2, "steps": 3, "pp": 2,
           "budget_bytes": None, "pipeline": "dualpipe-v", "stage_layers": [1, 2, 2, 1],
           "overlap": overlap, "ranks": [{"rank": 0, "stages": [0, 3]},
                                         {"rank": 1, "stages": [1, 2]}]}
    if not fields:
        run |= {"pp": 1, "pipeline": "1f1b", "stage_layers": [6]}
    lines = [run]
    for step in range(3):
        answers = [answer(rank) for rank in range(2)]
        if not fields:
            answers = [{k: v for k, v in a.items() if k not in FIELDS} for a in answers]
        lines.append({"type": "step",
                      **step_record(step, answers, 1e-3, ["a"], 1000, 100_000_000)})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_rows_by_rank(tmp_path):
    log = read_log(write_log(tmp_path / "a.jsonl", True))
    rows = report_pipeline.rows(log)
    # two steps without the first: 12 of 16 segments; of 200 ms 80 communicate, 60 of them
    # beside compute; copies take 16, 15.2 of them beside compute
    assert rows[1] == ("1", "1, 2", "3.00 / 3.00 MiB", "12 of 16", "6 of 6", "60.0%",
                       "75.0% of 80 ms", "10.0%", "95.0% of 16 ms", "0.4%", "25.0%", "4.6%")
    assert report_pipeline.title(log) == \
        "dualpipe-v, 2 pipeline rank(s), layers 1 + 2 + 2 + 1, overlap on"
    assert "12 of 16" in report_summary.text_report([log])
    assert "<h2>Pipeline</h2>" in report_html.render([log])


def test_no_table_without_stages_or_pairs(tmp_path):
    log = read_log(write_log(tmp_path / "a.jsonl", False, fields=False))
    assert report_pipeline.rows(log) == [] and "pipeline" not in report_summary.text_report([log])
    assert "<h2>Pipeline</h2>" not in report_html.render([log])


def test_labels_tell_overlap_apart(tmp_path):
    logs = read_logs([write_log(tmp_path / f"{n}.jsonl", n != "b") for n in "abc"])
    assert [log.label for log in logs] == ["adaptive, overlap on (a)", "adaptive, overlap off",
                                           "adaptive, overlap on (c)"]


def test_summary_has_sums_without_the_first_step():
    totals = Totals(2, ([], []))
    for step in range(3):
        totals.add(step_record(step, [answer(0), answer(1)], 1e-3, ["a"], 1000, 100_000_000))
    assert totals.summary("adaptive", None, oom=False)["pipeline"] == {
        name: [2 * FIELDS[name]] * 2 for name in PIPELINE_FIELDS}
