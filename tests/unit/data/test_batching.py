"""A block of rows as a batch is what prepared data give of the same rows."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from support.trained import clicks_config, shop_config

from hybrid.config import RunConfig
from hybrid.data.dataset.prepared_dataset import PreparedDataset, unlabeled_batch
from hybrid.data.encode.feature_encoder import FeatureEncoder
from hybrid.data.parse.sources import Source
from hybrid.data.prepare.preparation import prepare


@pytest.mark.parametrize("make", [clicks_config, shop_config], ids=["clicks", "shop"])
def test_a_block_is_the_batch_of_its_rows(tmp_path: Path, make: Callable[..., RunConfig]) -> None:
    config = make(tmp_path, data={"test_fraction": 0})
    folder = prepare(config, tmp_path / "prepared")
    encoder, dataset = FeatureEncoder.load(folder), PreparedDataset.open(folder, "train")
    files = tuple(map(Path, config.data.path))
    (block,) = Source(files, config.data, tasks=config.tasks, columns=config.columns).blocks()
    found = unlabeled_batch(encoder.encode(block), encoder.input_spec)
    expected = dataset.gather(np.arange(dataset.num_samples), dataset.num_samples)
    assert torch.equal(found.dense_features, expected.dense_features)
    assert found.labels.isnan().all()
    assert found.sparse_features.num_features == expected.sparse_features.num_features
    for ours, theirs in zip(found.sparse_features[:3], expected.sparse_features[:3], strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert torch.equal(ours, theirs)
    assert (found.sparse_features.weights_L is not None) == (make is shop_config)
