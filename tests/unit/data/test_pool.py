"""Processes that do a job at a time: how many there are, where they work, and that none is left."""

import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from hybrid.data.prepare.process_pool import Event, Pool, Told
from hybrid.errors import DataError, OutageError

SECONDS = 20.0


def where(job: int, told: Told) -> str:
    return os.getcwd()


def signal_itself(job: int, told: Told) -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        os.kill(os.getpid(), number)
    return job


def meet_an_outage(job: int, told: Told) -> None:
    raise DataError("no rows") from OutageError("s3://bucket: is down")


@pytest.fixture(autouse=True)
def found_by_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let them import this module."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    for each in (where, signal_itself, meet_an_outage):
        monkeypatch.setattr(each, "__module__", Path(__file__).stem)
    monkeypatch.setitem(sys.modules, Path(__file__).stem, sys.modules[__name__])


def test_it_starts_no_more_than_there_are_jobs_in_the_folder_that_is_said(tmp_path: Path) -> None:
    before = set(psutil.Process().children())
    pool = Pool(2, tmp_path)
    try:
        for number in (7, 8):
            pool.give(number, where, 0)
            assert pool.has_room
            events: list[Event] = []
            while not events:
                events = pool.hear(SECONDS)
            assert events == [("done", number, str(tmp_path))]
        assert len(set(psutil.Process().children()) - before) == 1
    finally:
        pool.close()
    assert set(psutil.Process().children()) == before


def test_what_asks_a_run_to_stop_is_for_its_parent_to_hear() -> None:
    pool = Pool(1)
    try:
        pool.give(0, signal_itself, 5)
        assert pool.hear(SECONDS) == [("done", 0, 5)]
    finally:
        pool.close()


def test_a_failure_that_comes_of_an_outage_stays_one() -> None:
    pool = Pool(1)
    try:
        pool.give(0, meet_an_outage, 5)
        (event,) = pool.hear(SECONDS)
    finally:
        pool.close()
    assert (event.kind, str(event.content), event.content.kind) == ("failed", "no rows", OutageError)


def test_a_folder_that_is_not_there_leaves_nothing_open(tmp_path: Path) -> None:
    before = psutil.Process().num_fds()
    with pytest.raises(FileNotFoundError):
        Pool(1, tmp_path / "nothing").give(0, where, 0)
    assert psutil.Process().num_fds() == before
