"""The files of a checkpoint: their names, and that they are as large as they were."""

import os
from pathlib import Path

import pytest
import torch
from support.checkpoints import SHARDS

from hybrid.checkpoint.checkpoint_files import DENSE_FILE, shard_file
from hybrid.checkpoint.checkpoint_manifest import Manifest
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.checkpoint.tensor_file import write_tensors
from hybrid.errors import CheckpointError


def test_a_table_name_need_not_be_a_file_name(tmp_path: Path) -> None:
    name = shard_file("../weird name/é", 0, 1)
    assert Path(name).parent == Path("tables")
    assert (tmp_path / name).resolve() == tmp_path / name


@pytest.mark.parametrize("table", ["\u5546" * 28, "a" * 240, "/" * 500], ids=len)
def test_a_table_name_of_any_length_can_be_saved(table: str, tmp_path: Path) -> None:
    names = [shard_file(name, 0, 1) for name in (table, f"{table}b")]
    assert len(set(names)) == 2
    written = [write_tensors(tmp_path, name, {"weight": torch.ones(1, 2)}) for name in names]
    tables = {table: (1, 2, 1), f"{table}b": (1, 2, 1)}
    Manifest(1, 1, tables, written[0] | written[1]).write(tmp_path)
    assert Checkpoint.open(tmp_path).read_rows(table, (1, 2)).sum() == 2


def test_table_names_that_were_files_before_still_are() -> None:
    assert shard_file("a" * 236, 0, 1) == f"tables/{'a' * 236}.0-of-1.safetensors"


@pytest.mark.parametrize("name", [DENSE_FILE, SHARDS[1]])
@pytest.mark.parametrize("damage", ["truncated", "longer", "missing", "a folder"])
def test_files_of_another_size_are_seen_when_the_checkpoint_is_opened(
    folder: Path, name: str, damage: str
) -> None:
    path = folder / name
    if by := {"truncated": -1, "longer": 1}.get(damage):
        os.truncate(path, path.stat().st_size + by)
    else:
        path.unlink()
        if damage == "a folder":
            path.mkdir()
    said = f"^{path}: missing or altered since the checkpoint was written$"
    with pytest.raises(CheckpointError, match=said):
        Checkpoint.open(folder)
