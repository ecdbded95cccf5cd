"""What is made is its owner's alone, no link leads what is written elsewhere, and own folders are own."""

import ctypes
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.users import needs_root

from hybrid.config import RunConfig
from hybrid.data.prepare.preparation import prepare
from hybrid.errors import DataError, HybridError
from hybrid.storage.private_files import make_folder, open_file, private_user_folder
from workers.exit_codes import Cause
from workers.launching.network_namespace import enter_network_namespace
from workers.launching.restarts import Restarts
from workers.launching.role_failure import RoleFailure
from workers.launching.role_processes import _redirect_output
from workers.run_folder.run_files import RunFolder
from workers.run_folder.run_lock import run_lock


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.fixture
def generous() -> Iterator[None]:
    """A user who keeps nothing from others, unless he is told to."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("generous")
def test_folders_that_are_made_are_their_owners_and_others_stay_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir(mode=0o775)
    for _ in range(2):
        make_folder(tmp_path / "shared/a/b/c")
    assert mode(tmp_path / "shared") == 0o775
    assert {mode(tmp_path / "shared" / path) for path in ("a", "a/b", "a/b/c")} == {0o700}
    (tmp_path / "file").touch()
    for path in ("file", "file/folder"):
        with pytest.raises(OSError, match=r"File exists|Not a directory"):
            make_folder(tmp_path / path)


@pytest.mark.usefixtures("generous")
def test_a_run_folder_that_is_there_stays_as_it_is_and_holds_private_ones(tmp_path: Path) -> None:
    run = tmp_path / "runs/run"
    with run_lock(run):
        RunFolder.create(run, RunConfig()).close()
    assert {mode(run), mode(run.parent)} == {0o700}
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    with run_lock(shared):
        RunFolder.create(shared, RunConfig()).close()
    assert mode(shared) == 0o755


@pytest.mark.usefixtures("generous")
def test_prepared_data_is_its_owners_and_that_of_others_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RunConfig()
    config = config.replace(data=type(config.data)(synthetic_rows=50))
    folder = prepare(config, tmp_path / "runs/.prepared")
    assert {mode(each) for each in (tmp_path / "runs", folder.parent, folder)} == {0o700}

    def refuse(path: object) -> list[str]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("hybrid.data.prepare.preparation.os.listdir", refuse)
    with pytest.raises(DataError, match=rf"^{folder}: cannot be read \(Permission denied\); set data.cache"):
        prepare(config, tmp_path / "runs/.prepared")


@pytest.mark.parametrize("name", ["metrics.jsonl", ".config.toml.unfinished", "curves.png", ".lock", "log"])
def test_nothing_is_written_through_a_link(name: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "mine").write_text("kept")
    link = tmp_path / "run" / name
    link.symlink_to(tmp_path / "mine")

    def write_all() -> None:
        with run_lock(tmp_path / "run"):
            if name == "log":
                _redirect_output(link, keep_stdout=True)
            if name == "metrics.jsonl":
                RunFolder(tmp_path / "run")
            RunFolder.create(tmp_path / "run", RunConfig()).finish({})

    with pytest.raises(HybridError) as told:
        write_all()
    assert str(told.value) == f"{link}: is a symbolic link, and nothing is written through one; remove it"
    assert (tmp_path / "mine").read_text() == "kept"


def test_a_record_of_a_restart_is_not_written_through_a_link_and_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    link = tmp_path / "restarts.jsonl"
    link.symlink_to("mine")
    said = Restarts(tmp_path, 3).after(RoleFailure("killed", Cause.KILLED))
    assert f"; {link}: is a symbolic link, and nothing is written through one; remove it" in said
    assert (tmp_path / "mine").read_text() == "kept"


def test_files_open_as_usual_otherwise(tmp_path: Path) -> None:
    for _ in range(2):
        with open(tmp_path / "f", "a", opener=open_file) as file:
            file.write("a")
    assert (tmp_path / "f").read_text() == "aa"
    with pytest.raises(FileNotFoundError):
        open_file(tmp_path / "g", os.O_RDONLY)


VARIABLE, DEFAULT = "XDG_CACHE_HOME", ".cache"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("generous")
def test_an_own_folder_is_below_the_home_unless_a_variable_says_where(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert private_user_folder(VARIABLE, DEFAULT, "torch") == home / ".cache/hybrid/torch"
    assert {mode(home / path) for path in (".cache", ".cache/hybrid", ".cache/hybrid/torch")} == {0o700}
    monkeypatch.setenv(VARIABLE, "relative")
    assert private_user_folder(VARIABLE, DEFAULT) == home / ".cache/hybrid"
    monkeypatch.setenv(VARIABLE, str(home / "elsewhere"))
    assert private_user_folder(VARIABLE, DEFAULT) == home / "elsewhere/hybrid"


def test_what_others_could_change_is_not_own(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = home / ".cache/hybrid"
    folder.mkdir(parents=True)
    for each, permissions, is_own in (
        (folder, 0o777, False),
        (folder, 0o1777, False),
        (folder, 0o755, True),
        (home / ".cache", 0o757, False),
        (home / ".cache", 0o1777, True),
    ):
        before = mode(each)
        each.chmod(permissions)
        assert (private_user_folder(VARIABLE, DEFAULT) == folder) == is_own, (each, permissions)
        each.chmod(before)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert private_user_folder(VARIABLE, DEFAULT) is None, "another user's"


def test_where_there_is_no_place_there_is_no_own_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / ".cache").touch()
    assert private_user_folder(VARIABLE, DEFAULT) is None
    monkeypatch.setattr(
        os.path, "expanduser", lambda path: path
    )  # as for a user whom the system does not know
    assert private_user_folder(VARIABLE, DEFAULT) is None


PR_SET_DUMPABLE = 4  # linux/prctl.h


@needs_root
def test_the_namespace_of_a_launch_has_the_private_folders_of_its_user() -> None:
    """In it, folders of root are of an unknown user."""
    ordinary = 12345
    with tempfile.TemporaryDirectory() as folder:
        os.chown(folder, ordinary, ordinary)
        child = os.fork()
        if not child:
            try:
                os.environ |= {"HOME": folder, VARIABLE: ""}
                os.setgroups([])
                os.setgid(ordinary)
                os.setuid(ordinary)
                ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # as after exec
                is_private = private_user_folder(VARIABLE, DEFAULT) is not None
                enter_network_namespace()
                os._exit(0 if is_private and private_user_folder(VARIABLE, DEFAULT) is not None else 1)
            except PermissionError:  # this system allows ordinary users no namespaces
                os._exit(2)
            finally:
                os._exit(3)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == 2:
        pytest.skip("the system allows ordinary users no namespaces")
    assert code == 0
