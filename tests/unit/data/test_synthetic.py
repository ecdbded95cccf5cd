"""The built-in click log: deterministic, in shape, and with a truth that scores as told."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hybrid.config import DataSection, RunConfig
from hybrid.data import synthetic
from hybrid.data.encode import FeatureEncoder
from hybrid.data.prepared import prepare
from hybrid.data.storage import PreparedDataset
from hybrid.data.synthetic import TABLE_ROWS, ClickLog, best_scores


def only_block(log: ClickLog, split: str, rows: int) -> synthetic.SyntheticBlock:
    [block] = log.blocks(split, rows)
    return block


def test_same_seed_same_log() -> None:
    one, two = only_block(ClickLog(1), "train", 500), only_block(ClickLog(1), "train", 500)
    np.testing.assert_array_equal(one.samples.ids_BK, two.samples.ids_BK)
    np.testing.assert_array_equal(one.samples.dense_BF, two.samples.dense_BF)
    np.testing.assert_array_equal(one.labels_B, two.labels_B)
    for other in (only_block(ClickLog(2), "train", 500), only_block(ClickLog(1), "test", 500)):
        assert (one.samples.ids_BK != other.samples.ids_BK).any()
        assert (one.samples.dense_BF != other.samples.dense_BF).any()


def test_the_shape_is_criteos(tmp_path: Path) -> None:
    config = RunConfig(data=DataSection(synthetic_rows=70_000, synthetic_test_rows=10_000))
    folder = prepare(config, tmp_path)
    train, test = (PreparedDataset.open(folder, split) for split in ("train", "test"))
    assert (train.num_samples, test.num_samples) == (70_000, 10_000)
    assert len(train.input_spec.dense_features) == 13
    assert tuple(feature.num_rows for feature in train.input_spec.sparse_features) == TABLE_ROWS
    batch = train.gather(np.arange(70_000), 70_000)
    ids_KB = batch.sparse_features.ids_L.view(26, -1)
    assert batch.sparse_features.offsets is None
    assert ids_KB.min() == 0
    assert (ids_KB.amax(1).numpy() < np.array(TABLE_ROWS)).all()
    # A half of all ids is in the first eighth of a table: id = rows * u**3.
    assert (ids_KB[-1] < TABLE_ROWS[-1] / 8).float().mean().item() == pytest.approx(0.5, abs=0.01)
    assert train.report.positive_fraction == pytest.approx(0.25, abs=0.02)
    assert batch.labels.mean().item() == pytest.approx(train.report.positive_fraction)
    assert test.report.best_auc is not None
    assert 0.78 < test.report.best_auc < 0.86
    assert test.report.best_log_loss is not None
    assert test.report.best_log_loss < 0.45
    assert FeatureEncoder.load(folder).input_spec == train.input_spec


def test_the_truth_is_calibrated_and_products_matter() -> None:
    block = only_block(ClickLog(3), "train", 60_000)
    probabilities = synthetic.sigmoid(block.logits_B)
    for part in np.array_split(np.argsort(probabilities), 10):
        assert block.labels_B[part].mean() == pytest.approx(probabilities[part].mean(), abs=0.02)
    log = ClickLog(3)
    log._factors = [0 * factor for factor in log._factors]
    linear = only_block(log, "train", 60_000)
    best, _ = best_scores(block.labels_B, block.logits_B)
    without, _ = best_scores(block.labels_B, linear.logits_B)
    assert best is not None
    assert without is not None
    assert best - without > 0.05


def test_best_scores() -> None:
    labels = np.array([0, 1, 0, 1], np.uint8)
    assert best_scores(labels, np.array([-1, 1, -2, 2], np.float32))[0] == 1
    assert best_scores(labels, np.array([1, 1, 1, 1], np.float32))[0] == 0.5
    assert best_scores(labels, np.array([0, 1, 2, 3], np.float32))[0] == 0.75
    auc, log_loss = best_scores(np.array([1, 1], np.uint8), np.zeros(2, np.float32))
    assert auc is None
    assert log_loss == pytest.approx(np.log(2))


def test_the_best_log_loss_is_that_of_the_true_probabilities() -> None:
    """Of 3/4 for what is 1, of 1/4 for what is 0, and of 9/10 for what is 0."""
    labels, odds = np.array([1, 0, 0], np.uint8), np.array([3, 1 / 3, 9])
    _, log_loss = best_scores(labels, np.log(odds).astype(np.float32))
    assert log_loss == pytest.approx(-np.log([0.75, 0.75, 0.1]).mean(), rel=1e-6)
