"""A run in a store: locking its local folder, fetching, and uploading."""

from pathlib import Path

import pytest
from support.stores import BUCKET, Proxy, Store

from hybrid.errors import ConfigError, HybridError, StorageError
from hybrid.storage import files
from hybrid.storage.remote_path import StoragePath, parse_path
from workers.run_folder.run_access import checkpoint_root, hold_run
from workers.run_folder.run_files import RunFolder
from workers.run_folder.run_state import RunState


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
        with pytest.raises(ConfigError, match="is in use by another launch"):
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
            with pytest.raises(HybridError, match=rf"^{folder}/\.store: "):
                RunState.of(folder)
            with pytest.raises(HybridError, match=rf"^{folder}/\.store: "):
                RunFolder(folder)
        here.chmod(0o755)
        with pytest.raises(HybridError, match=rf"^{here}/\.store: "):
            RunState.of(here)
        here.chmod(0o700)


def test_a_resumed_run_has_the_files_of_the_store(run: StoragePath) -> None:
    with hold_run(run, is_resumed=False) as (here, _):
        (here / "config.toml").write_text("of a run elsewhere")
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


def test_a_local_run_has_no_other_folder(tmp_path: Path) -> None:
    with hold_run(tmp_path / "run", is_resumed=False) as (here, _):
        assert here == tmp_path / "run"
        assert [each.name for each in here.iterdir()] == [".lock"]


@pytest.mark.parametrize("name", ["logs", "profile"])
def test_a_folder_that_is_a_link_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path)
    with pytest.raises(HybridError, match=rf"^{tmp_path}/run/{name}: is a symbolic link"):
        with hold_run(tmp_path / "run", is_resumed=False):
            raise AssertionError
