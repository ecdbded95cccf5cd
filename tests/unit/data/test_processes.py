"""Processes for work on files: what they answer, how they fail, and that none is left."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from hybrid.data.processes import Processes, Told
from hybrid.errors import ConfigError, DataError

TIMEOUT_SECONDS = 20.0
TELL_NOBODY: Callable[[int, int, float], None] = lambda job, rows, share: None  # noqa: E731


def double(job: int, told: Told) -> int:
    told(job, 0.5)
    if job == 3:
        raise ConfigError("data.path", "is wrong", job)
    return 2 * job


def end_itself(job: int, told: Told) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return job


def wait_for_ever(job: Path, told: Told) -> None:
    job.with_suffix(f".{os.getpid()}").touch()
    time.sleep(10 * TIMEOUT_SECONDS)


def modules(job: int, told: Told) -> list[str]:
    return [*sys.modules]


@pytest.fixture(autouse=True)
def found_by_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let them import this module."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    for each in (double, end_itself, wait_for_ever, modules):
        monkeypatch.setattr(each, "__module__", Path(__file__).stem)
    monkeypatch.setitem(sys.modules, Path(__file__).stem, sys.modules[__name__])


@pytest.mark.parametrize("count", [1, 2])
def test_answers_come_in_the_order_of_the_jobs(count: int) -> None:
    told: list[tuple[int, int, float]] = []
    with Processes(count) as processes:
        assert list(processes.map(double, [5, 4, 9], lambda *each: told.append(each))) == [10, 8, 18]
        assert sorted(told) == [(0, 5, 0.5), (1, 4, 0.5), (2, 9, 0.5)]
        answers = processes.map(double, [7, 3, 3, 1], TELL_NOBODY)
        assert next(answers) == 14
        with pytest.raises(ConfigError, match=r"data\.path = 3: is wrong"):
            next(answers)


def test_one_that_dies_is_told() -> None:
    with Processes(2) as processes, pytest.raises(DataError, match="has ended by signal 9; where memory"):
        list(processes.map(end_itself, [1, 2], TELL_NOBODY))


def test_none_imports_torch() -> None:
    with Processes(2) as processes:
        for names in processes.map(modules, [1, 2], TELL_NOBODY):
            assert "hybrid.data.processes" in names
            assert "torch" not in names


def test_all_end_when_asked_to_stop(tmp_path: Path) -> None:
    def check() -> None:
        if len(list(tmp_path.iterdir())) == 2:
            raise DataError("stopped")

    before = set(psutil.Process().children())
    with pytest.raises(DataError, match="stopped"), Processes(2, check) as processes:
        list(processes.map(wait_for_ever, [tmp_path / "a", tmp_path / "b"], TELL_NOBODY))
    assert set(psutil.Process().children()) == before


PARENT = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_processes import TELL_NOBODY, wait_for_ever
from hybrid.data.processes import Processes
with Processes(2) as processes:
    list(processes.map(wait_for_ever, [Path(sys.argv[2], "a"), Path(sys.argv[2], "b")], TELL_NOBODY))
"""


def test_all_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(Path(__file__).parent), str(tmp_path)]
    parent = subprocess.Popen(command)
    try:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while len(found := list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        children = [psutil.Process(int(path.suffix[1:])) for path in found]
        assert len(children) == 2
    finally:
        parent.kill()
        parent.wait(TIMEOUT_SECONDS)
    _, alive = psutil.wait_procs(children, TIMEOUT_SECONDS)
    assert not alive
