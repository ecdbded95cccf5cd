"""Threads that run the jobs of a preparation.

Arrow and numpy release the interpreter's lock while they work, so threads use all cores, and the process
answers others meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from types import TracebackType
from typing import Self, TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")
# Receives the rows that a job has done since the last call, and the fraction of the job that is done by now.
ReportRows = Callable[[int, float], None]

_CHECK_SECONDS = 0.5


class _StoppedError(Exception):
    """Ends a job whose result is not used."""


class JobThreads:
    """Runs jobs in threads; use it in a ``with``.

    Args:
        count: number of threads.
        check: called twice a second; what it raises ends all jobs.
    """

    def __init__(self, count: int, check: Callable[[], None] = lambda: None) -> None:
        self._check = check
        self._should_stop = threading.Event()
        self._executor = ThreadPoolExecutor(count, "prepare")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._should_stop.set()
        self._executor.shutdown(cancel_futures=True)

    def map(
        self,
        work: Callable[[Job, ReportRows], Result],
        jobs: Sequence[Job],
        report: Callable[[int, int, float], None],
    ) -> Iterator[Result]:
        """Yield the result of ``work`` for each job, in the order of the jobs.

        An exception of a job is raised in its turn, as if the jobs ran one after the other.

        Args:
            report: receives the number of a job, its further rows, and its fraction that is done.
        """

        def run(number: int) -> Result:
            def report_rows(rows: int, fraction: float) -> None:
                report(number, rows, fraction)
                if self._should_stop.is_set():
                    raise _StoppedError

            if self._should_stop.is_set():
                raise _StoppedError
            return work(jobs[number], report_rows)

        futures = [self._executor.submit(run, number) for number in range(len(jobs))]
        for future in futures:
            self._check()
            while wait([future], _CHECK_SECONDS).not_done:
                self._check()
            yield future.result()
