"""Checkpoints: whole or not at all, all damage seen, and optimizer states through files and back."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from hybrid import checkpoint
from hybrid.checkpoint import (
    DENSE_FILE,
    FORMAT,
    Checkpoint,
    Manifest,
    load_state,
    pack_dense,
    shard_file,
    unpack_dense,
    write_tensors,
)
from hybrid.dense.optimizer import make_optimizer
from hybrid.errors import CheckpointError

SHAPES = {"C1": (5, 3, 2)}


def write(folder: Path, step: int = 1) -> Path:
    """A small whole checkpoint."""
    partial = checkpoint.begin(folder)
    for index in range(2):
        write_tensors(
            partial, shard_file("C1", index, 2), {"weight": torch.full((3 - index, 3), float(step))}
        )
    write_tensors(partial, DENSE_FILE, {"net.w": torch.arange(4.0)})
    return checkpoint.commit(partial, Manifest(step, 2, SHAPES, {}, {"auc": 0.75}))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    folder = write(tmp_path / "deep" / "step-1")
    assert folder == tmp_path / "deep" / "step-1"
    assert sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()) == [
        "dense.safetensors",
        "manifest.json",
        "tables/C1.0-of-2.safetensors",
        "tables/C1.1-of-2.safetensors",
    ]
    stored = Checkpoint.open(folder)
    assert (stored.manifest.step, stored.manifest.epoch, stored.manifest.metrics) == (1, 2, {"auc": 0.75})
    assert set(stored.manifest.files) == {DENSE_FILE, *(shard_file("C1", i, 2) for i in range(2))}
    assert torch.equal(stored.tensors(DENSE_FILE)["net.w"], torch.arange(4.0))


def test_a_view_is_written_without_the_rest_of_its_storage(tmp_path: Path) -> None:
    whole = torch.randn(10_000, 4)
    write_tensors(tmp_path, "view.safetensors", {"weight": whole[2:5], "columns": whole[:3].t()})
    assert (tmp_path / "view.safetensors").stat().st_size < 1000
    read = load_file(tmp_path / "view.safetensors")
    assert torch.equal(read["weight"], whole[2:5])
    assert torch.equal(read["columns"], whole[:3].t())


def test_a_run_folder_opens_its_newest_checkpoint(tmp_path: Path) -> None:
    for step in (2, 110, 30):
        write(tmp_path / "checkpoints" / f"step-{step:08d}", step)
    assert Checkpoint.open(tmp_path).manifest.step == 110


def test_a_table_name_need_not_be_a_file_name(tmp_path: Path) -> None:
    name = shard_file("../weird name/é", 0, 1)
    write_tensors(tmp_path, name, {"weight": torch.ones(1, 1)})
    (only,) = (tmp_path / "tables").iterdir()
    assert only == tmp_path / name


class Killed(BaseException):
    """Stands for the death of the process."""


def die(*_: object, **__: object) -> None:
    raise Killed


@pytest.mark.parametrize(
    "last", ["hybrid.checkpoint.save_file", "hybrid.checkpoint.json.dumps", "hybrid.checkpoint.os.rename"]
)
def test_a_checkpoint_that_was_not_finished_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    """Killed while writing tensors, before the manifest, or with the manifest but before the rename."""
    checkpoints = tmp_path / "checkpoints"
    write(checkpoints / "step-00000001")
    with monkeypatch.context() as patch:
        patch.setattr(last, die)
        with pytest.raises(Killed):
            write(checkpoints / "step-00000002", 2)
    assert [p.name for p in sorted(checkpoints.iterdir())] == ["step-00000001", "step-00000002.partial"]
    assert Checkpoint.open(tmp_path).manifest.step == 1

    (checkpoints / "step-00000002.partial" / "stray").write_text("left by the dead")
    write(checkpoints / "step-00000002", 2)
    assert [p.name for p in sorted(checkpoints.iterdir())] == ["step-00000001", "step-00000002"]
    opened = Checkpoint.open(tmp_path)
    assert opened.manifest.step == 2
    assert "stray" not in opened.manifest.files


def test_a_folder_with_only_an_unfinished_checkpoint_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybrid.checkpoint.os.rename", die)
    with pytest.raises(Killed):
        write(tmp_path / "checkpoints" / "step-00000001")
    with pytest.raises(CheckpointError, match="there is no checkpoint here"):
        Checkpoint.open(tmp_path)


def test_a_shard_that_did_not_arrive_stops_the_checkpoint(tmp_path: Path) -> None:
    """A worker on a host of its own, with a folder of the same name that nobody else sees."""
    partial = checkpoint.begin(tmp_path / "step-1")
    write_tensors(partial, shard_file("C1", 0, 2), {"weight": torch.ones(3, 3)})
    with pytest.raises(
        CheckpointError, match=r"shard 1 of 2 of table C1 elsewhere; run.folder must be storage"
    ):
        checkpoint.commit(partial, Manifest(1, 0, SHAPES, {}, {}))
    assert not (tmp_path / "step-1").exists()


def test_a_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    folder = write(tmp_path / "step-1")
    with pytest.raises(CheckpointError, match=f"{folder}: exists already"):
        write(folder, 5)
    assert Checkpoint.open(folder).manifest.step == 1


@pytest.mark.parametrize("name", [DENSE_FILE, shard_file("C1", 1, 2)])
@pytest.mark.parametrize("damage", ["truncated", "longer", "missing", "a folder"])
def test_damaged_files_are_seen_when_the_checkpoint_is_opened(tmp_path: Path, name: str, damage: str) -> None:
    folder = write(tmp_path / "step-1")
    path = folder / name
    if damage == "truncated":
        os.truncate(path, path.stat().st_size - 1)
    elif damage == "longer":
        path.write_bytes(path.read_bytes() + b"\0")
    else:
        path.unlink()
        if damage == "a folder":
            path.mkdir()
    with pytest.raises(
        CheckpointError, match=f"^{path}: missing or altered since the checkpoint was written$"
    ):
        Checkpoint.open(folder)


def test_a_file_that_is_no_safetensors_is_an_error_of_one_line(tmp_path: Path) -> None:
    folder = write(tmp_path / "step-1")
    size = (folder / DENSE_FILE).stat().st_size
    (folder / DENSE_FILE).write_bytes(b"x" * size)
    with pytest.raises(CheckpointError, match=f"^{folder / DENSE_FILE}: cannot be read: .*$"):
        Checkpoint.open(folder).tensors(DENSE_FILE)
    with pytest.raises(CheckpointError, match="cannot be read"):
        Checkpoint.open(folder).tensors("absent.safetensors")


def test_without_a_manifest_there_is_no_checkpoint(tmp_path: Path) -> None:
    folder = write(tmp_path / "step-1")
    (folder / "manifest.json").unlink()
    for place in (folder, tmp_path, tmp_path / "absent"):
        with pytest.raises(CheckpointError, match=f"^{place}: there is no checkpoint here$"):
            Checkpoint.open(place)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps({"format": FORMAT + 1}), rf"written by another version \(format {FORMAT + 1}\)"),
        (json.dumps({}), r"written by another version \(format None\)"),
        (json.dumps({"format": FORMAT, "step": 1}), "is not a manifest"),
        (json.dumps({"format": FORMAT, "colour": "red"}), "is not a manifest"),
        ("[]", "is not a manifest"),
        ("{", "is not a manifest"),
    ],
)
def test_other_manifests_are_refused(tmp_path: Path, text: str, message: str) -> None:
    folder = write(tmp_path / "step-1")
    (folder / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(folder)


def test_a_disk_that_takes_no_more_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    """The system itself refuses: no file of this process may pass 1 MiB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(CheckpointError, match=f"^cannot write {tmp_path / DENSE_FILE}: .*File too large"):
            write_tensors(tmp_path, DENSE_FILE, {"w": torch.zeros(1 << 20)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("function", ["save_file", "os.fsync", "os.rename", "Path.mkdir", "shutil.rmtree"])
def test_any_failure_to_write_is_a_checkpoint_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "step-1.partial").mkdir()
    monkeypatch.setattr(f"hybrid.checkpoint.{function}", full)
    with pytest.raises(CheckpointError, match=f"^cannot write {tmp_path}/step-1.*No space left on device"):
        write(tmp_path / "step-1")
    assert not (tmp_path / "step-1").exists()


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))


