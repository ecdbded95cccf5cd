"""The list of deltas, and the files of a delta, in a folder and in an object store."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.hostile import check_line

from hybrid.checkpoint import checkpoint_folders
from hybrid.checkpoint.checkpoint_folders import Manifest, remove_after, shard_file
from hybrid.checkpoint.deltas import (
    PARENT,
    DeltaChain,
    ModelVersion,
    delta_folder,
    identity_of,
    open_delta,
    read_changes,
)
from hybrid.checkpoint.tensor_file import write_tensors
from hybrid.errors import CheckpointError, StorageError
from hybrid.storage.remote_path import StoragePath

BASE = ModelVersion(0, 3, 64 * "a", "", 1.5)


def write_delta(run: StoragePath, step: int = 5) -> ModelVersion:
    """Write a delta of two tables, of which the second grows, to :data:`BASE`."""
    partial = checkpoint_folders.begin(delta_folder(run, step))
    weight = torch.arange(4.0).view(2, 2)
    fixed = {"rows": torch.tensor([0, 7]), "weight": weight}
    grown = {"keys": torch.tensor([-5, 9]), "weight": weight, "evicted": torch.tensor([4])}
    files = write_tensors(partial, shard_file("fixed", 0, 1), fixed)
    files |= write_tensors(partial, shard_file("grown", 0, 1), grown)
    manifest = Manifest(step, 0, {"fixed": (8, 2, 1), "grown": (0, 2, 1)}, files, {}, {PARENT: BASE.identity})
    checkpoint_folders.commit(partial, manifest)
    return ModelVersion(1, step, identity_of(manifest), BASE.identity, 2.5)


def test_a_chain_and_its_deltas_are_read_as_written(folder: StoragePath) -> None:
    assert DeltaChain.read(folder) is None
    version = write_delta(folder)
    chain = DeltaChain(BASE, BASE.identity, (version,))
    chain.write(folder)
    assert DeltaChain.read(folder) == chain
    assert chain.after(BASE.identity) == (version,)
    assert chain.after(version.identity) == ()
    assert chain.after(64 * "b") is None
    delta = open_delta(folder, version)
    ((rows, weight, evicted),) = read_changes(delta, "fixed", 8, 2)
    assert (rows.tolist(), weight.tolist(), evicted.tolist()) == ([0, 7], [[0, 1], [2, 3]], [])
    ((keys, _, evicted),) = read_changes(delta, "grown", None, 2)
    assert (keys.tolist(), evicted.tolist()) == ([-5, 9], [4])
    for table, num_rows, dim in (("fixed", 7, 2), ("fixed", 8, 3), ("fixed", None, 2), ("grown", 8, 2)):
        with pytest.raises(CheckpointError, match=f"table {table}"):
            read_changes(delta, table, num_rows, dim)
    with pytest.raises(CheckpointError, match="step-00000005"):
        open_delta(folder, dataclasses.replace(version, parent=64 * "b"))
    remove_after(folder, 9)
    assert DeltaChain.read(folder) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document.update(format=2),
        lambda document: document.pop("base"),
        lambda document: document.update(more=1),
        lambda document: document["base"].update(step="3"),
        lambda document: document["base"].update(step=-3),
        lambda document: document["base"].update(identity=64 * "b"),
        lambda document: document["deltas"].append(document["deltas"][0]),
        lambda document: document.update(deltas={}),
    ],
)
def test_an_invalid_chain_is_refused(tmp_path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    DeltaChain(BASE, BASE.identity, (ModelVersion(1, 5, 64 * "c", BASE.identity, 2.5),)).write(tmp_path)
    path = tmp_path / "deltas/current.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=str(path)) as caught:
        DeltaChain.read(tmp_path)
    check_line(caught.value)


def test_links_to_other_folders_are_not_followed(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    version = write_delta(other)
    DeltaChain(BASE, BASE.identity, (version,)).write(other)
    run.mkdir()
    (run / "deltas").symlink_to(other / "deltas")
    for use in (DeltaChain.read, lambda each: open_delta(each, version), lambda each: remove_after(each, 0)):
        with pytest.raises(StorageError, match="deltas"):
            use(run)
    assert DeltaChain.read(other) is not None
