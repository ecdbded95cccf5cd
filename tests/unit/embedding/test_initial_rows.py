"""Initial rows: random, or pretrained by position and by key."""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file
from support.stores import sent
from torch import Tensor

from hybrid.data.encode.feature_encoder import FeatureEncoder, SparseEncoding
from hybrid.data.values.vocabulary import Vocabulary
from hybrid.embedding.initial_rows import fill_random_rows, read_initial_rows
from hybrid.embedding.stored_matrix import make_absolute, read_shape
from hybrid.embedding.table_spec import OptimizerSpec, Pooling, TableSpec
from hybrid.errors import DataError, StorageError
from hybrid.storage.remote_path import RemotePath

SGD = OptimizerSpec("sgd", 0.1)


def random_rows(
    num_rows: int, dim: int, seed: int = 1, table: str = "t", shard: Any = (0, 1), init: str = "uniform"
) -> Tensor:
    out_RD = torch.empty(num_rows, dim)
    spec = TableSpec(table, num_rows, dim, Pooling.SUM, (table,), SGD, 1.0, init=init)
    fill_random_rows(out_RD, spec, seed, *shard)
    return out_RD


@pytest.mark.parametrize(
    ("init", "probability", "variance", "most"),
    [("uniform", lambda x: (x + 1) / 2, 1 / 3, 1.0), ("normal", torch.special.ndtr, 1.0, 9.0)],
)
def test_initial_rows_have_their_distribution(
    init: str, probability: Callable[[Tensor], Tensor], variance: float, most: float
) -> None:
    values_N = random_rows(50_000, 4, init=init).flatten().double().sort().values
    size = len(values_N)
    assert values_N.abs().max() <= most
    assert abs(values_N.mean()) < 4 * (variance / size) ** 0.5
    assert values_N.var() == pytest.approx(variance, rel=0.01)
    # Kolmogorov-Smirnov distance to the distribution; a true sample exceeds this once in 10^5.
    ranks_N = (torch.arange(size, dtype=torch.float64) + 0.5) / size
    assert (probability(values_N) - ranks_N).abs().max() < 2.5 / size**0.5


@pytest.mark.parametrize("init", ["uniform", "normal"])
@pytest.mark.parametrize("count", [2, 3, 7])
def test_shards_have_the_rows_of_the_whole(count: int, init: str) -> None:
    whole = random_rows(300, 500, init=init)  # more than a block
    for index in range(count):
        expected = whole[index::count]
        assert torch.equal(random_rows(len(expected), 500, shard=(index, count), init=init), expected)


def test_initial_rows_do_not_change_between_versions() -> None:
    """A run resumed or compared across versions starts from the same table."""
    golden = torch.tensor([[0.4437623, -0.64767766], [0.20472872, 0.79591775]])
    torch.testing.assert_close(random_rows(2, 2, seed=42, table="C1"), golden, rtol=0, atol=0)


ROWS_RD = torch.arange(21.0).view(7, 3)


def read_rows(source: str, out_RD: Tensor, index: int = 0, count: int = 1, num_rows: int = 7) -> None:
    table = TableSpec("t", num_rows, out_RD.shape[1], Pooling.SUM, ("t",), SGD, 1.0, initial=source)
    read_initial_rows(table, {"weight": out_RD}, index, count)


def write_rows(folder: Path, kind: str) -> str:
    """Return the source of a file with these rows."""
    file = folder / f"rows.{kind.partition('#')[0]}"
    if kind == "npy":
        np.save(file, ROWS_RD.numpy())
    elif kind == "safetensors":
        save_file({"weight": ROWS_RD.bfloat16()}, file)
    else:
        save_file({"a": ROWS_RD.double(), "b": torch.zeros(2)}, file)
        return f"{file}#a"
    return str(file)


@pytest.mark.parametrize("kind", ["npy", "safetensors", "safetensors#a"])
@pytest.mark.parametrize(("index", "count"), [(0, 1), (0, 2), (1, 2), (2, 3), (6, 7)])
def test_a_worker_reads_the_rows_of_its_shard(kind: str, index: int, count: int, tmp_path: Path) -> None:
    source, expected = write_rows(tmp_path, kind), ROWS_RD[index::count]
    out_RD = torch.full(expected.shape, torch.nan)
    read_rows(source, out_RD, index, count)
    assert read_shape(source) == (7, 3)
    assert torch.equal(out_RD, expected)


