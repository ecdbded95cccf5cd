"""Directories that appear atomically, and the removal of those of dead processes."""

import fcntl
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from support.commands import ROOT

from hybrid.data.dataset import atomic_directory as module
from hybrid.data.dataset.atomic_directory import build_directory, keep_segments, remove_abandoned
from hybrid.errors import ClusterError, DataError, OutageError

HANGING = """
import sys, time
from pathlib import Path
from hybrid.data.dataset.atomic_directory import build_directory
with build_directory(Path(sys.argv[1]) / "x", "whole") as folder:
    (folder / "part").touch()
    print(flush=True)
    time.sleep(600)
"""


def build_and_hang(parent: Path) -> subprocess.Popen[bytes]:
    """Start a process that builds a folder and waits to be killed."""
    process = subprocess.Popen([sys.executable, "-c", HANGING, parent], stdout=subprocess.PIPE, cwd=ROOT)
    assert process.stdout is not None
    assert process.stdout.readline() == b"\n"
    return process


def test_only_folders_of_killed_processes_are_removed(tmp_path: Path) -> None:
    with build_and_hang(tmp_path) as killed, build_and_hang(tmp_path) as alive:
        killed.kill()
        killed.wait()
        assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 2
        remove_abandoned(tmp_path)
        [kept] = (path for path in tmp_path.iterdir() if path.is_dir())
        assert (kept / "part").exists()
        assert len(list(tmp_path.iterdir())) == 2  # and its lock
        alive.kill()
    with build_directory(tmp_path / "x", "whole") as folder:
        (folder / "whole").touch()
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_failure_leaves_no_folder(tmp_path: Path) -> None:
    def fail() -> None:
        with build_directory(tmp_path / "x", "whole") as folder:
            (folder / "part").touch()
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        fail()
    assert not list(tmp_path.iterdir())


def test_folders_without_a_lock_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".building-old" / "train").mkdir(parents=True)
    (tmp_path / ".building-gone.lock").touch()
    (tmp_path / "whole").mkdir()
    remove_abandoned(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]


def test_segments_with_a_new_lock_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process ends and another begins between the opening of the file and its lock."""
    flock, others = fcntl.flock, list[int]()
    folder, lock = tmp_path / ".parts-x", tmp_path / ".parts-x.lock"
    folder.mkdir()
    lock.touch()

    def begun_anew(descriptor: int, how: int) -> None:
        if not others:
            lock.unlink()
            others.append(os.open(lock, os.O_RDWR | os.O_CREAT))
            flock(others[0], fcntl.LOCK_EX)
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", begun_anew)
    with keep_segments(tmp_path / "y", tmp_path / "unused"):
        assert folder.exists()
        assert lock.exists()
    os.close(others[0])


def test_files_are_synced_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    rename = os.rename

    def renamed(source: Path, target: Path) -> None:
        synced.append("rename")
        rename(source, target)

    monkeypatch.setattr(module, "sync", lambda path: synced.append(path.name))
    monkeypatch.setattr(os, "rename", renamed)
    with build_directory(tmp_path / "x", "whole") as folder:
        (folder / "train").mkdir()
        (folder / "train" / "ids.npy").touch()
        (folder / "whole").touch()
    place = synced.index("rename")
    assert {"ids.npy", "train", "whole", folder.name} == set(synced[:place])
    assert synced[place + 1 :] == [tmp_path.name]


ENDINGS = pytest.mark.parametrize(
    ("error", "is_kept"),
    [
        (ClusterError("lost trainer 0"), True),
        (OutageError("the store is down"), True),
        (KeyboardInterrupt(), True),
        (DataError("no rows"), False),
        (None, False),
    ],
    ids=lambda value: type(value).__name__,
)


@ENDINGS
def test_segments_are_kept_after_an_interrupt(
    error: BaseException | None, is_kept: bool, tmp_path: Path
) -> None:
    with suppress(BaseException), keep_segments(tmp_path / "x", tmp_path / "other") as folder:
        (folder / "part").touch()
        if error is not None:
            raise error
    assert (folder / "part").exists() == is_kept
