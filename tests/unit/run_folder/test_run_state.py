"""The folder of a run: which is resumed, its fixed keys, its lock, and local files of a run in a store."""

import dataclasses
import os
import re
import signal
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.stores import BUCKET, Proxy, Store

from hybrid.config import RunConfig
from hybrid.config.loading import load_config, to_toml
from hybrid.errors import ConfigError, HybridError, StorageError
from hybrid.storage import files
from hybrid.storage.locked_folders import LOCK_FILE, folder_lock, lock_until_exit
from hybrid.storage.remote_path import StoragePath, parse_path
from hybrid.user_code.run_signature import load_run_config
from workers.run_folder import run_access
from workers.run_folder.run_access import (
    RunState,
    check_same_model,
    checkpoint_root,
    command_name,
    hold_run,
    is_finished,
    load_resumed_config,
    newest_run,
    refuse_existing,
    run_path,
    scratch_logs,
)
from workers.run_folder.run_files import RunFolder


def config(name: str = "run", folder: str = "") -> RunConfig:
    default = RunConfig()
    return default.replace(run=dataclasses.replace(default.run, name=name, folder=folder))


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def make_run(name: str) -> Path:
    folder = Path("runs") / name
    folder.mkdir(parents=True)
    (folder / "config.toml").touch()
    return folder


def test_newest_run_of_the_name_is_resumed() -> None:
    make_run("click-20260101-235959")
    newest = make_run("click-20260102-000000.10")
    make_run("click-20260102-000000.9")
    for other in ("click-through", "clic", "xclick"):
        make_run(f"{other}-20260104-000000")
    make_run("click-best")
    assert newest_run(config(name="click")) == newest


def test_no_run_of_the_name_is_found() -> None:
    assert newest_run(config(name="click")) is None
    (Path("runs") / "click-20260104-000000/logs").mkdir(parents=True)  # failed before its first step
    make_run("axb-20260101-000000")
    for name in ("click", "a.b", "a*"):
        assert newest_run(config(name=name)) is None


def test_a_chosen_folder_is_the_only_candidate() -> None:
    make_run("run-20260101-000000")
    chosen = config(folder="chosen")
    assert newest_run(chosen) is None
    Path("chosen").mkdir()
    Path("chosen/config.toml").touch()
    assert newest_run(chosen) == Path("chosen")


@pytest.mark.parametrize("setting", ["train.epochs=4", "train.max_steps=9", "train.patience=2"])
def test_a_run_with_a_result_is_finished_unless_it_is_prolonged(setting: str) -> None:
    run = make_run("run-20260101-000000")
    (run / "config.toml").write_text(to_toml(load_config(None, ["train.epochs=3"])))
    same, more = (load_config(None, ["train.epochs=3", *extra]) for extra in ([], [setting]))
    assert not is_finished(run, same)
    (run / "result.json").touch()
    assert is_finished(run, same)
    assert not is_finished(run, more)


def test_a_resumed_run_keeps_its_model() -> None:
    run = make_run("run-20260101-000000")
    (run / "config.toml").write_text("[embedding]\ndim = 12\n[train]\nepochs = 2\n")
    same = load_resumed_config(run, ["train.epochs=3"])
    assert (same.embedding.dim, same.train.epochs) == (12, 3)
    check_same_model(run, same)


def test_a_checkpoint_is_no_run_and_a_fifo_no_configuration() -> None:
    run = make_run("run-20260101-000000")
    (run / "manifest.json").touch()
    with pytest.raises(ConfigError, match=r"--resume = .*: is a checkpoint"):
        load_resumed_config(run, [])
    (run / "config.toml").unlink()
    os.mkfifo(run / "config.toml")
    with pytest.raises(ConfigError, match="--resume"):
        load_resumed_config(run, [])
    with pytest.raises(ConfigError, match=r"config\.toml: "):
        load_run_config(run / "config.toml")
    with ThreadPoolExecutor(1) as threads:
        threads.submit((run / "config.toml").write_text, "train.epochs = 7")
        assert load_config(run / "config.toml").train.epochs == 7


OF_THE_MODEL = """
    run.seed=2 data.format="csv" data.validation="random(0.2)" data.dense=["price"] data.numeric_scaling=none
    data.vocabulary="hash" data.vocabulary="hash(99)" embedding.dim=8 embedding.optimizer="sgd"
    tables.C1.dim=8 tables.C1.features=["C1","C2"] dense.net="dcn_v2" train.batch_size=512
    embedding.dtype="bfloat16" tables.C1.dtype="bfloat16"
"""
OF_THE_RUN = """
    train.epochs=3 train.update="async" cluster.workers=5 embedding.placement="row"
    dense.compile="inductor" schedule.kind="cosine" tables.C1.placement=row run.name=other
"""


