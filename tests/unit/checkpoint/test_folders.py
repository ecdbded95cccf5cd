"""The folders of checkpoints: whole or not at all, and old ones removed."""

import errno
import os
from pathlib import Path

import pytest
from support.checkpoints import SHAPES, SHARDS, names, write_checkpoint, write_run

from hybrid.checkpoint import checkpoint_folders
from hybrid.checkpoint.checkpoint_files import DENSE_FILE, MANIFEST_FILE, write_text
from hybrid.checkpoint.checkpoint_folders import step_folder
from hybrid.checkpoint.checkpoint_manifest import Manifest
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.errors import CheckpointError, HybridError


def test_what_is_written_is_read(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "deep" / "step-1")
    assert folder == tmp_path / "deep" / "step-1"
    assert sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()) == [
        *("dense.safetensors", "manifest.json", "tables/C1.0-of-2.safetensors"),
        "tables/C1.1-of-2.safetensors",
    ]
    read = Checkpoint.open(folder).manifest
    assert (read.step, read.epoch, read.metrics, read.progress) == (1, 2, {"auc": 0.75}, {"samples": 7})
    assert {name: tuple(shape) for name, shape in read.tables.items()} == SHAPES
    assert set(read.files) == {DENSE_FILE, *SHARDS}
    for name, (size, _) in read.files.items():
        assert (folder / name).stat().st_size == size
    read.verify(folder)


class Killed(BaseException):
    """Stands for the death of the process."""


def die(*_: object, **__: object) -> None:
    raise Killed


@pytest.mark.parametrize(
    "last", ["tensor_file.struct.pack", "checkpoint_manifest.json.dumps", "checkpoint_folders.os.rename"]
)
def test_a_checkpoint_that_was_not_finished_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    """Killed while writing tensors, before the manifest, or with the manifest but before the rename."""
    write_run(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(f"hybrid.checkpoint.{last}", die)
        with pytest.raises(Killed):
            write_run(tmp_path, 2)
    checkpoints = tmp_path / "checkpoints"
    assert names(checkpoints) == ["step-00000001", "step-00000002.partial"]
    assert checkpoint_folders.list_checkpoints(tmp_path) == [step_folder(tmp_path, 1)]

    (checkpoints / "step-00000002.partial" / "stray").write_text("left by the dead")
    write_run(tmp_path, 2)
    assert names(checkpoints) == ["step-00000001", "step-00000002"]
    assert names(step_folder(tmp_path, 2)) == [DENSE_FILE, MANIFEST_FILE, "tables"]


def test_checkpoints_are_found_by_their_number_newest_first(tmp_path: Path) -> None:
    write_run(tmp_path, 2, 110, 99_999_999, 1_000_000_000, 30)
    for other in ("step-abc", "best", "step-00000004.partial"):
        (tmp_path / "checkpoints" / other).mkdir()
        (tmp_path / "checkpoints" / other / MANIFEST_FILE).touch()
    found = checkpoint_folders.list_checkpoints(tmp_path)
    assert [checkpoint_folders.parse_step(folder) for folder in found] == [
        1_000_000_000,
        99_999_999,
        110,
        30,
        2,
    ]
    assert checkpoint_folders.list_checkpoints(tmp_path / "absent") == []


@pytest.mark.parametrize("is_shorter", [True, False], ids=["shorter", "missing"])
def test_a_file_that_did_not_arrive_stops_the_checkpoint(tmp_path: Path, is_shorter: bool) -> None:
    """A worker on a host of its own, with a folder of the same name that nobody else sees."""
    partial = checkpoint_folders.begin(tmp_path / "step-1")
    files = write_text(partial, "one", "text")
    if is_shorter:
        (partial / "one").write_text("tex")
    else:
        (partial / "one").unlink()
    with pytest.raises(CheckpointError, match=r"one: .*run\.folder"):
        checkpoint_folders.commit(partial, Manifest(1, 0, {}, files))
    assert not (tmp_path / "step-1").exists()


def test_folders_are_safe_on_the_disk_before_and_after_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    for module in ("checkpoint_manifest", "checkpoint_folders"):
        monkeypatch.setattr(
            f"hybrid.checkpoint.{module}.sync", lambda path: synced.append(path.relative_to(tmp_path))
        )
    write_checkpoint(tmp_path / "step-1")
    partial = Path("step-1.partial")
    assert set(synced[:-1]) == {partial, partial / "tables"}
    assert synced[-1] == Path()


def test_checkpoints_of_another_run_are_not_reached_through_a_link(tmp_path: Path) -> None:
    write_run(tmp_path / "mine", 1, 2)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/checkpoints").symlink_to(tmp_path / "mine/checkpoints")
    for use in (
        lambda: checkpoint_folders.prune(tmp_path / "run", 1, None),
        lambda: checkpoint_folders.drop_later(tmp_path / "run", 0),
        lambda: Checkpoint.newest_valid(tmp_path / "run", print),
    ):
        with pytest.raises(HybridError, match=rf"^{tmp_path}/run/checkpoints: is a symbolic link"):
            use()
    assert len(checkpoint_folders.list_checkpoints(tmp_path / "mine")) == 2


def test_a_checkpoint_is_not_overwritten(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{folder}: exists already"):
        write_checkpoint(folder, 5)
    assert Checkpoint.open(folder).manifest.step == 1


@pytest.mark.parametrize(
    "function",
    [
        "storage.files.os.fsync",
        "checkpoint.checkpoint_folders.os.rename",
        "storage.private_files.Path.mkdir",
        "checkpoint.checkpoint_folders.shutil.rmtree",
    ],
)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_any_failure_to_write_is_a_checkpoint_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, code: int
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    (tmp_path / "step-1.partial").mkdir()
    monkeypatch.setattr(f"hybrid.{function}", refuse)
    with pytest.raises(CheckpointError, match=f"^cannot write {tmp_path}/step-1.*{os.strerror(code)}"):
        write_checkpoint(tmp_path / "step-1")
    assert not (tmp_path / "step-1").exists()


@pytest.mark.parametrize(
    ("keep_last", "best", "kept"),
    [(1, None, [5]), (2, None, [4, 5]), (2, 1, [1, 4, 5]), (2, 5, [4, 5]), (9, 2, [1, 2, 3, 4, 5])],
)
def test_the_newest_and_the_best_are_kept(
    tmp_path: Path, keep_last: int, best: int | None, kept: list[int]
) -> None:
    write_run(tmp_path, 1, 2, 3, 4, 5)
    checkpoint_folders.prune(tmp_path, keep_last, best)
    assert names(tmp_path / "checkpoints") == [f"step-{step:08d}" for step in kept]


def test_one_that_is_being_removed_is_no_checkpoint_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path, 1, 2)
    with monkeypatch.context() as patch:
        patch.setattr("hybrid.checkpoint.checkpoint_folders.shutil.rmtree", die)
        with pytest.raises(Killed):
            checkpoint_folders.prune(tmp_path, 1, None)
    assert names(tmp_path / "checkpoints") == ["step-00000001.partial", "step-00000002"]
    assert checkpoint_folders.list_checkpoints(tmp_path) == [step_folder(tmp_path, 2)]
    checkpoint_folders.drop_later(tmp_path, 2)
    assert names(tmp_path / "checkpoints") == ["step-00000002"]


def test_what_comes_after_the_step_from_which_a_run_goes_on_is_dropped(tmp_path: Path) -> None:
    write_run(tmp_path, 8, 9, 10, 100_000_000)
    checkpoint_folders.drop_later(tmp_path, 9)
    assert names(tmp_path / "checkpoints") == ["step-00000008", "step-00000009"]
