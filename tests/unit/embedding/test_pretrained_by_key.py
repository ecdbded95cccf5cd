"""First rows by value, out of Parquet: each in the row that the prepared data give its value."""

import dataclasses
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from support.stores import BUCKET, Proxy, Store, sent
from torch import Tensor

from hybrid.data.encode.feature_encoder import FeatureEncoder
from hybrid.data.encode.sparse_encoding import SparseEncoding
from hybrid.data.encode.vocabulary import Vocabulary
from hybrid.embedding.pretrained_by_key import read_rows_by_value
from hybrid.embedding.table_spec import OptimizerSpec, Pooling, TableSpec
from hybrid.errors import DataError, StorageError
from hybrid.storage.remote_path import RemotePath

VALUES = ("7", "b", "c", "d")
VECTORS: dict[Any, list[float]] = {"d": [1.0, 2.0], "new": [9.0, 9.0], "7.0": [3.0, 4.0], "b": [5.0, 6.0]}


def table_of(folder: Path, keys: pa.Array, vectors: pa.Array) -> TableSpec:
    FeatureEncoder((), (SparseEncoding("item", "build", 5, values=Vocabulary.of(VALUES)),)).save(folder)
    path = folder / "rows.parquet"
    pq.write_table(pa.table({"key": keys, "vector": vectors}), path)
    sgd = OptimizerSpec("sgd", 0.1)
    return TableSpec("items", 5, 2, Pooling.SUM, ("item",), sgd, 1.0, initial=str(path), keys=str(folder))


def rows(table: TableSpec, index: int = 0, count: int = 1) -> Tensor:
    out_RD = torch.full((len(range(index, table.num_rows, count)), table.dim), -1.0)
    read_rows_by_value(table, out_RD, index, count)
    return out_RD


@pytest.mark.parametrize("kind", [pa.list_(pa.float32()), pa.list_(pa.float64(), 2)])
def test_rows_by_key_fill_only_rows_of_known_values(tmp_path: Path, kind: Any) -> None:
    several_blocks = 5_000
    keys, vectors = list(VECTORS) * several_blocks, list(VECTORS.values()) * several_blocks
    table = table_of(tmp_path, pa.array(keys), pa.array(vectors, kind))
    whole = torch.tensor([[-1.0, -1], [3, 4], [5, 6], [-1, -1], [1, 2]])
    assert torch.equal(rows(table), whole)
    for count in (2, 3, 5):
        for index in range(count):
            assert torch.equal(rows(table, index, count), whole[index::count])


def test_parquet_file_in_an_object_store_is_read(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = table_of(tmp_path, pa.array(VECTORS), pa.array(VECTORS.values()))
    there = sent(tmp_path, RemotePath(f"s3://{BUCKET}", tmp_path.name))
    far = dataclasses.replace(table, initial=f"{there}/rows.parquet")
    assert torch.equal(rows(far), rows(table))
    with pytest.raises(DataError, match=rf"{there}/none: cannot be read as rows of a table: .*No such file"):
        rows(dataclasses.replace(table, initial=f"{there}/none"))
    with Proxy(store) as proxy:
        proxy.plan = lambda method, path: "403"
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{proxy.address}")
        with pytest.raises(StorageError, match="to credentials that may do this"):
            rows(far)


def test_keys_may_be_numbers_and_the_last_vector_counts(tmp_path: Path) -> None:
    table = table_of(tmp_path, pa.array([7, 8, 7, None]), pa.array([[1.0, 1], [2, 2], [3, 3], [4, 4]]))
    assert rows(table).tolist() == [[-1, -1], [3, 3], [-1, -1], [-1, -1], [-1, -1]]


@pytest.mark.parametrize(
    ("keys", "vectors", "message"),
    [
        (["b", "c"], [[1.0, 2], [1]], "the vector of row 2 has 1 numbers"),
        (["b", "c"], [[1.0, 2], None], "the vector of row 2 has 0 numbers"),
        (["b"], [[1.0, float("nan")]], "the vector of row 1 is not finite"),
        (["b"], [[1.0, None]], "the vector of row 1 is not finite"),
        (["x", "y"], [[1.0, 2], [3, 4]], "none of its 2 values .* column item"),
        (["b"], ["text"], "its second column holds string"),
        (["b"], [["1", "x"]], "its second column holds list<.*string>"),
    ],
)
def test_invalid_vectors_or_keys_are_refused(
    tmp_path: Path, keys: list[str], vectors: list[Any], message: str
) -> None:
    table = table_of(tmp_path, pa.array(keys), pa.array(vectors))
    with pytest.raises(DataError, match=f"^{table.initial}: {message}"):
        rows(table)


def test_other_or_missing_files_are_refused(tmp_path: Path) -> None:
    table = table_of(tmp_path, pa.array(["b"]), pa.array([[1.0, 2.0]]))
    pq.write_table(pa.table({"a": [1]}), table.initial)
    with pytest.raises(DataError, match="has 1 columns"):
        rows(table)
    Path(table.initial).write_text("none")
    with pytest.raises(DataError, match="cannot be read as rows of a table"):
        rows(table)
    with pytest.raises(DataError, match="cannot be read as rows of a table"):
        rows(dataclasses.replace(table, initial=str(tmp_path / "nowhere.parquet")))
