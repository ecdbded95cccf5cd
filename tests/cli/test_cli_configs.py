"""The shipped configurations: each trains a good model, on real data where that is at hand."""

from pathlib import Path
from typing import Any

import pytest
from support.commands import ROOT, output_of, result_of, settings

DATA = ROOT.parent / "shared" / "data"
ADULT = {"path": DATA / "adult" / "adult.data.gz", "test_path": DATA / "adult" / "adult.test.gz"}
CRITEO = {"path": DATA / "criteo" / "train.csv.gz", "test_path": DATA / "criteo" / "test.csv"}


def needs(files: dict[str, Path]) -> pytest.MarkDecorator:
    missing = [str(path) for path in files.values() if not path.exists()]
    return pytest.mark.skipif(bool(missing), reason=f"real data not here: {', '.join(missing)}")


def launch(name: str, tmp_path: Path, **sections: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Run ``configs/NAME.toml`` with some keys replaced; what it prints, and its result."""
    overrides = settings(run={"folder": tmp_path / "run"}, **sections)
    said = output_of(["launch", "--config", ROOT / "configs" / f"{name}.toml", *overrides], tmp_path)
    return said, result_of(tmp_path / "run")


@pytest.mark.long
def test_default(tmp_path: Path) -> None:
    rows = {"synthetic_rows": 20_000}
    _, result = launch("default", tmp_path, data=rows, train={"batch_size": 500})
    assert result["steps"] == 40
    assert 0.7 < result["auc"] < result["best_reachable_auc"]


@pytest.mark.long
@needs(CRITEO)
def test_criteo(tmp_path: Path) -> None:
    _, result = launch("criteo", tmp_path, data=dict(CRITEO))
    assert result["num_samples"] == 391
    assert result["auc"] > 0.65


@pytest.mark.long
@needs(ADULT)
def test_adult_reaches_the_published_accuracy(tmp_path: Path) -> None:
    # Two of the file's five epochs reach it.
    said, result = launch("adult", tmp_path, data=dict(ADULT), train={"epochs": 2})
    assert (result["num_samples"], result["bad_rows"]) == (16_281, 1)
    assert "adult.test.gz:1: " in said
    assert result["auc"] >= 0.90
