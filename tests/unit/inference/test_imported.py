"""Tables of another program replace tables of a checkpoint."""

from pathlib import Path

import pytest
import torch
from support.trained import clicks_config, write_trained
from torch import Tensor

from hybrid.checkpoint.checkpoint_folders import step_folder
from hybrid.checkpoint.checkpoint_manifest import shard_file
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.checkpoint.tensor_file import map_arrays, read_tensors
from hybrid.embedding import pretrained_by_position
from hybrid.embedding.pretrained_by_position import StoredTensor
from hybrid.errors import CheckpointError, DataError
from hybrid.export.table_import import check_fit, write_imported


def of(tensor: Tensor) -> StoredTensor:
    return StoredTensor(tuple(tensor.shape), lambda start, stop: tensor[start:stop])


@pytest.fixture
def stored(tmp_path: Path) -> Checkpoint:
    """A checkpoint with two shards per table, and Adagrad's state."""
    run = write_trained(tmp_path / "run", clicks_config(tmp_path))
    return Checkpoint.open(step_folder(run, 1))


def rows_like(stored: Checkpoint, table: str, dtype: torch.dtype = torch.float32) -> Tensor:
    num_rows, dim, _ = stored.manifest.tables[table]
    return torch.randn(num_rows, dim, generator=torch.Generator().manual_seed(9)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rows_are_replaced_and_their_state_is_reset(
    stored: Checkpoint, tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretrained_by_position, "_BLOCK_BYTES", 8 * 4 * 3)  # three rows of a shard
    num_rows, dim, count = stored.manifest.tables["user"]
    assert (count, num_rows > 12) == (2, True)
    rows_RD = rows_like(stored, "user", dtype)
    write_imported(stored, {"u": of(rows_RD)}, {"user": "u"}, tmp_path / "new")
    new = Checkpoint.open(tmp_path / "new")
    new.manifest.verify(new.folder)
    assert torch.equal(new.read_rows("user", (num_rows, dim)), rows_RD.float())
    assert torch.equal(
        new.read_rows("item", new.manifest.tables["item"][:2]),
        stored.read_rows("item", stored.manifest.tables["item"][:2]),
    )
    assert not read_tensors(Path(str(new.folder)) / shard_file("user", 1, 2))["sum"].any()


def test_the_state_of_a_table_that_was_trained_is_dropped(stored: Checkpoint, tmp_path: Path) -> None:
    rows_RD = rows_like(stored, "user")
    path = Path(str(stored.folder)) / shard_file("user", 0, 2)
    arrays = map_arrays(path, is_writable=True)
    arrays["sum"][:] = 7.0
    del arrays
    write_imported(stored, {"u": of(rows_RD)}, {"user": "u"}, tmp_path / "new")
    assert not read_tensors(tmp_path / "new" / shard_file("user", 0, 2))["sum"].any()


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(3, 4), r"'u' is 3 x 4, .*table 'user' of .*step-00000001 is \d+ x 4"),
        (torch.zeros(()), "'u' is one value, .*table 'user'"),
    ],
)
def test_a_tensor_of_another_shape(stored: Checkpoint, tensor: Tensor, message: str) -> None:
    with pytest.raises(DataError, match=message):
        check_fit(stored, {"u": of(tensor)}, {"user": "u"})


def test_a_tensor_of_integers(stored: Checkpoint) -> None:
    with pytest.raises(DataError, match=r"'u' .*int8.* table 'user'"):
        check_fit(stored, {"u": of(rows_like(stored, "user", torch.int8))}, {"user": "u"})


def test_a_failed_import_leaves_no_files(stored: Checkpoint, tmp_path: Path) -> None:
    def fails(start: int, stop: int) -> Tensor:
        raise DataError("the file is gone")

    tensor = StoredTensor(stored.manifest.tables["user"][:2], fails)
    with pytest.raises(DataError, match="is gone"):
        write_imported(stored, {"u": tensor}, {"user": "u"}, tmp_path / "new")
    assert not list(tmp_path.glob("new*"))
    with pytest.raises(CheckpointError, match="exists already"):
        write_imported(stored, {}, {}, Path(str(stored.folder)))