def train(module: nn.Module, optimizer: torch.optim.Optimizer, first: int, num_steps: int) -> None:
    for step in range(first, first + num_steps):
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        module(torch.randn(6, 4, generator=generator)).square().sum().backward()
        optimizer.step()


def momentum(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)


@pytest.mark.parametrize(
    "name", ["SGD", "momentum", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop"]
)
def test_training_goes_on_from_a_file_bit_for_bit(tmp_path: Path, name: str) -> None:
    def make(module: nn.Module) -> torch.optim.Optimizer:
        return momentum(module) if name == "momentum" else make_optimizer(module.parameters(), name, 0.01)

    straight = net()
    optimizer = make(straight)
    train(straight, optimizer, 0, 3)
    write_tensors(tmp_path, DENSE_FILE, pack_dense(straight.state_dict(), optimizer.state_dict()["state"]))
    train(straight, optimizer, 3, 3)

    resumed = net()
    again = make(resumed)
    packed = load_file(tmp_path / DENSE_FILE)
    state, slots = unpack_dense(packed)
    load_state(resumed, state, tmp_path)
    again.load_state_dict({"state": slots, "param_groups": again.state_dict()["param_groups"]})
    train(resumed, again, 3, 3)
    assert_same(resumed.state_dict(), straight.state_dict())
    for index, slot in optimizer.state_dict()["state"].items():
        present = {key: value for key, value in slot.items() if value is not None}
        if present:
            assert_same(again.state_dict()["state"][index], present)


def assert_same(first: Mapping[str, object], second: Mapping[str, object]) -> None:
    assert first.keys() == second.keys()
    for key, value in second.items():
        assert torch.equal(torch.as_tensor(first[key]), torch.as_tensor(value)), key


def test_tied_weights_are_written(tmp_path: Path) -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    tied = nn.Sequential(first, second)
    packed = pack_dense(tied.state_dict(), momentum(tied).state_dict()["state"])
    write_tensors(tmp_path, DENSE_FILE, packed)
    state: dict[str, Tensor] = unpack_dense(load_file(tmp_path / DENSE_FILE))[0]
    assert torch.equal(state["1.weight"], first.weight)


def test_a_state_of_another_net_is_an_error_of_one_line(tmp_path: Path) -> None:
    state = net().state_dict()
    other = nn.Sequential(nn.Linear(4, 6))
    with pytest.raises(CheckpointError, match=f"^{tmp_path}: is of another model: .*size mismatch") as caught:
        load_state(other, state, tmp_path)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_may_be_moved(tmp_path: Path) -> None:
    folder = write(tmp_path / "step-1")
    shutil.move(folder, tmp_path / "kept")
    assert Checkpoint.open(tmp_path / "kept").manifest.step == 1
