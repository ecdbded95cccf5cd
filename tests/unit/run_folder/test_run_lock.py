"""One launch at a time in a run folder; a lock ends with its last holder."""

import fcntl
import os
import signal
import threading
from pathlib import Path

import pytest

from hybrid.errors import ConfigError
from workers.run_folder.run_access import run_lock


def test_a_second_launch_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    with run_lock(tmp_path):
        with pytest.raises(ConfigError, match=r"^run.folder = '.+': is in use by another launch"):
            with run_lock(tmp_path):
                raise AssertionError
    with run_lock(tmp_path):
        pass
    assert not list(tmp_path.iterdir())


def killed_launch(folder: Path) -> int:
    """Leave the lock of a killed launch; return the descriptor that one of its roles still has."""
    with run_lock(folder) as descriptor:
        kept = os.dup(descriptor)
        (folder / ".lock").rename(folder / "aside")
    (folder / "aside").rename(folder / ".lock")
    return kept


def test_a_role_of_a_killed_launch_is_waited_for(tmp_path: Path) -> None:
    timer = threading.Timer(0.05, os.close, [killed_launch(tmp_path)])
    timer.start()
    with run_lock(tmp_path):
        pass
    timer.join()


def test_a_lock_ends_with_the_process_that_held_it(tmp_path: Path) -> None:
    ready, say_ready = os.pipe()
    pid = os.fork()
    if pid == 0:
        with run_lock(tmp_path):
            os.write(say_ready, b"x")
            signal.pause()
        os._exit(0)
    assert os.read(ready, 1)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(ready)
    os.close(say_ready)
    assert (tmp_path / ".lock").exists()
    with run_lock(tmp_path):
        pass


def test_an_unused_new_folder_is_removed(tmp_path: Path) -> None:
    with run_lock(tmp_path / "new"):
        pass
    assert not (tmp_path / "new").exists()
    with run_lock(tmp_path / "used"):
        (tmp_path / "used/config.toml").touch()
    assert [path.name for path in (tmp_path / "used").iterdir()] == ["config.toml"]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file/run': cannot be made: Not a directory; choose another"):
        with run_lock(tmp_path / "file/run"):
            raise AssertionError


def test_a_removed_lock_file_is_locked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, calls = fcntl.flock, list[int]()

    def flock(descriptor: int, operation: int) -> None:
        if not calls:
            (tmp_path / ".lock").unlink()  # as the previous holder does between our open and our lock
        calls.append(descriptor)
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with run_lock(tmp_path):
        assert (tmp_path / ".lock").exists()
    assert len(calls) == 2
