"""The synthetic click log: its seed, its columns, and its true probabilities."""

from pathlib import Path

import numpy as np
import pytest
from support.samples import prepared

from hybrid.config import DataSection, RunConfig
from hybrid.data.encode.feature_encoder import FeatureEncoder
from hybrid.data.prepare import synthetic_log
from hybrid.data.prepare.synthetic_log import TABLE_ROWS, ClickLog


def only_block(log: ClickLog, split: str, rows: int) -> synthetic_log.SyntheticBlock:
    [block] = log.blocks(split, rows)
    return block


def test_log_depends_only_on_the_seed() -> None:
    one, two = only_block(ClickLog(1), "train", 500), only_block(ClickLog(1), "train", 500)
    np.testing.assert_array_equal(one.samples.ids_BK, two.samples.ids_BK)
    np.testing.assert_array_equal(one.samples.dense_BF, two.samples.dense_BF)
    np.testing.assert_array_equal(one.labels_B, two.labels_B)
    for other in (only_block(ClickLog(2), "train", 500), only_block(ClickLog(1), "test", 500)):
        assert (one.samples.ids_BK != other.samples.ids_BK).any()
        assert (one.samples.dense_BF != other.samples.dense_BF).any()


def test_log_has_the_columns_of_criteo(tmp_path: Path) -> None:
    config = RunConfig(data=DataSection(synthetic_rows=70_000))
    train, test = prepared(config, tmp_path)
    assert (train.num_samples, test.num_samples) == (70_000, 11_666)
    assert len(train.input_spec.dense_features) == 13
    assert tuple(feature.num_rows for feature in train.input_spec.sparse_features) == TABLE_ROWS
    batch = train.gather(np.arange(70_000), 70_000)
    ids_KB = batch.sparse_features.ids_L.view(26, -1)
    assert batch.sparse_features.offsets is None
    assert ids_KB.min() == 0
    assert (ids_KB.amax(1).numpy() < np.array(TABLE_ROWS)).all()
    # A half of all ids is in the first eighth of a table: id = rows * u**3.
    assert (ids_KB[-1] < TABLE_ROWS[-1] / 8).float().mean().item() == pytest.approx(0.5, abs=0.01)
    assert train.report.labels[0].mean == pytest.approx(0.25, abs=0.02)
    assert batch.labels.mean().item() == pytest.approx(train.report.labels[0].mean)
    assert 0.78 < (test.report.labels[0].best_auc or 0) < 0.86
    assert (test.report.labels[0].best_log_loss or 1) < 0.45
    assert FeatureEncoder.load(train.folder).input_spec == train.input_spec


def test_true_probabilities_are_calibrated() -> None:
    block = only_block(ClickLog(3), "train", 60_000)
    probabilities = synthetic_log.sigmoid(block.logits_B)
    for part in np.array_split(np.argsort(probabilities), 10):
        assert block.labels_B[part].mean() == pytest.approx(probabilities[part].mean(), abs=0.02)
