"""The limit of open files: raised where it can be, refused in one line where it is too low."""

import os
import resource
import secrets
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import ROOT

from hybrid.config import ClusterSection
from hybrid.errors import HybridError
from workers.rendezvous.file_limit import allow_open_files, files_needed

CLUSTER = ClusterSection(trainers=2, workers=2)


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The limits that this process has, the newest last, as far as the code can tell."""
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    found = [(256, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda which: found[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda which, values: found.append(values))
    return found


def test_the_soft_limit_becomes_the_hard_one(limits: list[tuple[int, int]]) -> None:
    allow_open_files(CLUSTER)
    assert limits == [(256, 4096), (4096, 4096)]
    allow_open_files(CLUSTER)
    assert len(limits) == 2


def test_too_low_a_hard_limit_is_refused(limits: list[tuple[int, int]]) -> None:
    limits.append((64, 100))
    with pytest.raises(HybridError) as caught:
        allow_open_files(CLUSTER)
    assert str(caught.value) == (
        "a role of 1 master, 2 trainer(s), 2 worker(s) needs about 156 open files, and 100 are allowed "
        "(ulimit -Hn); raise that, or start fewer roles"
    )


def test_what_is_needed_grows_with_the_roles_and_how_they_connect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    roles = ((2, 2), (2, 3), (32, 31))
    needed = [files_needed(ClusterSection(trainers=t, workers=w)) for t, w in roles]
    assert needed == [156, 165, 687]
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert files_needed(CLUSTER) == 312


@pytest.mark.parametrize("command", ["launch", "run own:main", "master"])
def test_every_command_that_starts_roles_says_so_before_it_starts_any(command: str, tmp_path: Path) -> None:
    line = f"ulimit -n 60; exec {sys.executable} -m workers {command}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HYBRID_SECRET": secrets.token_hex(32)}
    ran = subprocess.run(
        ["bash", "-c", line], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.endswith("60 are allowed (ulimit -Hn); raise that, or start fewer roles\n")
    assert not list(tmp_path.iterdir())
