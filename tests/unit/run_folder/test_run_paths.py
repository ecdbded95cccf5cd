"""The paths of a run, and one line for a folder that cannot be written."""

import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from hybrid.config import RunConfig, RunSection
from hybrid.errors import ConfigError, HybridError
from workers.run_folder import run_paths
from workers.run_folder.curves import temporary_font_cache
from workers.run_folder.run_paths import scratch_logs


@pytest.mark.parametrize("using", [lambda: scratch_logs("hybrid-run-"), temporary_font_cache])
def test_a_temporary_folder_that_takes_no_files(
    using: Callable[[], AbstractContextManager[object]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MPLCONFIGDIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    rule = "cannot be written: No such file or directory; free space there, or set TMPDIR to another folder"
    with pytest.raises(HybridError, match=f"^{tmp_path / 'none'}: {rule}$"), using():
        pytest.fail("there is no such folder")


class TestPaths:
    @pytest.fixture(autouse=True)
    def new_year(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(run_paths, "datetime", SimpleNamespace(now=lambda: datetime(2030, 1, 2, 3, 4, 5)))

    def test_a_run_is_named_after_itself_and_the_time(self) -> None:
        assert run_paths.run_path(RunConfig()) == Path("runs/run-20300102-030405")
        assert run_paths.run_path(RunConfig(run=RunSection(folder="here"))) == Path("here")

    @pytest.mark.parametrize("name", ["run", "v1.2"])
    def test_runs_of_the_same_second_are_numbered(self, name: str) -> None:
        config = RunConfig(run=RunSection(name=name))
        found = []
        for _ in range(3):
            found.append(Path(str(run_paths.run_path(config))))
            found[-1].mkdir(parents=True)
        first = f"runs/{name}-20300102-030405"
        assert list(map(str, found)) == [first, f"{first}.2", f"{first}.3"]

    def test_a_folder_that_holds_a_run_is_refused(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        run_paths.refuse_existing(run)
        run.mkdir()
        (run / "notes.txt").write_text("mine")
        run_paths.refuse_existing(run)
        (run / "metrics.jsonl").touch()
        with pytest.raises(ConfigError, match=rf"^run\.folder = '{run}': contains a run already"):
            run_paths.refuse_existing(run)
        with pytest.raises(ConfigError, match=r"notes\.txt': is a file; choose another"):
            run_paths.refuse_existing(run / "notes.txt")

    def test_the_own_command_can_be_called(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        script = tmp_path / "bin" / "hybrid"
        script.parent.mkdir()
        monkeypatch.setattr("sys.executable", str(script.with_name("python")))
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("PATH", "/usr/bin")
        assert run_paths.command_name() == "python -P -m workers"
        script.touch(mode=0o755)
        assert run_paths.command_name() == "bin/hybrid"
        monkeypatch.setenv("PATH", str(script.parent))
        assert run_paths.command_name() == "hybrid"
