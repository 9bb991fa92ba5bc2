"""The golden config.json files are what this transformers writes and counts."""

import json

import pytest

pytest.importorskip("transformers")
import hf_golden  # noqa: E402  (needs transformers)


@pytest.mark.parametrize("name", ["published", *hf_golden.VARIED])
def test_golden_files_hold_what_transformers_counts(name):
    rows = list(hf_golden.published_rows() if name == "published" else hf_golden.varied_rows(name))
    written = (hf_golden.FOLDER / f"{name}.jsonl").read_text(encoding="utf-8")
    for made, line in zip(rows, written.splitlines(), strict=True):
        # Key by key, so that a failure shows one: the text is compared below.
        assert made == json.loads(line), made["name"]
    assert hf_golden.text_of(rows) == written


def test_every_family_has_a_file():
    assert {path.stem for path in hf_golden.FOLDER.glob("*.jsonl")} == \
        {"published", *hf_golden.VARIED}
