"""Directories that appear atomically, what killed processes leave, and locks."""

import fcntl
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from hybrid.errors import DataError
from hybrid.storage import locked_folders
from hybrid.storage.locked_folders import build_directory, hold_lock


def refuse(seconds: float) -> None:
    raise DataError("the lock is held")


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def build_and_hang(target: Path) -> int:
    """Start a process that builds a folder and waits to be killed; return its id."""
    child = os.fork()
    if not child:
        try:
            with hold_lock(target), build_directory(target) as folder:
                (folder / "segment").touch()
                time.sleep(60)
        finally:
            os._exit(1)
    while not (target.with_name(f".building-{target.name}") / "segment").exists():
        time.sleep(0.01)
    return child


def kill(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_folders_of_killed_processes_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "complete").mkdir()
    x, y, z = (build_and_hang(tmp_path / name) for name in "xyz")
    kill(x)
    kill(y)
    try:
        monkeypatch.setattr("hybrid.storage.locked_folders.time.sleep", refuse)
        with pytest.raises(DataError, match="the lock is held"), hold_lock(tmp_path / "z"):
            pass
        with hold_lock(tmp_path / "x"), build_directory(tmp_path / "x") as folder:
            assert names_in(folder) == set()
            assert names_in(tmp_path) == {"complete", folder.name, "x.lock", ".building-z", "z.lock"}
        assert names_in(tmp_path) == {"complete", "x", ".building-z", "z.lock"}
    finally:
        kill(z)


@pytest.mark.parametrize("inner", ["", "a/b"])
def test_links_in_an_unfinished_folder_are_not_followed(tmp_path: Path, inner: str) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/kept").touch()
    link = tmp_path / ".building-x" / inner
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(tmp_path / "mine")
    with hold_lock(tmp_path / "x"), build_directory(tmp_path / "x") as folder:
        assert names_in(folder) == set()
    assert names_in(tmp_path / "mine") == {"kept"}


def test_lock_file_of_an_ended_process_is_not_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process ends and another begins between the opening of the file and its lock."""
    flock, others = fcntl.flock, list[int]()
    lock = tmp_path / "x.lock"
    lock.touch()

    def begin_anew(descriptor: int, how: int) -> None:
        if not others:
            lock.unlink()
            others.append(os.open(lock, os.O_RDWR | os.O_CREAT))
            flock(others[0], fcntl.LOCK_EX)
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", begin_anew)
    monkeypatch.setattr("hybrid.storage.locked_folders.time.sleep", refuse)
    with pytest.raises(DataError, match="the lock is held"), hold_lock(tmp_path / "x"):
        pass
    assert lock.exists()
    os.close(others[0])


def test_files_are_synced_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    rename = os.rename

    def record_rename(source: Path, target: Path) -> None:
        synced.append("rename")
        rename(source, target)

    monkeypatch.setattr(locked_folders, "sync", lambda path: synced.append(path.name))
    monkeypatch.setattr(os, "rename", record_rename)
    with build_directory(tmp_path / "x") as folder:
        (folder / "train").mkdir()
        (folder / "train" / "ids.npy").touch()
        (folder / "manifest").touch()
    position = synced.index("rename")
    assert {"ids.npy", "train", "manifest", folder.name} == set(synced[:position])
    assert synced[position + 1 :] == [tmp_path.name]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), DataError("no rows")], ids=["interrupt", "failure"])
def test_folder_is_removed_after_an_exception(error: BaseException, tmp_path: Path) -> None:
    with suppress(BaseException), build_directory(tmp_path / "x") as folder:
        (folder / "segment").touch()
        raise error
    assert names_in(tmp_path) == set()
