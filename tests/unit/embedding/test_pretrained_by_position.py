from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.stores import BUCKET, Store, sent
from torch import Tensor

from hybrid.embedding.pretrained_by_position import absolute, read_rows, shape_of
from hybrid.errors import DataError, StorageError
from hybrid.storage.remote_path import RemotePath

ROWS_RD = torch.arange(21.0).view(7, 3)


def written(folder: Path, kind: str) -> str:
    """Where these rows are."""
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
    source, expected = written(tmp_path, kind), ROWS_RD[index::count]
    out_RD = torch.full(expected.shape, torch.nan)
    read_rows(source, out_RD, index, count)
    assert shape_of(source) == (7, 3)
    assert torch.equal(out_RD, expected)


def test_a_file_of_several_blocks_is_read_whole(tmp_path: Path) -> None:
    rows_RD = np.arange(3 * 2**20, dtype=np.float16).reshape(-1, 1)
    np.save(tmp_path / "rows.npy", rows_RD)
    out_RD = torch.empty(len(rows_RD), 1, dtype=torch.float16)
    read_rows(str(tmp_path / "rows.npy"), out_RD, 0, 1)
    assert np.array_equal(out_RD.numpy(), rows_RD, equal_nan=True)


@pytest.mark.parametrize("kind", ["npy", "safetensors", "safetensors#a"])
def test_file_in_an_object_store_is_fetched(store: Store, kind: str, tmp_path: Path) -> None:
    there = RemotePath(f"s3://{BUCKET}", tmp_path.name)
    source = absolute(written(tmp_path, kind).replace(str(tmp_path), str(there)))
    sent(tmp_path, there)
    out_RD = torch.empty(3, 3)
    read_rows(source, out_RD, 1, 2)
    assert (shape_of(source), out_RD.tolist()) == ((7, 3), ROWS_RD[1::2].tolist())
    with pytest.raises(
        StorageError, match=r"^s3://no-such-bucket/a\.npy: .* there is no such bucket; make it"
    ):
        shape_of("s3://no-such-bucket/a.npy")
    with pytest.raises(
        DataError, match=rf"{there}/none\.npy: cannot be read as rows of a table: .*No such file"
    ):
        shape_of(f"{there}/none.npy")


def wrong(folder: Path, tensors: dict[str, Tensor]) -> str:
    save_file(tensors, folder / "wrong.safetensors")
    return str(folder / "wrong.safetensors")


@pytest.mark.parametrize(
    ("tensors", "name", "message"),
    [
        ({"a": torch.zeros(3)}, "", r"holds a tensor of shape \[3\], not rows"),
        ({"a": torch.zeros(0, 3)}, "", r"holds a tensor of shape \[0, 3\]"),
        ({"a": torch.zeros(2, 3, dtype=torch.int64)}, "", "holds torch.int64"),
        ({"a": torch.zeros(2, 3), "b": torch.zeros(2)}, "", "several tensors; add one of #a, #b"),
        ({"a": torch.zeros(2, 3)}, "#c", "no tensor 'c', but a"),
    ],
)
def test_tensors_that_are_no_matrix_are_refused(
    tensors: dict[str, Tensor], name: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message):
        shape_of(wrong(tmp_path, tensors) + name)


def test_missing_or_unreadable_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.npy").write_text("x")
    (tmp_path / "text.safetensors").write_text("x")
    for name in ("none.npy", "none.safetensors", "text.npy", "text.safetensors"):
        with pytest.raises(DataError, match="cannot be read as rows of a table"):
            shape_of(str(tmp_path / name))


def test_a_file_that_has_changed_its_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has 7 x 3 values now, which does not fit the table"):
        read_rows(written(tmp_path, "npy"), torch.zeros(8, 3), 0, 1)
