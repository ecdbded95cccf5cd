"""The shipped configurations: each trains a good model, on real data if they are present."""

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
    """Run ``configs/NAME.toml`` with some keys replaced; return its output and its result."""
    overrides = settings(run={"folder": tmp_path / "run"}, **sections)
    printed = output_of(["launch", "--config", ROOT / "configs" / f"{name}.toml", *overrides], tmp_path)
    return printed, result_of(tmp_path / "run")


@pytest.mark.long
@needs(CRITEO)
def test_criteo_sample_reaches_an_auc(tmp_path: Path) -> None:
    _, result = launch("criteo", tmp_path, data=dict(CRITEO))
    assert result["num_samples"] == 391
    assert result["auc"] > 0.65


@pytest.mark.long
@needs(ADULT)
def test_adult_reaches_the_published_accuracy(tmp_path: Path) -> None:
    # Two of the five epochs of the configuration suffice.
    printed, result = launch("adult", tmp_path, data=dict(ADULT), train={"epochs": 2})
    assert (result["num_samples"], result["bad_rows"]) == (16_281, 1)
    assert "adult.test.gz:1: " in printed
    assert result["auc"] >= 0.90
