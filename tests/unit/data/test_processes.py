"""Processes for work on files: what they answer, how they fail, and that none is left."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
import pytest
from support.elsewhere import Elsewhere

from hybrid.data.prepare.other_hosts import Helpers, OtherHosts, Stage
from hybrid.data.prepare.process_pool import Told
from hybrid.data.prepare.processes import Processes
from hybrid.errors import ClusterError, ConfigError, DataError

TIMEOUT_SECONDS = 20.0
HERE = "PID_OF_THE_TEST"
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


def fail_elsewhere(job: int, told: Told) -> int:
    """On a host that is this process."""
    if os.environ.get(HERE) == str(os.getpid()):
        raise DataError("no space left there")
    return 2 * job


def modules(job: int, told: Told) -> list[str]:
    return [*sys.modules]


def fetch(job: Path, told: Told) -> tuple[str, str]:
    """What was sent, and by whom."""
    by = job.read_text() if job.exists() else "nobody"
    return job.name, by


def send(job: Path, told: Told) -> None:
    job.write_text(str(os.getpid()))


# What other hosts do.
STAGES: Mapping[Stage, Stage] = {double: double, fail_elsewhere: fail_elsewhere, fetch: send}


@pytest.fixture(autouse=True)
def found_by_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let them import this module."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    for each in (double, end_itself, wait_for_ever, modules, fail_elsewhere, fetch):
        monkeypatch.setattr(each, "__module__", Path(__file__).stem)
    monkeypatch.setenv(HERE, str(os.getpid()))
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
            assert "hybrid.data.prepare.process_pool" in names
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
sys.path[:0] = sys.argv[1], str(Path(sys.argv[1]).parents[1])
from test_processes import TELL_NOBODY, wait_for_ever
from hybrid.data.prepare.processes import Processes
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


def joined(folder: Path, *hosts: Elsewhere) -> tuple[OtherHosts, list[str]]:
    said: list[str] = []
    return OtherHosts(Helpers(lambda: hosts, ()), folder, said.append, STAGES, 1), said


def test_hosts_share_jobs_and_answers_keep_their_order(tmp_path: Path) -> None:
    hosts, told = (Elsewhere(), Elsewhere()), list[tuple[int, int, float]]()
    others, said = joined(tmp_path, *hosts)
    jobs = [*range(10, 60)]
    with Processes(1, others=others) as processes:
        assert [*processes.map(double, jobs, lambda *each: told.append(each))] == [2 * job for job in jobs]
    assert sorted(told) == [(number, job, 0.5) for number, job in enumerate(jobs)]
    assert all(len(host.done) > 1 and host.is_closed for host in hosts)
    cores = len(os.sched_getaffinity(0))
    assert said == [
        f"host elsewhere helps to prepare: {number * cores} more process(es) on {number} more host(s)"
        for number in (1, 2)
    ]


def test_a_stage_that_others_do_not_do_stays_here(tmp_path: Path) -> None:
    host = Elsewhere()
    with Processes(1, others=joined(tmp_path, host)[0]) as processes:
        assert len([*processes.map(modules, [1, 2], TELL_NOBODY)]) == 2
    assert not host.done


def test_what_others_send_is_fetched_here(tmp_path: Path) -> None:
    host, jobs = Elsewhere(), [tmp_path / str(i) for i in range(20)]
    with Processes(1, others=joined(tmp_path, host)[0]) as processes:
        found = [*processes.map(fetch, jobs, TELL_NOBODY)]
    assert [name for name, _ in found] == [job.name for job in jobs]
    sent = [str(number) for number in host.done if number >= 0]
    assert len(sent) > len(os.sched_getaffinity(0)), "it is given more once it has sent some"
    assert [name for name, by in found if by == str(os.getpid())] == sorted(sent, key=int)


def test_what_fails_on_another_host_is_done_here(tmp_path: Path) -> None:
    host = Elsewhere()
    others, said = joined(tmp_path, host)
    jobs = [*range(20)]
    with Processes(1, others=others) as processes:
        assert [*processes.map(fail_elsewhere, jobs, TELL_NOBODY)] == [2 * job for job in jobs]
        assert others.text == ""
    assert host.is_closed
    assert said[1:] == ["host elsewhere does not help to prepare: no space left there"]


def test_what_is_wrong_with_a_job_is_told_whoever_finds_it(tmp_path: Path) -> None:
    others, _ = joined(tmp_path, Elsewhere())
    with Processes(1, others=others) as processes:
        answers = processes.map(double, [7, 8, 9, 3, 3, 3], TELL_NOBODY)
        assert [next(answers) for _ in range(3)] == [14, 16, 18]
        with pytest.raises(ConfigError, match=r"data\.path = 3: is wrong"):
            next(answers)


def test_a_host_that_does_not_answer_any_more_ends_it(tmp_path: Path) -> None:
    host = Elsewhere()
    host.answers = False
    with pytest.raises(ClusterError, match="does not answer"):
        with Processes(1, others=joined(tmp_path, host)[0]) as processes:
            list(processes.map(double, [*range(4, 50)], TELL_NOBODY))
