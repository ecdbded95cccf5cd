"""Writing a checkpoint of all roles: all files or nothing; and whether hosts have the memory for copies."""

import errno
import os
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import Call, write_checkpoint
from support.shards import PATIENCE_SECONDS, specs

from hybrid import transport
from hybrid.checkpoint.checkpoint_folders import MANIFEST_FILE, PROGRESS_FILE, Files, Manifest, write_text
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.config import RunConfig
from hybrid.config.loading import CONFIG_FILE
from hybrid.embedding.placement import place
from hybrid.errors import CheckpointError
from hybrid.storage.remote_path import StoragePath
from hybrid.topology import Role, RoleKind
from hybrid.transport import Failure, LostError, ProcessStatus, RemoteError
from workers.controller.deployment import HeldCheckpoint, memory_shortage
from workers.controller.session import Session

WORKER = Role(RoleKind.WORKER, 0)


def ended(result: Files | Exception) -> Call:
    future: Future[Files] = Future()
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
    return Call(future)


def saving(folder: Path, start: Callable[[StoragePath], Sequence[Call]]) -> HeldCheckpoint:
    manifest = Manifest(3, 0, {}, {}, {"auc": 0.5}, {"samples": 1})
    return HeldCheckpoint(folder, manifest, {"note": "text"}, {"losses.0": torch.ones(2)}, start, True)


def test_a_checkpoint_has_the_files_of_all_roles(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "step-3"
    manifest = saving(folder, lambda partial: [ended(write_text(partial, n, n)) for n in "ab"]).write()
    stored = Checkpoint.newest_valid(folder, pytest.fail)
    assert stored.manifest.files == manifest.files
    assert set(manifest.files) == {"a", "b", "note", PROGRESS_FILE}
    assert stored.tensors(PROGRESS_FILE)["losses.0"].tolist() == [1, 1]


def saved_with_vocabularies(folder: Path, source: Path) -> HeldCheckpoint:
    source.write_text("values")
    return replace(saving(folder, lambda _: []), shared={"SHA.parquet": source})


def test_vocabularies_are_shared_by_the_checkpoints_of_a_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in ("step-3", "step-4"):
        stored = saved_with_vocabularies(run / "checkpoints" / step, tmp_path / "source").write()
        assert set(stored.files) == {"note", PROGRESS_FILE}
    shared = [(path.name, path.read_text()) for path in (run / "vocabularies").iterdir()]
    assert shared == [("SHA.parquet", "values")]
    alone = saved_with_vocabularies(tmp_path / "here" / "mine", tmp_path / "source").write()
    assert alone.files["vocabularies.parquet"][0] == len("values")
    Checkpoint.newest_valid(tmp_path / "here" / "mine", pytest.fail)
    assert {path.name for path in tmp_path.iterdir()} == {"run", "here", "source"}


def test_failing_vocabularies_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("hybrid.storage.files.copy", refuse)
    with pytest.raises(CheckpointError, match=r"/vocabularies/SHA\.parquet: "):
        saved_with_vocabularies(tmp_path / "checkpoints" / "step-3", tmp_path / "source").write()
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "source"]


def remote(is_self_contained: bool) -> RemoteError:
    failure = Failure(
        "cannot write f: No space left on device", "CheckpointError", is_self_contained, "host", False
    )
    return RemoteError(WORKER, failure)


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (remote(is_self_contained=True), CheckpointError),
        (remote(is_self_contained=False), transport.RemoteError),
        (LostError(WORKER, "gone"), LostError),
    ],
    ids=["no room", "bug", "lost"],
)
def test_nothing_is_left_if_a_role_fails(tmp_path: Path, error: Exception, raised: type[Exception]) -> None:
    def start(partial: StoragePath) -> list[Call]:
        return [ended(write_text(partial, "a", "a")), ended(error)]

    with pytest.raises(raised):
        saving(tmp_path / "step-3", start).write()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("fails", ["role", "master"])
