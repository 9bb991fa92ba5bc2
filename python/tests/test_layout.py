"""Which rank holds what, for every order of passes; and the layouts that are refused."""

from dataclasses import replace

import pytest
from helpers import write_model, write_text

from bagualu import launch
from bagualu.distributed import group_members
from bagualu.hf import Shard, pieces
from bagualu.layout import default_stage_layers, make_layout
from bagualu.model_spec import ModelSpec
from bagualu.train_args import PIPELINES, parse

SPEC = ModelSpec(layers=7, hidden=16, heads=2, kv_heads=1, head_dim=16, vocab=256, experts=4, top_k=2,
                 expert_ffn=16, dense_layers=[0], dense_ffn=16)


def test_ranks_of_a_stage_are_neighbours():
    # 8 ranks, 2 stages: 0-3 and 4-7; blocks of 2 share their experts
    layout = make_layout(7, world=8, pp=2, ep=2)
    assert [layout.pp_rank(r) for r in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [layout.dp_rank(r) for r in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [layout.ep_rank(r) for r in range(8)] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert group_members(layout, True) == {
        "ep": [[0, 1], [2, 3], [4, 5], [6, 7]], "dp": [[0, 1, 2, 3], [4, 5, 6, 7]],
        "edp": [[0, 2], [1, 3], [4, 6], [5, 7]], "pp": [[0, 4], [1, 5], [2, 6], [3, 7]],
        "world": [[0, 1, 2, 3, 4, 5, 6, 7]], "embedding": [[0, 4], [1, 5], [2, 6], [3, 7]]}


def test_one_stage_has_the_groups_it_always_had():
    assert group_members(make_layout(7, world=4, ep=2), False) == {
        "ep": [[0, 1], [2, 3]], "dp": [[0, 1, 2, 3]], "edp": [[0, 2], [1, 3]],
        "pp": [[0], [1], [2], [3]], "world": [[0, 1, 2, 3]], "embedding": []}


@pytest.mark.parametrize("layers, stages, split", [
    # the last stage is lighter, then the first, then those behind it
    (8, 4, (2, 2, 2, 2)), (7, 4, (2, 2, 2, 1)), (6, 4, (1, 2, 2, 1)), (5, 4, (1, 1, 2, 1)),
    (5, 2, (3, 2)), (3, 3, (1, 1, 1)), (3, 1, (3,))])
def test_default_split(layers, stages, split):
    assert default_stage_layers(layers, stages) == split


def test_interleaved_ranks_hold_every_pp_th_stage():
    # 2 ranks x 2: stages of 2, 2, 2, 1 layers
    layout = make_layout(7, world=2, pp=2, vpp=2, pipeline="interleaved")
    assert (layout.stages_of(0), layout.stages_of(1)) == ([0, 2], [1, 3])
    assert (layout.layers_of(0), layout.layers_of(1)) == ([0, 1, 4, 5], [2, 3, 6])
    assert layout.has_embedding(0) and layout.has_head(1)
    assert layout.name_of(1) == "rank 1 (stages 1 and 3)"


def test_v_shape_turns_round_on_the_last_rank():
    layout = make_layout(7, world=2, pp=2, pipeline="dualpipe-v", stage_layers=(1, 3, 2, 1))
    assert (layout.stages_of(0), layout.stages_of(1)) == ([0, 3], [1, 2])
    assert (layout.layers_of(0), layout.layers_of(1)) == ([0, 6], [1, 2, 3, 4, 5])
    assert layout.has_embedding(0) and layout.has_head(0) and not layout.has_head(1)
    assert group_members(layout, True)["embedding"] == [[0]]  # one rank has both ends


@pytest.mark.parametrize("pipeline, copies", [("1f1b", 2), ("dualpipe-v", 1)])
def test_a_tied_head_keeps_a_copy_where_the_embedding_is_not(pipeline, copies):
    tied = replace(SPEC, tied_embeddings=True)
    layout = make_layout(SPEC.layers, 2, pp=2, pipeline=pipeline)
    shards = [Shard.of(tied, layout, rank) for rank in range(2)]
    names = {piece.native: piece for piece in pieces(tied)}
    assert "lm_head" not in names
    assert sum(shard.holds(names["embed_tokens"]) for shard in shards) == copies


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("pp, ep, copies", [(1, 1, 1), (1, 2, 2), (3, 1, 2), (2, 4, 1), (3, 2, 2)])
def test_every_tensor_has_an_owner_per_copy(pipeline, pp, ep, copies):
    vpp = 2 if pipeline == "interleaved" else 1
    layout = make_layout(SPEC.layers, pp * ep * copies, pp, ep, vpp, pipeline)
    shards = [Shard.of(SPEC, layout, rank) for rank in range(layout.world)]
    for piece in pieces(SPEC):
        holders = [rank for rank, shard in enumerate(shards) if shard.holds(piece)]
        # an expert is on one rank of every block, anything else on all ranks of one pipeline rank
        assert len(holders) == (copies if piece.expert is not None else ep * copies), piece
        assert len({layout.pp_rank(rank) for rank in holders}) == 1, piece
    assert all(Shard.whole(SPEC).holds(piece) for piece in pieces(SPEC))


# flags besides --nproc 4 for a model of 2 layers and 4 experts, and what the message must name
REFUSED = [
    (["--pp", "3"], "--pp: found 3; allowed a divisor of the 4 ranks"),
    (["--pp", "0"], "--pp: found '0'"),
    (["--pp", "2", "--ep", "4"], "--ep: found 4; allowed a divisor of the 2 ranks of a stage"),
    (["--pp", "4"], "--pp: found 4 stages; allowed at most one stage per layer (2)"),
    (["--pp", "2", "--pipeline", "dualpipe-v"], "--pp: found 4 stages"),
    (["--pp", "2", "--stages", "1"], "--stages: found 1 stages; allowed 2: --pp 2 with 1 per rank"),
    (["--pp", "2", "--stages", "1,2"], "--stages: found 1+2 = 3 layers; allowed counts that add up"),
    (["--pp", "2", "--stages", "0,2"], "--stages: found 0; allowed at least 1 layer"),
    (["--pp", "2", "--stages", "1,x"], "--stages: found '1,x'"),
    (["--pp", "2", "--vpp", "2", "--pipeline", "zb-h1"],
     "--vpp: found 2 with --pipeline zb-h1; allowed 1, or --pipeline interleaved"),
    (["--pp", "1", "--vpp", "2", "--pipeline", "dualpipe-v"], "always has 2 stages per rank"),
    (["--pp", "2", "--pipeline", "interleaved"], "--vpp: found 1; allowed at least 2"),
    (["--pipeline", "gpipe"], "--pipeline: found 'gpipe'; allowed 1f1b, interleaved, zb-h1"),
    (["--overlap", "yes"], "--overlap: found 'yes'; allowed on, off"),
    (["--slow-link", "50MB/s"], "--slow-link: found one expert-parallel rank"),
    (["--ep", "2", "--slow-link", "fast"], "--slow-link: found 'fast'; allowed RATE[,LATENCY]"),
    (["--ep", "2", "--slow-link", "50MB/s,200"], "--slow-link: found '50MB/s,200'"),
    (["--ep", "2", "--slow-link", "0KB/s"], "--slow-link: found '0KB/s'"),
    (["--deadline", "0"], "--deadline: found '0'"),
    (["--trace-step", "3"], "--trace-step: found no --log"),
    (["--trace-step", "-1", "--log", "x"], "--trace-step"),
]


@pytest.mark.parametrize("flags, message", REFUSED, ids=lambda x: " ".join(x) if
                         isinstance(x, list) else "")
def test_refused(tmp_path, capfd, flags, message):
    argv = ["train", "--model", str(write_model(tmp_path)), "--data", str(write_text(tmp_path)),
            "--nproc", "4", *flags]
    assert launch.main(argv) == 2
    err = capfd.readouterr().err
    assert message in err and err.count("\n") == 1


def options_of(tmp_path, *flags):
    from bagualu.preflight import preflight
    args = parse(["--model", str(write_model(tmp_path, layers=4)),
                  "--data", str(write_text(tmp_path)), *flags])
    job = preflight(args, args.nproc, thorough=False)
    return job.trainer_options(1), job


def test_what_the_trainer_is_told(tmp_path):
    options, _ = options_of(tmp_path, "--nproc", "4")
    assert {key: options[key] for key in ("pp_size", "virtual_per_rank", "stage_layers", "pipeline",
                                          "overlap", "link_bytes_per_s", "deadline_s")} == {
        "pp_size": 1, "virtual_per_rank": 1, "stage_layers": [4], "pipeline": "1f1b",
        "overlap": False, "link_bytes_per_s": 0, "deadline_s": 30}
    options, job = options_of(tmp_path, "--nproc", "4", "--pp", "2", "--ep", "2", "--vpp", "2",
                              "--slow-link", "50MB/s,0.2ms", "--deadline", "5")
    assert {key: options[key] for key in ("pp_size", "virtual_per_rank", "stage_layers", "pipeline",
                                          "overlap", "link_bytes_per_s", "link_latency_us",
                                          "deadline_s")} == {
        "pp_size": 2, "virtual_per_rank": 2, "stage_layers": [1, 1, 1, 1],
        "pipeline": "interleaved", "overlap": True, "link_bytes_per_s": 5e7,
        "link_latency_us": 200.0, "deadline_s": 5}
    assert job.position(3).pp_size == 2
