"""Cases of pipeline parity, their results, and how they are compared."""

import json
import re
from pathlib import Path

import torch
from job import run_job
from parity_worker import MODEL
from safetensors.torch import load_file

from bagualu.hf import Shard, pieces
from bagualu.layout import make_layout
from bagualu.model_spec import model_from_dict

# Between layouts that sum in another order (experts' rows over another number of ranks): largest
# difference of a gradient over its largest value. Measured: see bench/results.
TOLERANCE = 1e-5
SPEC = model_from_dict(MODEL, "model")


def case(pp: int, ep: int, pipeline: str, overlap: bool, copies: int = 1, **more) -> dict:
    """copies: of each expert, data-parallel."""
    vpp = 2 if pipeline == "interleaved" else 1
    extra = "".join(f" {key} {more[key]}" for key in ("stages", "sequences") if key in more)
    name = f"pp{pp} ep{ep} x{copies} {pipeline}{extra} overlap {'on' if overlap else 'off'}"
    return {"name": re.sub(r"[^a-z0-9-]+", "_", name), "world": pp * ep * copies, "pp": pp, "ep": ep, "vpp": vpp,
            "pipeline": pipeline, "overlap": overlap, **more}


class Results:
    """Of one job. gradients(name): the whole model's, experts of all ranks joined."""

    def __init__(self, folder: Path, cases: list[dict], ranks: int, timeout_s: int = 500) -> None:
        (folder / "cases.json").write_text(json.dumps(cases))
        run_job("parity_worker.py", ranks, folder, timeout_s=timeout_s)
        self.folder = folder
        self.cases = {entry["name"]: entry for entry in cases}
        self.by_rank = [json.loads((folder / f"rank{r}.json").read_text()) for r in range(ranks)]

    def of(self, name: str) -> list[dict]:
        """By rank of the case."""
        return [result for rank in self.by_rank for result in rank if result["name"] == name]

    def loss(self, name: str) -> float:
        return self.of(name)[0]["losses"][0]

    def gradients(self, name: str) -> dict[str, torch.Tensor]:
        entry = self.cases[name]
        layout = make_layout(SPEC.layers, entry["world"], entry["pp"], entry["ep"], entry["vpp"],
                             entry["pipeline"], entry.get("stages", ()))
        files = [load_file(self.folder / f"{name}-{rank}.safetensors")
                 for rank in range(layout.world)]
        whole: dict[str, torch.Tensor] = {}
        for piece in pieces(SPEC):
            holders = [rank for rank in range(layout.world)
                       if Shard.of(SPEC, layout, rank).holds(piece)]
            parts = [piece.view(files[rank], Shard.of(SPEC, layout, rank).first)
                     for rank in holders]
            for part in parts[1:]:  # copies must agree to the bit, or they drift apart
                assert torch.equal(parts[0], part), (name, piece.hf)
            whole[piece.hf] = parts[0]
        return whole


def worst_difference(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]
                     ) -> tuple[float, str]:
    """Largest difference over the largest value of a tensor, and whose; 0.0 if all bits agree."""
    assert found.keys() == wanted.keys()
    worst = (0.0, "")
    for name, reference in wanted.items():
        if not torch.equal(found[name], reference):
            difference = (found[name] - reference).abs().max() / reference.abs().max()
            worst = max(worst, (difference.item(), name))
    return worst