def test_removal_follows_the_last_write(tmp_path: Path, fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = threading.Event()

    def write_late(partial: StoragePath) -> Files:
        assert may_end.wait(PATIENCE_SECONDS)
        return write_text(partial, "late", "text")

    def fail(*_: object) -> Files:
        raise CheckpointError("cannot write note")

    with ThreadPoolExecutor(2) as pool:

        def start(partial: StoragePath) -> list[Call]:
            late = Call(pool.submit(write_late, partial))
            return [ended(remote(is_self_contained=True)), late] if fails == "role" else [late]

        if fails == "master":
            monkeypatch.setattr("workers.controller.deployment.write_text", fail)
        writing = pool.submit(saving(tmp_path / "step-3", start).write)
        assert not wait([writing], 0.05).done
        monkeypatch.undo()
        may_end.set()
        with pytest.raises(CheckpointError):
            writing.result(PATIENCE_SECONDS)
    assert not list(tmp_path.iterdir())


class RecordingStub:
    """A stub that keeps the arguments of its calls."""

    def __init__(self) -> None:
        self.paths: list[Path] = []

    def call(self, method: object, folder: Path, *_: object, timeout_seconds: float) -> Call:
        self.paths.append(folder)
        return ended({})


def test_roles_load_from_an_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may run in other folders than the master."""
    monkeypatch.chdir(tmp_path)
    folder = write_checkpoint(Path("run/step-1"))
    (folder / CONFIG_FILE).write_text("")
    stored = Checkpoint(folder, Manifest.read(folder / MANIFEST_FILE))
    tables, trainer = RecordingStub(), RecordingStub()
    session: Any = Session.__new__(Session)
    session.hosted, session.trainers, session.config = [tables], [trainer], RunConfig()
    session.restore(stored)
    assert tables.paths == trainer.paths == [tmp_path / "run/step-1"]


WORKERS = [Role(RoleKind.WORKER, index) for index in range(2)]
PLACEMENT = place(specs("row"), 2)
BYTES = [sum(shard.num_bytes for shard in PLACEMENT.of_worker(index)) for index in range(2)]


class FakePing:
    def __init__(self, vitals: ProcessStatus) -> None:
        self._vitals = vitals

    def done(self, wait_seconds: float = 0.0) -> bool:
        return True

    def wait(self) -> ProcessStatus:
        return self._vitals


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Bytes free by limit; and the limits of each worker. All hosts have the same name."""
    limits: dict[str, Any] = {"of": ["a", "b"], "a": 0, "b": 0, "all": 1 << 50}

    def ping(role: Role, timeout_seconds: float) -> FakePing:
        free = {name: limits[name] for name in limits["of"][role.index]}
        return FakePing(ProcessStatus("host", free))

    monkeypatch.setattr("hybrid.transport.ping", ping)
    return limits


@pytest.mark.parametrize(
    ("of", "names"),
    [
        (["a", "b"], "worker 0"),
        (["a", "a"], "worker 0, worker 1"),
        ([["all", "a"], ["all", "b"]], "worker 0"),
        ([["all", "a"], ["all", "b", "a"]], "worker 0, worker 1"),
    ],
    ids=["two hosts", "one host", "two containers of a host", "nested groups of a host"],
)
def test_tables_that_exceed_a_limit_are_reported(free: dict[str, Any], of: list[Any], names: str) -> None:
    needed = BYTES[0] if names == "worker 0" else sum(BYTES)
    free |= {"of": of, "a": needed - 1, "b": 1 << 40}
    message = memory_shortage(PLACEMENT, WORKERS)
    assert message is not None
    assert re.match(f"{re.escape(names)} on host: tables need .* the largest table is c with", message)
    free["a"] = needed
    assert memory_shortage(PLACEMENT, WORKERS) is None
    assert memory_shortage(PLACEMENT, WORKERS, 0.8) is not None