def test_a_file_of_several_blocks_is_read_whole(tmp_path: Path) -> None:
    rows_RD = np.arange(3 * 2**20, dtype=np.float16).reshape(-1, 1)
    np.save(tmp_path / "rows.npy", rows_RD)
    out_RD = torch.empty(len(rows_RD), 1, dtype=torch.float16)
    read_rows(str(tmp_path / "rows.npy"), out_RD, num_rows=len(rows_RD))
    assert np.array_equal(out_RD.numpy(), rows_RD, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_values_may_be_big_endian(dtype: torch.dtype, tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", ROWS_RD.numpy().astype(">f4"))
    out_RD = torch.empty(ROWS_RD.shape, dtype=dtype)
    read_rows(str(tmp_path / "rows.npy"), out_RD)
    assert torch.equal(out_RD, ROWS_RD.to(dtype))


@pytest.mark.parametrize("kind", ["npy", "safetensors", "safetensors#a"])
def test_file_in_an_object_store_is_fetched(there: RemotePath, kind: str, tmp_path: Path) -> None:
    source = make_absolute(write_rows(tmp_path, kind).replace(str(tmp_path), str(there)))
    sent(tmp_path, there)
    out_RD = torch.empty(3, 3)
    read_rows(source, out_RD, 1, 2)
    assert (read_shape(source), out_RD.tolist()) == ((7, 3), ROWS_RD[1::2].tolist())
    with pytest.raises(StorageError, match=r"^s3://no-such-bucket/a\.npy: "):
        read_shape("s3://no-such-bucket/a.npy")
    with pytest.raises(DataError, match=rf"^{there}/none\.npy: "):
        read_shape(f"{there}/none.npy")


def wrong(folder: Path, tensors: dict[str, Tensor]) -> str:
    save_file(tensors, folder / "wrong.safetensors")
    return str(folder / "wrong.safetensors")


@pytest.mark.parametrize(
    ("tensors", "name", "message"),
    [
        ({"a": torch.zeros(3)}, "", r"\[3\]"),
        ({"a": torch.zeros(0, 3)}, "", r"\[0, 3\]"),
        ({"a": torch.zeros(2, 3, dtype=torch.int64)}, "", "holds int64"),
        ({"a": torch.zeros(2, 3, dtype=torch.float8_e4m3fn)}, "", r"wrong\.safetensors: "),
        ({"a": torch.zeros(2, 3), "b": torch.zeros(2)}, "", "''.* #a, #b$"),
        ({"a": torch.zeros(2, 3)}, "#c", "'c'.* #a$"),
    ],
)
def test_only_a_matrix_is_read(tensors: dict[str, Tensor], name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        read_shape(wrong(tmp_path, tensors) + name)


def test_missing_or_unreadable_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.npy").write_text("x")
    (tmp_path / "empty.npy").touch()
    (tmp_path / "text.safetensors").write_text("x")
    np.savez(tmp_path / "a.npz", a=np.zeros((2, 3)))
    (tmp_path / "a.npz").rename(tmp_path / "archive.npy")
    np.save(tmp_path / "wide.npy", np.zeros((2, 3), np.longdouble))
    np.save(tmp_path / "complex.npy", np.zeros((2, 3), np.complex64))
    for name, shape in (("negative.npy", (-2, 3)), ("huge.npy", (1 << 62, 3))):
        with (tmp_path / name).open("wb") as file:
            header = {"descr": "<f4", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            file.write(bytes(24))
    with (tmp_path / "header.safetensors").open("wb") as file:
        file.write((95 << 20).to_bytes(8, "little"))
        file.truncate(100 << 20)
    names = ("none.npy", "none.safetensors", "text.npy", "text.safetensors", "archive.npy", "wide.npy")
    for name in (*names, "empty.npy", "complex.npy", "negative.npy", "huge.npy", "header.safetensors"):
        with pytest.raises(DataError, match=f"^{tmp_path}/{name}: "):
            read_shape(str(tmp_path / name))


@pytest.mark.parametrize("kind", ["npy", "safetensors"])
def test_a_file_may_be_a_link_but_no_fifo(kind: str, tmp_path: Path) -> None:
    (tmp_path / f"link.{kind}").symlink_to(write_rows(tmp_path, kind))
    assert read_shape(str(tmp_path / f"link.{kind}")) == (7, 3)
    os.mkfifo(tmp_path / f"fifo.{kind}")
    with pytest.raises(StorageError, match=rf"^{tmp_path}/fifo\.{kind}: "):
        read_shape(str(tmp_path / f"fifo.{kind}"))


def test_a_file_that_has_changed_its_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="7 x 3 values"):
        read_rows(write_rows(tmp_path, "npy"), torch.zeros(8, 3), num_rows=8)


VALUES = ("7", "b", "c", "d")
VECTORS: dict[Any, list[float]] = {"d": [1.0, 2.0], "new": [9.0, 9.0], "7.0": [3.0, 4.0], "b": [5.0, 6.0]}


def table_of(folder: Path, keys: pa.Array, vectors: pa.Array) -> TableSpec:
    FeatureEncoder((), (SparseEncoding("item", "build", 5, values=Vocabulary.of(VALUES)),)).save(folder)
    path = folder / "rows.parquet"
    pq.write_table(pa.table({"key": keys, "vector": vectors}), path)
    table = TableSpec("items", 5, 2, Pooling.SUM, ("item",), SGD, 1.0, initial=str(path))
    return dataclasses.replace(table, encoder_folder=str(folder))


def rows_by_key(table: TableSpec, index: int = 0, count: int = 1) -> Tensor:
    out_RD = torch.full((len(range(index, table.num_rows, count)), table.dim), -1.0)
    read_initial_rows(table, {"weight": out_RD}, index, count)
    return out_RD


@pytest.mark.parametrize("kind", [pa.list_(pa.float32()), pa.list_(pa.float64(), 2)])
def test_rows_by_key_fill_only_rows_of_known_values(tmp_path: Path, kind: Any) -> None:
    keys, vectors = list(VECTORS) * 5_000, list(VECTORS.values()) * 5_000  # several blocks
    table = table_of(tmp_path, pa.array(keys), pa.array(vectors, kind))
    whole = torch.tensor([[-1.0, -1], [3, 4], [5, 6], [-1, -1], [1, 2]])
    assert torch.equal(rows_by_key(table), whole)
    for count in (2, 3, 5):
        for index in range(count):
            assert torch.equal(rows_by_key(table, index, count), whole[index::count])


def test_parquet_file_in_an_object_store_is_read(there: RemotePath, tmp_path: Path) -> None:
    table = table_of(tmp_path, pa.array(VECTORS), pa.array(VECTORS.values()))
    remote = dataclasses.replace(table, initial=f"{sent(tmp_path, there)}/rows.parquet")
    assert torch.equal(rows_by_key(remote), rows_by_key(table))
    with pytest.raises(DataError, match=f"^{there}/none: "):
        rows_by_key(dataclasses.replace(table, initial=f"{there}/none"))


def test_keys_may_be_numbers_or_null_and_the_last_vector_counts(tmp_path: Path) -> None:
    table = table_of(tmp_path, pa.array([7, 8, 7, None]), pa.array([[1.0, 1], [2, 2], [3, 3], [4, 4]]))
    assert rows_by_key(table).tolist() == [[4, 4], [3, 3], [-1, -1], [-1, -1], [-1, -1]]


@pytest.mark.parametrize(
    ("keys", "vectors", "message"),
    [
        (["b", "c"], [[1.0, 2], [1]], "row 2 .* 1 "),
        (["b", "c"], [[1.0, 2], None], "row 2 .* 0 "),
        (["b"], [[1.0, float("nan")]], "row 1 .*finite"),
        (["b"], [[1.0, None]], "row 1 .*finite"),
        (["b"], ["text"], "second column"),
        (["b"], [["1", "x"]], "second column"),
    ],
)
def test_invalid_rows_are_refused(tmp_path: Path, keys: list[str], vectors: list[Any], message: str) -> None:
    table = table_of(tmp_path, pa.array(keys), pa.array(vectors))
    with pytest.raises(DataError, match=f"^{table.initial}: .*{message}"):
        rows_by_key(table)