@pytest.mark.parametrize("was_set_before", [False, True])
@pytest.mark.parametrize("setting", OF_THE_MODEL.split())
def test_keys_of_the_model_cannot_change(setting: str, was_set_before: bool) -> None:
    run, (key, _, _) = make_run("run-20260101-000000"), setting.partition("=")
    csv = ['data.path="x"', 'data.sparse=["C1"]'] if key == "data.format" else []
    with_it, without_it = load_config(None, [setting, *csv]), load_config(None, csv)
    before, now = (with_it, without_it) if was_set_before else (without_it, with_it)
    (run / "config.toml").write_text(to_toml(before))
    check_same_model(run, before)
    with pytest.raises(ConfigError, match=rf"^{re.escape(key)}( = .*)?: "):
        check_same_model(run, now)


@pytest.mark.parametrize("setting", OF_THE_RUN.split())
def test_other_keys_may_change(setting: str) -> None:
    run = make_run("run-20260101-000000")
    load_resumed_config(run, [setting])


def test_a_column_section_of_defaults_changes_nothing() -> None:
    run = make_run("run-20260101-000000")
    csv = ["data.format=csv", "data.path=x", "data.sparse=age"]
    (run / "config.toml").write_text(to_toml(load_config(None, csv)))
    check_same_model(run, load_config(None, [*csv, "columns.age.kind=value"]))
    with pytest.raises(ConfigError, match=r"^columns\.age\.kind = 'hour': "):
        check_same_model(run, load_config(None, [*csv, "columns.age.kind=hour"]))


def test_unwritable_temporary_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(HybridError, match=f"^{tmp_path / 'none'}: .*TMPDIR"), scratch_logs("hybrid-run-"):
        pytest.fail("there is no such folder")


def test_folder_of_a_killed_command_is_removed_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("killed", "running", "reported", "starting"):
        (tmp_path / f"hybrid-run-{name}/logs").mkdir(parents=True)
        if name != "reported":  # a command that ends removes its lock
            (tmp_path / f"hybrid-run-{name}/{LOCK_FILE}").touch()
            os.utime(tmp_path / f"hybrid-run-{name}/{LOCK_FILE}", (0, 1e10 * (name == "starting")))
    with folder_lock(tmp_path / "hybrid-run-running"), scratch_logs("hybrid-run-") as own:
        kept = {path.name.removeprefix("hybrid-run-") for path in tmp_path.iterdir() if path != own}
        assert kept == {"running", "reported", "starting"}


@pytest.mark.parametrize("name", ["run", "v1.2"])
def test_new_runs_have_name_and_time_and_are_numbered(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = datetime(2030, 1, 2, 3, 4, 5)
    monkeypatch.setattr(run_access, "datetime", SimpleNamespace(now=lambda: now))
    paths = []
    for _ in range(3):
        path = Path(str(run_path(config(name))))
        path.mkdir(parents=True)
        (path / "config.toml").touch()
        assert newest_run(config(name)) == path
        paths.append(str(path))
    first = f"runs/{name}-20300102-030405"
    assert paths == [first, f"{first}.2", f"{first}.3"]
    assert run_path(config(folder="chosen")) == Path("chosen")


def test_a_folder_with_a_run_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    refuse_existing(run)
    run.mkdir()
    (run / "notes.txt").write_text("mine")
    refuse_existing(run)
    (run / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match=rf"^run\.folder = '{run}': "):
        refuse_existing(run)
    with pytest.raises(ConfigError, match=r"notes\.txt': "):
        refuse_existing(run / "notes.txt")


def test_commands_for_the_user_can_be_called(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "bin" / "hybrid"
    script.parent.mkdir()
    monkeypatch.setattr("sys.executable", str(script.with_name("python")))
    monkeypatch.setenv("PATH", "/usr/bin")
    assert command_name() == "python -P -m hybrid"
    script.touch(mode=0o755)
    assert command_name() == "bin/hybrid"
    monkeypatch.setenv("PATH", str(script.parent))
    assert command_name() == "hybrid"


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
    with pytest.raises(ConfigError, match="toml/run': "):
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
        raise HybridError("first")

    with pytest.raises(HybridError, match=r"^first$"), hold_run(run, False) as (here, _):
        fail(here)
    assert files.read_text(run / "metrics.jsonl") == "lines"
    with Proxy(store) as proxy:
        refusing = parse_path(f"{run}?scheme=http&endpoint_override={proxy.address}")
        proxy.plan = lambda method, path: "403"
        with pytest.raises(HybridError, match=r"^first$"), hold_run(refusing, False) as (here, _):
            fail(here)
        assert f"; {here} has all files\n" in capsys.readouterr().err
        with pytest.raises(StorageError), hold_run(refusing, is_resumed=False):
            pass


@pytest.mark.parametrize("name", ["logs", "profile"])
def test_a_folder_that_is_a_link_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path)
    with pytest.raises(HybridError, match=f"^{tmp_path}/run/{name}: "):
        with hold_run(tmp_path / "run", is_resumed=False):
            raise AssertionError
