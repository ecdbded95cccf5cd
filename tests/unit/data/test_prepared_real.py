"""The traps of two real data sets; skipped where these are not at hand."""

from pathlib import Path

import numpy as np
import pytest
from support.commands import ROOT
from support.samples import prepared

from hybrid.config import RunConfig
from hybrid.config.loading import load_config

REAL = ROOT.parent / "shared" / "data"

pytestmark = pytest.mark.skipif(not REAL.is_dir(), reason="the real data sets are not in ../shared/data")


def config_of(name: str, train: str, *test: str) -> RunConfig:
    quoted = ", ".join(f'"{REAL / path}"' for path in test)
    overrides = [f'data.path=["{REAL / train}"]', f"data.test_path=[{quoted}]"]
    return load_config(ROOT / "configs" / f"{name}.toml", overrides)


def test_adult(tmp_path: Path) -> None:
    config = config_of("adult", "adult/adult.data.gz", "adult/adult.test.gz")
    train, test = prepared(config, tmp_path)
    assert (train.num_samples, test.num_samples) == (32_561, 16_281)
    assert train.report.bad_rows.total == 0
    assert test.report.bad_rows.total == 1
    assert test.report.bad_rows.examples[0].endswith("adult.test.gz:1: 1 column, expected 15")
    assert train.report.labels[0].mean == pytest.approx(7841 / 32_561)
    assert test.report.labels[0].mean == pytest.approx(3846 / 16_281)
    rows = {feature.name: feature.num_rows for feature in train.input_spec.sparse_features}
    assert rows["workclass"] == 1 + 8
    assert rows["native_country"] == 1 + 41
    ids_KB = train.gather(np.arange(32_561), 1).sparse_features.ids_L.view(len(rows), -1)
    assert (ids_KB[0] == 0).sum() == 1836
    assert (ids_KB[1] > 0).all()


def test_criteo(tmp_path: Path) -> None:
    config = config_of("criteo", "criteo/train.csv.gz", "criteo/dev.csv", "criteo/test.csv")
    train, test = prepared(config, tmp_path)
    assert (train.num_samples, test.num_samples) == (7_200, 409 + 391)
    assert train.report.bad_rows.total == test.report.bad_rows.total == 0
    dense_BF = train.gather(np.arange(7_200), 1).dense_features
    assert dense_BF.isfinite().all()
    assert dense_BF.mean(0).abs().max() < 1e-5
