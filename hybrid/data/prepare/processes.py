"""Jobs on files, done by processes of this host, and of others that see the same files.

What one raises is raised in the parent, when the job's turn has come. What a job gives does not depend on who
does it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Self

from hybrid.data.prepare.other_hosts import OtherHosts
from hybrid.data.prepare.process_pool import Event, Job, Pool, Result, Told

_LOOK_SECONDS = 0.5
_LOOK_ELSEWHERE_SECONDS = 0.05


class Processes:
    """Does jobs, each in whichever process is free; to be closed.

    Args:
        count: of the processes of this host; with 1 and no other hosts the jobs are done here.
        check: called twice a second, or when a job done here says how far it is; what it raises ends all.
        others: hosts that may take part.
    """

    def __init__(
        self, count: int, check: Callable[[], None] = lambda: None, others: OtherHosts | None = None
    ) -> None:
        self._count = count
        self._check = check
        self._pool = Pool(count)
        self._others = others

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.close()
        if self._others is not None:
            self._others.close()

    def map(
        self,
        work: Callable[[Job, Told], Result],
        jobs: Sequence[Job],
        told: Callable[[int, int, float], None],
    ) -> Iterator[Result]:
        """What ``work``, a function of a module, makes of each job, in the order of the jobs.

        What a job raises is raised when its turn has come, as if all were done one after the other. One that
        has failed on another host is done again on this one.

        Args:
            told: told which job has done further rows, how many, and its share by now.

        Raises:
            ClusterError: another host that has jobs does not answer.
            DataError: a process has died.
        """
        others = self._others if self._others is not None and self._others.does(work) else None
        if len(jobs) == 1 or (self._count == 1 and others is None):
            for number, job in enumerate(jobs):
                self._check()
                yield work(job, self._telling(told, number))
            return
        yield from self._mapped(work, jobs, told, others)

    def _telling(self, told: Callable[[int, int, float], None], number: int) -> Told:
        def tell(rows: int, share: float) -> None:
            told(number, rows, share)
            self._check()

        return tell

    def _mapped(
        self,
        work: Callable[[Job, Told], Result],
        jobs: Sequence[Job],
        told: Callable[[int, int, float], None],
        others: OtherHosts | None,
    ) -> Iterator[Result]:
        waiting, again = deque(range(len(jobs))), deque[int]()
        done: dict[int, Event] = {}

        def give() -> None:
            while self._pool.has_room and (queue := again or waiting):
                number = queue.popleft()
                self._pool.give(number, work, jobs[number])
            if others is not None and waiting:
                others.give(work, jobs, waiting)

        give()
        for number in range(len(jobs)):
            while number not in done:
                self._check()
                for event in self._heard(others, again):
                    if event.kind == "told":
                        told(event.number, *event.content)
                        continue
                    done[event.number] = event
                    if event.kind == "failed":
                        waiting.clear()
                give()
            event = done.pop(number)
            if event.kind == "failed":
                raise event.content
            yield event.content

    def _heard(self, others: OtherHosts | None, again: deque[int]) -> Iterator[Event]:
        """What jobs say; those that other hosts leave to this one are to be done ``again``."""
        if others is None or not others.are_there:
            yield from self._pool.hear(_LOOK_SECONDS)
            return
        yield from self._pool.hear(_LOOK_ELSEWHERE_SECONDS)
        events, left = others.hear()
        yield from events
        again.extend(left)
