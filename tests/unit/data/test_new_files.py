"""Files of new rows become numbers as those of the training did."""

from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch
from support.samples import csv_config, prepared, whole, write, write_cities

from hybrid.config import DataSection, RunConfig
from hybrid.data.dataset.prepared_dataset import PreparedDataset
from hybrid.data.encode.feature_encoder import FeatureEncoder
from hybrid.data.prepare.new_rows import encode_files
from hybrid.data.prepare.preparation import prepare
from hybrid.data.values import features
from hybrid.errors import ConfigError, DataError
from hybrid.input_spec import FeatureSpec, InputSpec

NO_MEMORY = r"^out of memory while preparing the data: give it more, set data\.prepare_memory_gb lower, or "
config_of = partial(csv_config, dense=("x",), sparse=("city", "tags"))


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return write_cities(tmp_path / "train.csv", 1000)


def test_new_files_are_encoded_as_the_training_rows_were(tmp_path: Path, table: Path) -> None:
    config = config_of(table, test_fraction=0.0)
    train, _ = prepared(config, tmp_path / "cache")
    again = encode_files(config, [str(table)], FeatureEncoder.load(train.folder), tmp_path / "again")
    left, right = whole(train), whole(again)
    assert torch.equal(left.dense_features, right.dense_features)
    assert torch.equal(left.sparse_features.ids_L, right.sparse_features.ids_L)
    assert torch.equal(left.labels, right.labels)


def test_prediction_needs_no_labels_and_knows_which_rows_were_usable(tmp_path: Path, table: Path) -> None:
    config = config_of(table, numeric_scaling="none")
    encoder = FeatureEncoder.load(prepare(config, tmp_path / "cache"))
    text = "tags,city,x\nt0,c1,1\nbroken\nt0,nowhere,3\n" + "t0,c1,9\n" * 20
    new = write(tmp_path / "new.csv", text)
    dataset = encode_files(config, [str(new)], encoder, tmp_path / "new", with_labels=False)
    assert dataset.source_rows[:3].tolist() == [0, 2, 3]
    assert dataset.report.labels == ()
    batch = dataset.gather(np.array([0, 1]), 2)
    assert batch.dense_features.tolist() == [[1], [3]]
    assert batch.labels.isnan().all()
    assert batch.sparse_features.ids_L[1] == 0


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_model_that_was_not_trained_on_files_takes_files_of_rows(kind: str, tmp_path: Path) -> None:
    """Also where pandas has made floats of a column of integers, since one was missing."""
    file = write(tmp_path / "new.csv", "price,item,tags\n0.5,7.0,1|3\n2.0,99.0,\n")
    if kind == "parquet":
        table, file = pyarrow.csv.read_csv(file), tmp_path / "new.parquet"
        pq.write_table(table, file)
    spec = InputSpec(("price",), (FeatureSpec("item", 50), FeatureSpec("tags", 8, multi_hot=True)))

    def encoded(separator: str) -> PreparedDataset:
        config = RunConfig(data=DataSection(multi_hot_separator=separator))
        encoder = FeatureEncoder.of_rows(spec)
        return encode_files(config, [str(file)], encoder, tmp_path / f"new{separator}", with_labels=False)

    dataset = encoded("|")
    dense, sparse, *_ = whole(dataset)
    assert dense.flatten().tolist() == [0.5, 2.0]
    assert sparse.ids_L.tolist() == [7, 0, 1, 3]  # 99 is no row: unknown
    assert dataset.report.unknown[0].count == 1
    if kind == "csv":
        with pytest.raises(
            ConfigError, match=r"^data.multi_hot_separator: must be set .* tags holds several"
        ):
            encoded("")


def test_memory_that_arrow_does_not_get(tmp_path: Path, table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def starve(*args: object) -> None:
        raise pa.ArrowMemoryError("malloc of size 9 failed")

    monkeypatch.setattr(features, "values", starve)
    encoder = FeatureEncoder.of_rows(InputSpec(("x",), (FeatureSpec("city", 9),)))
    with pytest.raises(DataError, match=NO_MEMORY):
        encode_files(config_of(table), [str(table)], encoder, tmp_path / "new")
