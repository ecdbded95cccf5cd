"""The example in docs/data.md is true."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from support.commands import ROOT, code_block

from hybrid.config.loading import load_config
from hybrid.data.dataset.prepared_dataset import PreparedDataset
from hybrid.data.prepare.preparation import prepare

PAGE = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")


def test_example_of_the_page_is_true(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("clicks.csv").write_text(code_block("docs/data.md", "csv"))
    Path("clicks.toml").write_text(code_block("docs/data.md", "toml"))
    dataset = PreparedDataset(prepare(load_config(Path("clicks.toml")), tmp_path / "cache"), "train")
    table = PAGE[PAGE.index("| row |") :].partition("\n\n")[0]
    heading, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table.split("\n"))
    batch = dataset.gather(np.arange(4), 4)
    sparse, features = batch.sparse_features, dataset.input_spec.sparse_features
    assert sparse.offsets is not None
    assert sparse.weights_L is not None
    shown = {"row": list("1234"), "price": [f"{x:g}" for x in batch.dense_features[:, 0].tolist()]}
    for k, feature in enumerate(features):
        bounds = sparse.offsets[4 * k : 4 * k + 5].tolist()
        words = [
            f"{row} x {weight:g}" if feature.weighted else str(row)
            for row, weight in zip(sparse.ids_L.tolist(), sparse.weights_L.tolist(), strict=True)
        ]
        shown[feature.name] = [", ".join(words[a:b]) for a, b in pairwise(bounds)]
    cross = [int(row) for row in shown.pop("user_item")]
    assert len({*cross}) == 4
    assert all(0 < row < 1000 for row in cross)
    assert heading == list(shown)
    assert rows == [list(row) for row in zip(*shown.values(), strict=True)]
