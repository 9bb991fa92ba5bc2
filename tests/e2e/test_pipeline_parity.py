"""Same numbers under every order of passes, cut into stages, overlap, residencies and budgets.

The full matrix is scripts/parity_matrix; here are the cases that share the least.
"""

import pytest
from parity import Results, case, worst_difference

RUNS = 2
ONE_STAGE = {ep: case(1, ep, "1f1b", False, runs=RUNS) for ep in (1, 2)}
CASES = [
    *ONE_STAGE.values(),
    case(1, 2, "1f1b", True, runs=RUNS), case(1, 2, "dualpipe-v", True, runs=RUNS),
    case(2, 2, "1f1b", False, runs=RUNS), case(2, 2, "1f1b", True, runs=RUNS),
    case(2, 2, "zb-h1", False, runs=RUNS), case(2, 2, "zb-h1", True, runs=RUNS),
    case(2, 2, "interleaved", True, runs=RUNS), case(2, 2, "dualpipe-v", True, runs=RUNS),
    case(4, 1, "1f1b", True, runs=RUNS, stages=[1, 3, 3, 1]), case(4, 1, "zb-h1", True, runs=RUNS)]
# One micro-batch: every pipeline is all bubble, and nothing has a partner.
ONE_MICROBATCH = [case(1, 1, "1f1b", False, runs=RUNS, sequences=2),
                  case(2, 1, "dualpipe-v", True, runs=RUNS, sequences=2),
                  case(4, 1, "interleaved", True, runs=RUNS, sequences=2)]
EVERY = CASES + ONE_MICROBATCH


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return Results(tmp_path_factory.mktemp("parity"), EVERY, ranks=4)


@pytest.mark.parametrize("entry", EVERY, ids=lambda entry: entry["name"])
def test_residencies_and_budgets_change_no_bit(results, entry):
    for rank in results.of(entry["name"]):
        assert rank["runs"] == RUNS and rank["different"] == []


@pytest.mark.parametrize("entry", EVERY, ids=lambda entry: entry["name"])
def test_bytes_are_predicted_and_given_back(results, entry):
    for rank in results.of(entry["name"]):
        assert rank["unaccounted"] == 0
        assert len(rank["end_bytes"]) == 1 and rank["end_bytes"][0][1] == 0
        errors = [(predicted - measured) / measured for predicted, measured in rank["peaks"]]
        assert min(errors) >= 0 and max(errors) <= 0.005


@pytest.mark.parametrize("entry", EVERY, ids=lambda entry: entry["name"])
def test_stages_orders_and_overlap_change_no_bit_of_a_gradient(results, entry):
    one_stage = ONE_MICROBATCH[0] if entry in ONE_MICROBATCH else ONE_STAGE[entry["ep"]]
    assert worst_difference(results.gradients(entry["name"]),
                            results.gradients(one_stage["name"])) == (0.0, "")
    assert results.loss(entry["name"]) == results.loss(one_stage["name"])
