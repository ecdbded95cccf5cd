"""Folders that roles elsewhere must see as the master does, found out by calls to one that is here."""

import os
import re
import socket
from hashlib import sha256
from pathlib import Path

import pytest
from support.stores import BUCKET, Store

from hybrid import transport
from hybrid.data.dataset.dataset_manifest import FILE_NAME
from hybrid.errors import CheckpointError, DataError, OutageError, StorageError
from hybrid.storage import files
from hybrid.storage.remote_path import StoragePath, parse_path
from hybrid.topology import MASTER, Role, RoleKind
from workers.controller.shared_folders import FolderCheck, SharedFolders

HERE = socket.gethostname()
SHARED = "must be storage that all hosts share"
# By loopback it is this process that is asked, whatever its name.
ELSEWHERE = SharedFolders([MASTER])


def look(file: StoragePath, writes: bool, content: str = "token") -> None:
    FolderCheck("run.folder", file, sha256(content.encode()).hexdigest(), writes, "b")


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    folder = tmp_path / "prepared"
    folder.mkdir()
    (folder / FILE_NAME).write_text("{}")
    return folder


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Role, Path]]:
    """The roles that are asked, and for what; nobody answers."""
    found: list[tuple[Role, Path]] = []

    class Answered:
        def wait(self) -> None: ...

    def create(
        role: Role, check: object, key: str, path: Path, *_: object, timeout_seconds: float
    ) -> Answered:
        found.append((role, path))
        return Answered()

    monkeypatch.setattr(transport, "create", create)
    return found


def test_what_is_shared_is_found_and_nothing_of_the_probe_is_left(loopback: None, tmp_path: Path) -> None:
    ELSEWHERE.check_checkpoints(tmp_path / "runs" / "run" / "checkpoints")
    assert list(tmp_path.iterdir()) == []
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    (folder / "step-1").touch()
    ELSEWHERE.check_checkpoints(folder)
    assert [path.name for path in folder.iterdir()] == ["step-1"]


def test_a_place_in_a_store_is_looked_at_too(loopback: None, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    try:
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        folder = parse_path(f"s3://{BUCKET}/run/checkpoints")
        ELSEWHERE.check_checkpoints(folder)
        assert files.list_entries(folder, is_deep=True) == []
        with pytest.raises(CheckpointError, match=rf"^{folder} on host {HERE} is not .* \(No such file"):
            look(folder / "probe", True)
    finally:
        store.close()


@pytest.mark.parametrize("kind", [OutageError, StorageError])
def test_a_store_that_refuses_is_no_folder_that_is_not_shared(
    kind: type[StorageError], loopback: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(place: object) -> bytes:
        raise kind("s3://bucket/x: cannot be read: why; what to do")

    monkeypatch.setattr(files, "read_bytes", refuse)
    with pytest.raises(transport.RemoteError) as raised:
        ELSEWHERE.check_checkpoints(tmp_path)
    assert str(raised.value) == f"host {HERE}: s3://bucket/x: cannot be read: why; what to do"
    assert raised.value.failure.kind == kind.__name__


def test_a_role_that_sees_another_folder_is_told_and_the_probe_is_gone(
    loopback: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run" / "checkpoints"
    monkeypatch.setattr(files, "read_bytes", lambda path: b"what another host has")
    with pytest.raises(transport.RemoteError) as raised:
        ELSEWHERE.check_checkpoints(folder)
    assert str(raised.value) == (
        f"{folder} on host {HERE} is not that of the master's host {HERE} (it holds other files); run.folder "
        f"{SHARED}"
    )
    assert raised.value.failure.kind == CheckpointError.__name__
    assert list(tmp_path.iterdir()) == []


def test_a_probe_that_cannot_be_removed_does_not_hide_the_first_error(
    loopback: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = files.remove

    def refuse(path: Path) -> None:
        if "-" in path.name.removeprefix(".seen-by-all-"):  # what the role has written
            remove(path)
            return
        raise OutageError(f"{path}: cannot be removed")

    monkeypatch.setattr(files, "remove", refuse)
    with pytest.raises(OutageError, match="cannot be removed"):
        ELSEWHERE.check_checkpoints(tmp_path)
    monkeypatch.setattr(files, "read_bytes", lambda path: b"what another host has")
    with pytest.raises(transport.RemoteError, match="holds other files"):
        ELSEWHERE.check_checkpoints(tmp_path)


def test_a_folder_that_is_not_there_or_cannot_be_written_is_not_shared(tmp_path: Path) -> None:
    probe = tmp_path / "checkpoints" / "probe"
    folder = re.escape(str(probe.parent))
    words = f"^{folder} on host {HERE} is not that of the master's host b \\({{}}\\); run.folder"
    with pytest.raises(CheckpointError, match=words.format("No such file")):
        look(probe, True)
    probe.parent.mkdir()
    probe.write_text("token")
    look(probe, True)
    assert list(probe.parent.iterdir()) == [probe]
    with pytest.raises(CheckpointError, match=words.format("it holds other files")):
        look(probe, False, "another")


def test_one_who_only_reads_need_not_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = tmp_path / "probe"
    probe.write_text("token")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, os.strerror(13))

    monkeypatch.setattr(files, "write_bytes", refuse)
    look(probe, False)
    with pytest.raises(CheckpointError, match=r"\(Permission denied\); run.folder"):
        look(probe, True)


def test_prepared_data_must_be_the_same(prepared: Path, loopback: None) -> None:
    what = "data.cache_folder", prepared / FILE_NAME, sha256(b"{}").hexdigest(), False, "b"
    transport.create(MASTER, FolderCheck, *what, timeout_seconds=5.0).wait()
    (prepared / FILE_NAME).write_text("{ }")
    rule = f"{prepared} on host {HERE} is not that of the master's host b ({{}}); data.cache_folder {SHARED}"
    with pytest.raises(DataError) as raised:
        FolderCheck(*what)
    assert str(raised.value) == rule.format("it holds other files")
    (prepared / FILE_NAME).unlink()
    with pytest.raises(DataError) as raised:
        FolderCheck(*what)
    assert str(raised.value) == rule.format("No such file")


def test_trainers_are_asked_for_data_and_all_for_checkpoints_by_whole_paths(
    prepared: Path, tmp_path: Path, asked: list[tuple[Role, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trainer, worker = Role(RoleKind.TRAINER, 1), Role(RoleKind.WORKER, 0)
    SharedFolders([trainer, worker]).check_data(Path("prepared"))
    assert asked == [(trainer, prepared / FILE_NAME)]
    asked.clear()
    SharedFolders([trainer, worker]).check_checkpoints(Path("run/checkpoints"))
    (first, probe), (second, same) = asked
    assert (first, second, probe) == (trainer, worker, same)
    assert probe.parent == tmp_path / "run/checkpoints"
    assert list(tmp_path.iterdir()) == [prepared]


def test_on_one_host_nobody_is_asked_and_nothing_written(
    tmp_path: Path, asked: list[tuple[Role, Path]]
) -> None:
    SharedFolders([]).check_data(tmp_path / "nowhere")
    SharedFolders([]).check_checkpoints(tmp_path / "nowhere")
    assert asked == []
    assert list(tmp_path.iterdir()) == []
