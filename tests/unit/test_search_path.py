"""A command imports modules of the working directory only if the user names them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import forked
from support.commands import HYBRID, ROOT

from hybrid.module_imports import exclude_working_directory
from workers.cli import main
from workers.launching.fork_server import ForkServer


@pytest.fixture
def crowded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working directory with modules named as those of the project, Python and packages."""
    for name in ("hybrid", "workers", "torch"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise AssertionError(__file__)\n")
    for name in ("random", "json", "psutil"):
        (tmp_path / f"{name}.py").write_text("raise AssertionError(__file__)\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("before", ["", None, "link"])
def test_working_directory_is_searched_only_if_the_user_names_it(
    before: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "link").symlink_to("here")
    monkeypatch.chdir(tmp_path / "here")
    first = {"": "", None: os.getcwd(), "link": str(tmp_path / "link")}[before]
    for named in ("/a:", str(tmp_path / "link")):  # an empty entry names no folder
        monkeypatch.setenv("PYTHONPATH", named)
        monkeypatch.setattr(sys, "path", searched := [first, "/a", os.getcwd(), "/b"])
        exclude_working_directory()
        assert sys.path == (["/a", "/b"] if named == "/a:" else searched)


def test_numba_ignores_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They name a folder of compiled code."""
    monkeypatch.chdir(tmp_path)
    settings = Path(".numba_config.yaml")
    settings.write_text("cache_dir: theirs\n")
    with pytest.raises(SystemExit, match=str(settings)):
        main(["plan"])


def test_a_command_imports_nothing_of_the_working_directory(crowded: Path) -> None:
    (crowded / "hybrid/__init__.py").unlink()
    (crowded / "hybrid").rmdir()  # python -m looks for the command itself there, before any of it can run
    environment = {**os.environ, "PYTHONPATH": f":{ROOT}"}
    ended = subprocess.run(
        [*HYBRID, "config"], env=environment, capture_output=True, text=True, timeout=20, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("[run]")


def test_fork_servers_ignore_the_working_directory(crowded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(crowded), *sys.path])
    exclude_working_directory()
    with ForkServer(["support.forked"]) as server:
        assert forked.end_of(server, forked.exit_with, 0).exit_code == 0
