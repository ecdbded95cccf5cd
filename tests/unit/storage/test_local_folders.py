"""Private folders, refused links, locks, and directories that appear atomically."""

import ctypes
import fcntl
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybrid.config import RunConfig
from hybrid.config.loading import load_config
from hybrid.data.prepare.preparation import prepare
from hybrid.errors import DataError, HybridError
from hybrid.storage import locked_folders
from hybrid.storage.locked_folders import build_directory, folder_lock, hold_lock
from hybrid.storage.private_files import make_folder, private_user_folder
from workers.launching.fork_server import enter_network_namespace
from workers.run_folder.run_files import RunFolder

VARIABLE, DEFAULT = "XDG_CACHE_HOME", ".cache"
PR_SET_DUMPABLE = 4  # linux/prctl.h
ORDINARY_USER = 12345


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.fixture
def open_umask() -> Iterator[None]:
    """Make new files readable by all users unless the program restricts them."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("open_umask")
def test_new_folders_are_private_and_existing_ones_keep_their_mode(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir(mode=0o775)
    make_folder(tmp_path / "shared/a/b/c")
    make_folder(tmp_path / "shared/a/b/c")
    assert mode(tmp_path / "shared") == 0o775
    assert {mode(tmp_path / "shared" / path) for path in ("a", "a/b", "a/b/c")} == {0o700}
    (tmp_path / "file").touch()
    for path in ("file", "file/folder"):
        with pytest.raises((FileExistsError, NotADirectoryError)):
            make_folder(tmp_path / path)


@pytest.mark.usefixtures("open_umask")
def test_folders_of_runs_and_prepared_data_are_private(tmp_path: Path) -> None:
    run = tmp_path / "runs/run"
    with folder_lock(run):
        RunFolder(run, RunConfig()).close()
    data = prepare(load_config(None, ["data.synthetic_rows=50"]), tmp_path / "runs/.prepared")
    assert {mode(each) for each in (run, run.parent, data.parent, data)} == {0o700}


REPLACED = (".config.toml.unfinished", "report.html", "versions.json")


@pytest.mark.parametrize("name", ["metrics.jsonl", ".lock", *REPLACED])
def test_nothing_is_written_through_a_link(name: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "mine").write_text("kept")
    link = tmp_path / "run" / name
    link.symlink_to(tmp_path / "mine")

    def write_all() -> None:
        with folder_lock(tmp_path / "run"):
            if name == "metrics.jsonl":
                RunFolder(tmp_path / "run", RunConfig(), 0)
            RunFolder(tmp_path / "run", RunConfig()).finish({})

    if name in REPLACED:
        write_all()
        assert not link.is_symlink()
    else:
        with pytest.raises(HybridError, match=f"^{link}: "):
            write_all()
    assert (tmp_path / "mine").read_text() == "kept"


@pytest.mark.usefixtures("open_umask")
def test_a_user_folder_is_below_the_home_or_a_variable(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert private_user_folder(VARIABLE, DEFAULT, "torch") == home / ".cache/hybrid/torch"
    assert {mode(home / path) for path in (".cache", ".cache/hybrid", ".cache/hybrid/torch")} == {0o700}
    monkeypatch.setenv(VARIABLE, "relative")
    assert private_user_folder(VARIABLE, DEFAULT) == home / ".cache/hybrid"
    monkeypatch.setenv(VARIABLE, str(home / "other"))
    assert private_user_folder(VARIABLE, DEFAULT) == home / "other/hybrid"
    (home / "file").touch()
    monkeypatch.setenv(VARIABLE, str(home / "file"))
    assert private_user_folder(VARIABLE, DEFAULT) is None


@pytest.mark.parametrize(
    ("path", "permissions", "is_private"),
    [
        (".cache/hybrid", 0o777, False),
        (".cache/hybrid", 0o1777, False),
        (".cache/hybrid", 0o755, True),
        (".cache", 0o757, False),
        (".cache", 0o1777, True),
    ],
)
def test_a_folder_that_others_can_change_is_not_private(
    home: Path, path: str, permissions: int, is_private: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = home / ".cache/hybrid"
    folder.mkdir(parents=True)
    (home / path).chmod(permissions)
    assert (private_user_folder(VARIABLE, DEFAULT) == folder) == is_private
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert private_user_folder(VARIABLE, DEFAULT) is None


@pytest.mark.root
def test_user_folders_are_private_in_the_namespace_of_a_launch() -> None:
    """There, the folders of root belong to an unknown user."""
    with tempfile.TemporaryDirectory() as folder:
        os.chown(folder, ORDINARY_USER, ORDINARY_USER)
        child = os.fork()
        if not child:
            code = 3
            try:
                os.environ |= {"HOME": folder, VARIABLE: ""}
                os.setgroups([])
                os.setgid(ORDINARY_USER)
                os.setuid(ORDINARY_USER)
                ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # as after exec
                before = private_user_folder(VARIABLE, DEFAULT)
                enter_network_namespace()
                code = 0 if before and private_user_folder(VARIABLE, DEFAULT) == before else 1
            except PermissionError:  # this system allows ordinary users no namespaces
                code = 2
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == 2:
        pytest.skip("the system allows ordinary users no namespaces")
    assert code == 0


def refuse(seconds: float) -> None:
    raise DataError("the lock is held")


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def build_and_hang(target: Path) -> int:
    """Start a process that builds a folder and waits to be killed; return its id."""
    child = os.fork()
    if not child:
        try:
            with build_directory(target) as folder:
                assert folder is not None
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
        with pytest.raises(DataError), hold_lock(tmp_path / "z"):
            pass
        with build_directory(tmp_path / "x") as folder:
            assert folder is not None
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
    with build_directory(tmp_path / "x") as folder:
        assert folder is not None
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
    with pytest.raises(DataError), hold_lock(tmp_path / "x"):
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
        assert folder is not None
        (folder / "train").mkdir()
        (folder / "train" / "ids.npy").touch()
        (folder / "manifest").touch()
    position = synced.index("rename")
    assert {"ids.npy", "train", "manifest", folder.name} == set(synced[:position])
    assert synced[position + 1 :] == [tmp_path.name]
