"""Checkpoints in a store: there whole or not at all, though nothing there can be renamed."""

import dataclasses
from collections.abc import Iterator
from itertools import count

import pytest
import torch
from support.checkpoints import SHAPES, SHARDS, write_checkpoint, write_run
from support.stores import BUCKET, Proxy, Store

from hybrid.checkpoint import checkpoint_folders
from hybrid.checkpoint.checkpoint_files import DENSE_FILE, MANIFEST_FILE
from hybrid.checkpoint.checkpoint_manifest import Manifest
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.checkpoint.tensor_file import write_tensors
from hybrid.errors import CheckpointError
from hybrid.storage import files
from hybrid.storage.remote_path import RemotePath, parse_path

_numbers = count()


@pytest.fixture
def run(store: Store) -> RemotePath:
    """A run folder that nobody has used."""
    found = parse_path(f"s3://{BUCKET}/runs/{next(_numbers)}")
    assert isinstance(found, RemotePath)
    return found


@pytest.fixture
def proxy(store: Store) -> Iterator[Proxy]:
    with Proxy(store) as each:
        yield each


def all_files(run: RemotePath) -> list[RemotePath]:
    found = [each.path for each in files.list_entries(run, is_deep=True)]
    return [each for each in found if isinstance(each, RemotePath)]


def test_what_is_written_is_read(run: RemotePath) -> None:
    written = write_checkpoint(checkpoint_folders.step_folder(run, 1))
    assert (written.name, checkpoint_folders.list_checkpoints(run)) == ("step-00000001", [written])
    stored = Checkpoint.newest_valid(run, pytest.fail)
    assert (stored.folder, stored.manifest.step) == (written, 1)
    assert stored.tensors(DENSE_FILE)["net.w"].equal(torch.arange(4.0))
    assert stored.read_rows("C1", SHAPES["C1"][:2]).equal(torch.ones(5, 3))
    parts = {each.parent.name for each in all_files(run)} - {"tables", written.name}
    assert parts == {stored.manifest.parts}


@pytest.mark.parametrize("num_workers", [1, 3])
def test_any_number_of_workers_loads_it(run: RemotePath, num_workers: int) -> None:
    stored = Checkpoint.open(write_checkpoint(checkpoint_folders.step_folder(run, 2), 2))
    for index in range(num_workers):
        rows = torch.empty(len(range(index, 5, num_workers)), 3)
        stored.load_rows("C1", index, num_workers, {"weight": rows})
        assert rows.eq(2).all()


def test_there_is_none_before_the_manifest(run: RemotePath) -> None:
    partial = checkpoint_folders.begin(checkpoint_folders.step_folder(run, 3))
    write_tensors(partial, DENSE_FILE, {"net.w": torch.arange(4.0)})
    assert checkpoint_folders.list_checkpoints(run) == []
    with pytest.raises(CheckpointError, match="there is no checkpoint here"):
        Checkpoint.newest_valid(run, pytest.fail)
    checkpoint_folders.drop_later(run, 0)
    assert all_files(run) == []


def test_two_that_write_the_same_step_do_not_mix(run: RemotePath) -> None:
    folder = checkpoint_folders.step_folder(run, 3)
    one, two = checkpoint_folders.begin(folder), checkpoint_folders.begin(folder)
    written = [
        write_tensors(each, DENSE_FILE, {"w": torch.full((3,), float(i))})
        for i, each in enumerate((one, two))
    ]
    checkpoint_folders.commit(one, Manifest(3, 0, {}, written[0]))
    with pytest.raises(CheckpointError, match=r"another run .* stop one of them"):
        checkpoint_folders.commit(two, Manifest(3, 0, {}, written[1]))
    assert Checkpoint.open(folder).tensors(DENSE_FILE)["w"].eq(0).all()
    checkpoint_folders.drop_later(run, 3)
    assert Checkpoint.open(folder).tensors(DENSE_FILE)["w"].eq(0).all()
    assert {each.parent.name for each in all_files(run)} == {one.name, folder.name}


def test_old_ones_are_removed(run: RemotePath) -> None:
    write_run(run, 1, 2, 3, 4)
    checkpoint_folders.prune(run, keep_last=2, best_step=1)
    assert [checkpoint_folders.parse_step(each) for each in checkpoint_folders.list_checkpoints(run)] == [
        4,
        3,
        1,
    ]
    checkpoint_folders.drop_later(run, 1)
    assert {each.parent for each in all_files(run) if each.name == MANIFEST_FILE} == {
        checkpoint_folders.step_folder(run, 1)
    }


def test_the_one_that_is_there_is_not_overwritten(run: RemotePath) -> None:
    folder = write_checkpoint(checkpoint_folders.step_folder(run, 1))
    with pytest.raises(CheckpointError, match="exists already"):
        checkpoint_folders.begin(folder)


def test_an_evaluation_is_added_at_once(run: RemotePath) -> None:
    folder = write_checkpoint(checkpoint_folders.step_folder(run, 1))
    dataclasses.replace(Manifest.read(folder / MANIFEST_FILE), metrics={"auc": 0.5}).write(folder)
    stored = Checkpoint.open(folder)
    assert stored.manifest.metrics == {"auc": 0.5}
    assert stored.tensors(DENSE_FILE)["net.w"].equal(torch.arange(4.0))


def test_a_file_that_is_lost_is_seen_before_it_is_read(run: RemotePath) -> None:
    write_run(run, 1, 2)
    newest = Checkpoint.open(checkpoint_folders.step_folder(run, 2))
    files.remove(newest.parts / SHARDS[0])
    said: list[str] = []
    assert Checkpoint.newest_valid(run, said.append).manifest.step == 1
    assert said == [
        f"{newest.parts / SHARDS[0]}: missing or altered since the checkpoint was written; "
        "step-00000001 is used instead"
    ]


def test_a_manifest_that_is_lost_makes_it_none(run: RemotePath) -> None:
    write_run(run, 1, 2)
    files.remove(checkpoint_folders.step_folder(run, 2) / MANIFEST_FILE)
    assert Checkpoint.newest_valid(run, pytest.fail).manifest.step == 1
    checkpoint_folders.drop_later(run, 1)
    assert {each.parent.name for each in all_files(run) if "step-00000002" in str(each)} == set()


def test_a_file_of_the_same_size_is_compared_as_it_is_read(run: RemotePath) -> None:
    stored = Checkpoint.open(write_checkpoint(checkpoint_folders.step_folder(run, 1)))
    content = files.read_bytes(stored.parts / DENSE_FILE)
    files.write_bytes(stored.parts / DENSE_FILE, content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="missing or altered"):
        Checkpoint.open(stored.folder).tensors(DENSE_FILE)


def test_a_manifest_that_the_store_refuses_leaves_no_checkpoint(run: RemotePath, proxy: Proxy) -> None:
    through = parse_path(f"{run}?scheme=http&endpoint_override={proxy.address}")
    assert isinstance(through, RemotePath)
    is_manifest = "/" + MANIFEST_FILE
    proxy.plan = lambda method, path: "403" if method != "HEAD" and is_manifest in path else None
    with pytest.raises(CheckpointError, match=r"cannot write s3://.*manifest.json.*: .*credentials"):
        write_checkpoint(checkpoint_folders.step_folder(through, 1))
    assert checkpoint_folders.list_checkpoints(run) == []
