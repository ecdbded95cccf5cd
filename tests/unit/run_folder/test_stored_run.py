"""A run in a store: its folder here is one launch's alone, before anything is fetched or sent."""

from pathlib import Path

import pytest
from support.stores import BUCKET, Store

from hybrid.errors import ConfigError, HybridError, OutageError
from hybrid.storage import files
from hybrid.storage.remote_path import StoragePath, parse_path
from workers.run_folder import remote_run, run_lock
from workers.run_folder.remote_run import checkpoint_root, hold_run
from workers.run_folder.run_files import RunFolder
from workers.run_folder.run_state import RunState


@pytest.fixture
def run(store: Store, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> StoragePath:
    """A run of which the store has the configuration."""
    monkeypatch.setattr(run_lock, "_WAIT_SECONDS", 0.0)
    run = parse_path(f"s3://{BUCKET}/{request.node.name}")
    files.write_bytes(run / "config.toml", b"as stored")
    return run


def test_who_is_refused_neither_fetches_nor_sends(run: StoragePath) -> None:
    with hold_run(run, is_resumed=False) as (here, _):
        (here / "config.toml").write_text("live")
        (here / "metrics.jsonl").write_text("a line that is being wr")
        with pytest.raises(ConfigError, match="is in use by another launch"):
            with hold_run(run, is_resumed=True):
                raise AssertionError
        assert (here / "config.toml").read_text() == "live"
        assert not files.exists(run / "metrics.jsonl")
        assert files.read_text(run / "config.toml") == "as stored"
        (here / "metrics.jsonl").write_text("whole lines")
    assert files.read_text(run / "metrics.jsonl") == "whole lines"
    assert checkpoint_root(here) == run


def test_a_folder_of_somebody_else_names_no_store(run: StoragePath, tmp_path: Path) -> None:
    with hold_run(run, is_resumed=False) as (here, _):
        for folder in (tmp_path / "foreign", here.with_name("foreign"), here.with_name(f"{here.name}0")):
            folder.mkdir(mode=0o700)
            (folder / ".store").write_text(str(run))
            with pytest.raises(HybridError, match=rf"^{folder}/\.store: "):
                RunState.of(folder)
            with pytest.raises(HybridError, match=rf"^{folder}/\.store: "):
                RunFolder(folder)
        here.chmod(0o755)
        with pytest.raises(HybridError, match=rf"^{here}/\.store: "):
            RunState.of(here)
        here.chmod(0o700)


def test_one_that_goes_on_has_what_the_store_has(run: StoragePath) -> None:
    with hold_run(run, is_resumed=False) as (here, _):
        (here / "config.toml").write_text("of a run elsewhere")
    files.write_bytes(run / "config.toml", b"newer")
    with hold_run(run, is_resumed=True) as (here, _):
        assert (here / "config.toml").read_text() == "newer"


def test_an_error_is_what_is_said_though_the_store_takes_nothing_then(
    run: StoragePath, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(here: Path) -> None:
        raise OutageError("s3: cannot be listed")

    monkeypatch.setattr(remote_run, "upload", refuse)
    with pytest.raises(HybridError, match=r"^the first cause$"), hold_run(run, False) as (here, _):
        raise HybridError("the first cause")
    assert capsys.readouterr().err == f"s3: cannot be listed; {here} has all files\n"
    with pytest.raises(OutageError), hold_run(run, is_resumed=False):
        pass


def test_what_the_error_sends_is_there(run: StoragePath) -> None:
    def fail(here: Path) -> None:
        (here / "metrics.jsonl").write_text("lines")
        raise HybridError("a role failed")

    with pytest.raises(HybridError), hold_run(run, is_resumed=False) as (here, _):
        fail(here)
    assert files.read_text(run / "metrics.jsonl") == "lines"


def test_a_folder_of_this_machine_is_itself(tmp_path: Path) -> None:
    with hold_run(tmp_path / "run", is_resumed=False) as (here, _):
        assert here == tmp_path / "run"
        assert [each.name for each in here.iterdir()] == [".lock"]


@pytest.mark.parametrize("name", ["logs", "profile"])
def test_a_folder_that_leads_elsewhere_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path)
    with pytest.raises(HybridError, match=rf"^{tmp_path}/run/{name}: is a symbolic link"):
        with hold_run(tmp_path / "run", is_resumed=False):
            raise AssertionError
