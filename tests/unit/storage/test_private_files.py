"""Private folders, refused symbolic links, and folders in the user's home."""

import ctypes
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.users import needs_root

from hybrid.config import RunConfig
from hybrid.config.loading import load_config
from hybrid.data.prepare.preparation import prepare
from hybrid.errors import HybridError
from hybrid.storage.locked_folders import folder_lock
from hybrid.storage.private_files import make_folder, private_user_folder
from workers.exit_codes import Cause
from workers.launching.fork_server import enter_network_namespace
from workers.launching.launcher import Restarts
from workers.launching.role_processes import RoleFailure
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
        with pytest.raises(OSError, match=r"File exists|Not a directory"):
            make_folder(tmp_path / path)


@pytest.mark.usefixtures("open_umask")
def test_folders_of_runs_and_prepared_data_are_private(tmp_path: Path) -> None:
    run = tmp_path / "runs/run"
    with folder_lock(run):
        RunFolder.create(run, RunConfig()).close()
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
                RunFolder(tmp_path / "run", RunConfig())
            RunFolder.create(tmp_path / "run", RunConfig()).finish({})

    if name in REPLACED:
        write_all()
        assert not link.is_symlink()
    else:
        with pytest.raises(HybridError, match=rf"^{link}: is a symbolic link"):
            write_all()
    assert (tmp_path / "mine").read_text() == "kept"


def test_a_record_of_restarts_that_is_a_link_does_not_stop_the_run(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    (tmp_path / "restarts.jsonl").symlink_to("mine")
    line = Restarts(tmp_path, 3).plan_restart(RoleFailure("killed", Cause.KILLED))
    assert f"{tmp_path / 'restarts.jsonl'}: is a symbolic link" in line
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


@needs_root
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
