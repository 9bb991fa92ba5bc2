"""Recorded routing: every line is checked against the model and the layout."""

import gzip

import pytest

from bagualu.errors import InvalidInput
from bagualu.model_spec import ModelSpec
from bagualu.routing_trace import read_trace

# EP 2, T = 4, k = 2: sums are 16, each count at most 8.
SPEC = ModelSpec(layers=3, dense_layers=[0], experts=4, top_k=2)
GOOD = ["# a comment", "run,0,0,0,8 8 0 0", "run,0,0,1,4 4 4 4", "run,7,0,0,0 0 8 8",
        "run,7,0,1,5 3 5 3"]


def read(path):
    return read_trace(path, SPEC, ep_size=2, tokens=4)


def write(tmp_path, lines, name="t.csv"):
    path = tmp_path / name
    text = ("\n".join(lines) + "\n").encode()
    path.write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    return path


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz"])
def test_csv(tmp_path, name):
    trace = read(write(tmp_path, GOOD, name))
    assert trace.routing(1, 2, SPEC) == [[[], [0, 0, 8, 8], [5, 3, 5, 3]]] * 2
    assert trace.routing(2, 1, SPEC) == [[[], [8, 8, 0, 0], [4, 4, 4, 4]]]  # wraps round


def test_json_lines(tmp_path):
    lines = ['{"step":0,"micro_batch":0,"layer":0,"counts":[8,8,0,0]}',
             '{"step":0,"micro_batch":0,"layer":1,"counts":[4,4,4,4]}']
    assert len(read(write(tmp_path, lines, "t.jsonl")).counts) == 1


@pytest.mark.parametrize("lines, named", [
    (["run,0,0,0,9 7 0 0"], "line 1.*count of 9"),
    (["run,0,0,0,8 7 0 0"], "line 1.*sum of 15"),
    (["run,0,0,0,8 8 0"], "line 1.*3 counts"),
    (["run,0,0,0,-1 8 8 1"], "line 1.*count of -1"),
    (["run,0,0,2,8 8 0 0"], "line 1.*layer 2"),
    (["run,0,0,x,8 8 0 0"], "line 1"),
    (["run,0,0,0"], "line 1"),
    (GOOD + ["run,7,0,1,5 3 5 3"], "line 6.*again"),
    (GOOD[:-1], "step 7.*1 layers"),
    (["# nothing"], "rows"),
])
def test_bad_rows_name_their_line(tmp_path, lines, named):
    with pytest.raises(InvalidInput, match=named):
        read(write(tmp_path, lines))


@pytest.mark.parametrize("line", ["{", "[]", '{"step":0}', '{"step":"0","micro_batch":0,'
                                  '"layer":0,"counts":[8,8,0,0]}'])
def test_bad_json_lines(tmp_path, line):
    with pytest.raises(InvalidInput, match="line 1"):
        read(write(tmp_path, [line], "t.jsonl"))


def test_truncated_gzip(tmp_path):
    path = write(tmp_path, GOOD, "t.csv.gz")
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(InvalidInput, match="gzip"):
        read(path)
