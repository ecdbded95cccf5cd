"""From what roles hold to a checkpoint: all files of all roles, or nothing."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import pytest
import torch
from support.checkpoints import Call
from support.shards import PATIENCE_SECONDS

from hybrid import wire
from hybrid.checkpoint.files import PROGRESS_FILE, Files, write_text
from hybrid.checkpoint.manifest import Manifest
from hybrid.checkpoint.reader import Checkpoint
from hybrid.errors import CheckpointError
from hybrid.topology import Role, RoleKind
from hybrid.wire import Failure, LostError, RemoteError
from workers.session.saving import Saving

WORKER = Role(RoleKind.WORKER, 0)


def answered(files: Files) -> Call:
    future: Future[Files] = Future()
    future.set_result(files)
    return Call(future)


def failed(error: Exception) -> Call:
    future: Future[Files] = Future()
    future.set_exception(error)
    return Call(future)


def saving(folder: Path, start: Callable[[Path], Sequence[Call]]) -> Saving:
    manifest = Manifest(3, 0, {}, {}, {"auc": 0.5}, {"samples": 1})
    return Saving(folder, manifest, {"note": "text"}, {"losses.0": torch.ones(2)}, start, True)


def test_the_files_of_all_roles_make_a_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "step-3"
    sealed = saving(folder, lambda partial: [answered(write_text(partial, n, n)) for n in "ab"]).write()
    stored = Checkpoint.newest_good(folder, pytest.fail)
    assert stored.manifest.files == sealed.files
    assert set(sealed.files) == {"a", "b", "note", PROGRESS_FILE}
    assert stored.tensors(PROGRESS_FILE)["losses.0"].tolist() == [1, 1]


def remote(is_users: bool) -> RemoteError:
    failure = Failure("cannot write f: No space left on device", "CheckpointError", is_users, "host", False)
    return RemoteError(WORKER, failure)


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (remote(is_users=True), CheckpointError),
        (remote(is_users=False), wire.RemoteError),
        (LostError(WORKER, "gone"), LostError),
    ],
    ids=["no room", "bug", "lost"],
)
def test_nothing_is_left_where_a_role_fails(
    tmp_path: Path, error: Exception, raised: type[Exception]
) -> None:
    def start(partial: Path) -> list[Call]:
        return [answered(write_text(partial, "a", "a")), failed(error)]

    with pytest.raises(raised, match=r"No space left|does not answer"):
        saving(tmp_path / "step-3", start).write()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("fails", ["role", "master"])
def test_what_a_failed_one_has_left_is_removed_once_nobody_writes_any_more(
    tmp_path: Path, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = threading.Event()

    def write_late(partial: Path) -> Files:
        assert may_end.wait(PATIENCE_SECONDS)
        return write_text(partial, "late", "text")

    def fail(*_: object) -> Files:
        raise CheckpointError("cannot write note")

    with ThreadPoolExecutor(2) as pool:

        def start(partial: Path) -> list[Call]:
            late = Call(pool.submit(write_late, partial))
            return [failed(remote(is_users=True)), late] if fails == "role" else [late]

        if fails == "master":
            monkeypatch.setattr("workers.session.saving.write_text", fail)
        writing = pool.submit(saving(tmp_path / "step-3", start).write)
        assert not wait([writing], 0.05).done
        monkeypatch.undo()
        may_end.set()
        with pytest.raises(CheckpointError, match="cannot write"):
            writing.result(PATIENCE_SECONDS)
    assert not list(tmp_path.iterdir())
