"""Checks that remote roles see the same folders as the master, by calls to this process."""

import os
import socket
from pathlib import Path
from unittest.mock import Mock

import pytest
from support.stores import BUCKET, Store

from hybrid import transport
from hybrid.data.dataset.dataset_manifest import FILE_NAME
from hybrid.errors import CheckpointError, DataError, OutageError, StorageError
from hybrid.storage import files
from hybrid.storage.remote_path import StoragePath, parse_path
from hybrid.topology import MASTER, Role, RoleKind
from workers.controller.shared_folders import SharedFolders, check_folder

HERE = socket.gethostname()
# By loopback, all roles are this process.
REMOTE = SharedFolders([MASTER], range(1))


def check(file: StoragePath, writes: bool, content: str = "token") -> None:
    check_folder("run.folder", file, content.encode(), writes, "b")


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    folder = tmp_path / "prepared"
    folder.mkdir()
    (folder / FILE_NAME).write_text("{}")
    return folder


def test_shared_folder_is_accepted_and_the_probe_is_removed(loopback: None, tmp_path: Path) -> None:
    (tmp_path / "config.toml").touch()
    REMOTE.check_run(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]


def test_folder_in_a_store_is_checked_too(loopback: None, store: Store) -> None:
    folder = parse_path(f"s3://{BUCKET}/run/checkpoints")
    REMOTE.check_run(folder)
    assert files.list_entries(folder, is_deep=True) == []
    with pytest.raises(CheckpointError, match=rf"^{folder} on host {HERE} .*\(No such file"):
        check(folder / "probe", True)


@pytest.mark.parametrize("kind", [OutageError, StorageError])
def test_error_of_a_store_is_reported_as_it_is(
    kind: type[StorageError], loopback: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: object) -> bytes:
        raise kind("s3://bucket/x: cannot be read: why; what to do")

    monkeypatch.setattr(files, "read_bytes", refuse)
    with pytest.raises(transport.RemoteError) as raised:
        REMOTE.check_run(tmp_path)
    assert str(raised.value) == f"host {HERE}: s3://bucket/x: cannot be read: why; what to do"
    assert raised.value.failure.kind == kind.__name__


def test_another_folder_is_refused_and_the_probe_is_removed(
    loopback: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "read_bytes", lambda path: b"what another host has")
    with pytest.raises(transport.RemoteError) as raised:
        REMOTE.check_run(tmp_path)
    assert str(raised.value).startswith(f"{tmp_path} on host {HERE} ")
    assert "(it holds other files); run.folder " in str(raised.value)
    assert raised.value.failure.kind == CheckpointError.__name__
    assert list(tmp_path.iterdir()) == []


def test_a_role_that_only_reads_need_not_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = tmp_path / "probe"
    probe.write_text("token")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, os.strerror(13))

    monkeypatch.setattr(files, "write_bytes", refuse)
    check(probe, False)
    with pytest.raises(CheckpointError, match=r"\(Permission denied\); run.folder"):
        check(probe, True)


def test_prepared_data_must_be_the_same(prepared: Path, loopback: None) -> None:
    what = "data.cache_folder", prepared / FILE_NAME, b"{}", False, "b"
    transport.create(MASTER, check_folder, *what, timeout_seconds=5.0).wait()
    (prepared / FILE_NAME).write_text("{ }")
    for reason in ("it holds other files", "No such file or directory"):
        with pytest.raises(
            DataError, match=rf"^{prepared} on host {HERE} .*\({reason}\); data.cache_folder "
        ):
            check_folder(*what)
        (prepared / FILE_NAME).unlink(missing_ok=True)


@pytest.mark.parametrize("num_saving", [1, 2])
def test_trainers_check_data_and_all_roles_check_the_run(
    num_saving: int, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other roles have other working directories, so their paths are absolute."""
    create = Mock()
    monkeypatch.setattr(transport, "create", create)
    monkeypatch.chdir(tmp_path)
    trainer, worker = Role(RoleKind.TRAINER, 1), Role(RoleKind.WORKER, 0)
    folders = SharedFolders([trainer, worker], range(num_saving))
    folders.check_data(Path("prepared"))
    folders.check_run(Path("prepared"))
    requests = [(call.args[0], call.args[3]) for call in create.call_args_list]
    assert [role for role, _ in requests] == [trainer, trainer, worker]
    assert [path.parent for _, path in requests] == [prepared] * 3
    assert [call.args[5] for call in create.call_args_list] == [False, num_saving == 2, True]
    assert [path.name for path in prepared.iterdir()] == [FILE_NAME]


def test_nothing_is_checked_or_written_on_one_host(tmp_path: Path) -> None:
    SharedFolders([], range(1)).check_data(tmp_path / "nowhere")
    SharedFolders([], range(1)).check_run(tmp_path / "nowhere")
    assert list(tmp_path.iterdir()) == []
