"""The files of a checkpoint: their names, and that they are as large as they were."""

import os
from pathlib import Path

import pytest
from support.checkpoints import SHARDS

from hybrid.checkpoint.checkpoint_files import DENSE_FILE, shard_file
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.errors import CheckpointError


def test_a_table_name_need_not_be_a_file_name(tmp_path: Path) -> None:
    name = shard_file("../weird name/é", 0, 1)
    assert Path(name).parent == Path("tables")
    assert (tmp_path / name).resolve() == tmp_path / name


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
