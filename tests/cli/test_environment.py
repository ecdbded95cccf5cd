"""scripts/environment with a fake Python: when it installs packages, and what an interruption leaves."""

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.commands import ROOT

# A fake Python: claims to be recent, creates environments by copying itself, and logs its calls.
PYTHON = """#!/usr/bin/env bash
set -eu
log=$(dirname "$0")/calls
case "$*" in
    -c*) exit "${TOO_OLD:-0}" ;;
    "-m venv"*)
        target=${*: -1}
        [[ "$*" != *--clear* ]] || rm -rf "$target"
        mkdir -p "$target/bin" && cp "$0" "$target/bin/python" ;;
    "-m pip install"*)
        [[ $PIP_CONSTRAINT == scripts/constraints.txt ]] && printf '%s\\n' "${*: -1}" >>"$log"
        printf '%s\\n' "Collecting torch==2.13.0 (from it)" "  Downloading torch.whl (170.1 MB)" \\
            "Collecting rich" "  Downloading rich.whl (300 kB)" "Installing collected packages: rich, torch"
        exit "${PIP_FAILS:-0}" ;;
esac
"""


@dataclass(frozen=True)
class Project:
    """A copy of the files that the script reads, in a folder with a blank in its name."""

    folder: Path

    def call(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Call the script from another folder."""
        environment = {"PATH": f"{self.folder / 'python'}:/usr/bin:/bin", **variables}
        script = [str(self.folder / "scripts/environment"), *arguments]
        return subprocess.run(script, cwd="/", env=environment, capture_output=True, text=True, timeout=30)

    @property
    def installations(self) -> list[str]:
        """What pip has installed into the present environment, call by call."""
        calls = self.folder / ".venv/bin/calls"
        return calls.read_text().splitlines() if calls.exists() else []


@pytest.fixture
def project(tmp_path: Path) -> Project:
    folder = tmp_path / "a project"
    (folder / "python").mkdir(parents=True)
    for name in ("scripts/environment", "scripts/constraints.txt", "pyproject.toml"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    for name in ("python3", "python3.99"):
        (folder / "python" / name).write_text(PYTHON)
        (folder / "python" / name).chmod(0o755)
    return Project(folder)


def test_packages_are_installed_once_with_progress(project: Project) -> None:
    first, second = project.call(), project.call()
    assert first.returncode == 0
    assert "scripts/environment: Downloading torch.whl (170.1 MB)\n" in first.stderr
    assert (second.returncode, second.stdout, second.stderr) == (0, "", "")
    assert project.installations == ["."]


def test_extras_are_added_and_stay(project: Project) -> None:
    for extra in ("", "dev", "docs", "", "dev", "docs"):
        assert project.call(*([extra] if extra else [])).returncode == 0
    assert project.installations == [".", ".[dev]", ".[dev,docs]"]
    with (project.folder / "scripts/constraints.txt").open("a") as file:
        print("# changed", file=file)
    assert project.call().returncode == 0
    assert project.installations[3:] == [".[dev,docs]"]


def test_interrupted_extra_is_repeated(project: Project) -> None:
    project.call()
    assert project.call("dev", PIP_FAILS="1").returncode == 1
    assert project.call().returncode == 0
    assert project.installations == ["."]


def test_failed_installation_is_repeated(project: Project) -> None:
    failed = project.call(PIP_FAILS="1")
    assert failed.returncode == 1
    assert "the installation failed" in failed.stderr
    (project.folder / ".venv/half-installed").touch()
    assert project.call().returncode == 0
    assert not (project.folder / ".venv/half-installed").exists()
    assert project.call().stderr == ""


def test_concurrent_calls_install_once(project: Project) -> None:
    with ThreadPoolExecutor(4) as pool:
        ended = list(pool.map(lambda _: project.call(), range(4)))
    assert [e.returncode for e in ended] == [0] * 4
    assert len(project.installations) == 1


@pytest.mark.parametrize("change", ["constraints", "pyproject", "python", "folder"])
def test_environment_follows_changes(change: str, project: Project) -> None:
    project.call()
    (project.folder / ".venv/former").touch()
    files = {"constraints": "scripts/constraints.txt", "pyproject": "pyproject.toml"}
    if change in files:
        with (project.folder / files[change]).open("a") as file:
            print("# changed", file=file)
    if change == "folder":
        project = Project(project.folder.rename(project.folder.with_name("moved")))
    assert project.call(**({"PYTHON": "python3.99"} if change == "python" else {})).returncode == 0
    assert (project.folder / ".venv/former").exists() == (change in files)
    assert len(project.installations) == (2 if change in files else 1)
    assert project.call().stderr == ""


def test_old_python_is_refused_in_one_line(project: Project) -> None:
    ended = project.call(TOO_OLD="1")
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert line.startswith("scripts/environment: needs Python 3.11 or newer")
    assert not (project.folder / ".venv").exists()
