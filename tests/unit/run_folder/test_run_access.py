"""Access to a run: one launch at a time, and the local files of a run in a store."""

import os
import signal
import threading
from pathlib import Path

import pytest
from support.stores import BUCKET, Proxy, Store

from hybrid.config import RunConfig
from hybrid.errors import ConfigError, HybridError, StorageError
from hybrid.storage import files
from hybrid.storage.locked_folders import folder_lock, lock_until_exit
from hybrid.storage.remote_path import StoragePath, parse_path
from workers.run_folder.run_access import RunState, checkpoint_root, hold_run
from workers.run_folder.run_files import RunFolder


def killed_launch(folder: Path) -> int:
    """Leave the lock of a killed launch; return the descriptor that one of its roles still has."""
    with folder_lock(folder) as descriptor:
        kept = os.dup(descriptor)
        (folder / ".lock").rename(folder / "aside")
    (folder / "aside").rename(folder / ".lock")
    return kept


def test_lock_waits_for_roles_of_a_killed_launch(tmp_path: Path) -> None:
    timer = threading.Timer(0.05, os.close, [killed_launch(tmp_path)])
    timer.start()
    with folder_lock(tmp_path):
        pass
    timer.join()


def test_lock_ends_with_its_process(tmp_path: Path) -> None:
    ready, ready_writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        lock_until_exit(tmp_path, "key")
        if os.fork():  # a child that outlives this process, as those of a DataLoader
            os.write(ready_writer, b"x")
        signal.pause()
        os._exit(0)
    assert os.read(ready, 1)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(ready)
    os.close(ready_writer)
    assert (tmp_path / ".lock").exists()
    try:
        with folder_lock(tmp_path):
            pass
    finally:
        os.killpg(pid, signal.SIGKILL)


def test_a_folder_is_made_and_removed_if_unused(tmp_path: Path) -> None:
    for name, file in (("new", ".lock"), ("used", "config.toml")):
        with folder_lock(tmp_path / name):
            (tmp_path / name / file).touch()
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["used", "used/config.toml"]
    with pytest.raises(ConfigError, match=r"toml/run': .*Not a directory"):
        with folder_lock(tmp_path / "used/config.toml/run"):
            raise AssertionError


@pytest.fixture
def run(store: Store, request: pytest.FixtureRequest) -> StoragePath:
    """A run whose configuration is in a store."""
    run = parse_path(f"s3://{BUCKET}/{request.node.name}")
    files.write_bytes(run / "config.toml", b"as stored")
    return run


def test_a_refused_launch_neither_fetches_nor_uploads(run: StoragePath) -> None:
    with hold_run(run, is_resumed=False) as (here, _):
        (here / "config.toml").write_text("live")
        (here / "metrics.jsonl").write_text("a line that is being wr")
        with pytest.raises(ConfigError, match="is in use"):
            with hold_run(run, is_resumed=True):
                raise AssertionError
        assert (here / "config.toml").read_text() == "live"
        assert not files.exists(run / "metrics.jsonl")
        assert files.read_text(run / "config.toml") == "as stored"
        (here / "metrics.jsonl").write_text("complete lines")
    assert files.read_text(run / "metrics.jsonl") == "complete lines"
    assert checkpoint_root(here) == run


def test_only_a_folder_that_the_program_made_may_name_a_store(run: StoragePath, tmp_path: Path) -> None:
    with hold_run(run, is_resumed=False) as (here, _):
        for folder in (tmp_path / "foreign", here.with_name("foreign"), here.with_name(f"{here.name}0")):
            folder.mkdir(mode=0o700)
            (folder / ".store").write_text(f"{run}\n" if folder.parent == tmp_path else str(run))
            for use in (RunState.of, lambda path: RunFolder(path, RunConfig())):
                with pytest.raises(HybridError, match=rf"^{folder}/\.store: "):
                    use(folder)
            (folder / ".store").unlink()
            os.mkfifo(folder / ".store")
            with pytest.raises(HybridError, match=rf"^{folder}/\.store: "):
                RunState.of(folder)
        here.chmod(0o755)
        with pytest.raises(HybridError, match=rf"^{here}/\.store: "):
            RunState.of(here)
        here.chmod(0o700)


def test_a_resumed_run_has_the_files_of_the_store(run: StoragePath) -> None:
    with hold_run(run, is_resumed=False) as (here, _):
        (here / "config.toml").write_text("of a remote run")
    files.write_bytes(run / "config.toml", b"newer")
    with hold_run(run, is_resumed=True) as (here, _):
        assert (here / "config.toml").read_text() == "newer"


def test_an_error_is_reported_after_an_upload_that_may_fail(
    run: StoragePath, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(folder: Path) -> None:
        (folder / "metrics.jsonl").write_text("lines")
        raise HybridError("the first error")

    with pytest.raises(HybridError, match=r"^the first error$"), hold_run(run, False) as (here, _):
        fail(here)
    assert files.read_text(run / "metrics.jsonl") == "lines"
    with Proxy(store) as proxy:
        refusing = parse_path(f"{run}?scheme=http&endpoint_override={proxy.address}")
        proxy.plan = lambda method, path: "403"
        with pytest.raises(HybridError, match=r"^the first error$"), hold_run(refusing, False) as (here, _):
            fail(here)
        assert f"; {here} has all files\n" in capsys.readouterr().err
        with pytest.raises(StorageError), hold_run(refusing, is_resumed=False):
            pass


@pytest.mark.parametrize("name", ["logs", "profile"])
def test_a_folder_that_is_a_link_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path)
    with pytest.raises(HybridError, match=rf"^{tmp_path}/run/{name}: is a symbolic link"):
        with hold_run(tmp_path / "run", is_resumed=False):
            raise AssertionError
