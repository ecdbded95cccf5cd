"""Processes of one's own for work on files: started, watched, told what to do, and ended with their parent.

They are started by a plain command, neither forked (the parent has threads) nor spawned by multiprocessing
(which would run the user's script again), and import no torch. What one raises is raised in the parent.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Self, TypeVar

from hybrid.errors import DataError

Job = TypeVar("Job")
Result = TypeVar("Result")
# Told how many rows are done since the last time, and which share of the job by now.
Told = Callable[[int, float], None]

_LOOK_SECONDS = 0.5
_END_SECONDS = 10.0
_SERVE = (
    "import sys; sys.path[:] = {path!r}; from hybrid.data.processes import serve; serve({jobs}, {answers})"
)


class _Process:
    """One of them, and the two ends of its pipes."""

    def __init__(self) -> None:
        jobs, to_jobs = os.pipe()
        from_answers, answers = os.pipe()
        code = _SERVE.format(path=[each or os.getcwd() for each in sys.path], jobs=jobs, answers=answers)
        command = [sys.executable, "-P", "-c", code]
        try:
            self.popen = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(jobs, answers))
        finally:
            os.close(jobs)
            os.close(answers)
        self.jobs = Connection(to_jobs, readable=False)
        self.answers = Connection(from_answers, writable=False)

    def end(self) -> None:
        self.popen.kill()
        self.popen.wait(_END_SECONDS)
        self.jobs.close()
        self.answers.close()


class Processes:
    """Does jobs, each in whichever process is free; to be closed.

    Args:
        count: of the processes; with 1 the jobs are done here.
        check: called twice a second, or when a job done here says how far it is; what it raises ends all.
    """

    def __init__(self, count: int, check: Callable[[], None] = lambda: None) -> None:
        self._count = count
        self._check = check
        self._started: list[_Process] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._started:
            process.end()
        self._started = []

    def map(
        self,
        work: Callable[[Job, Told], Result],
        jobs: Sequence[Job],
        told: Callable[[int, int, float], None],
    ) -> Iterator[Result]:
        """What ``work``, a function of a module, makes of each job, in the order of the jobs.

        What a job raises is raised when its turn has come, as if all were done one after the other.

        Args:
            told: told which job has done further rows, how many, and its share by now.

        Raises:
            DataError: a process has died.
        """
        if self._count == 1 or len(jobs) == 1:
            for number, job in enumerate(jobs):
                self._check()
                yield work(job, self._telling(told, number))
            return
        while len(self._started) < min(self._count, len(jobs)):
            self._started.append(_Process())
        yield from self._mapped(work, jobs, told)

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
    ) -> Iterator[Result]:
        waiting = iter(enumerate(jobs))
        busy: dict[Any, tuple[_Process, int]] = {}
        done: dict[int, tuple[bool, Any]] = {}
        failed = False
        given = 0

        def give(process: _Process) -> None:
            if not failed and (following := next(waiting, None)) is not None:
                process.jobs.send((work, following[1]))
                busy[process.answers] = process, following[0]

        for process in self._started:
            give(process)
        while given < len(jobs):
            if given in done:
                is_right, answer = done.pop(given)
                if not is_right:
                    raise answer
                given += 1
                yield answer
                continue
            self._check()
            for answers in wait([*busy], _LOOK_SECONDS):
                process, number = busy[answers]
                kind, *content = _received(process)
                if kind == "told":
                    told(number, *content)
                    continue
                del busy[answers]
                failed |= kind == "failed"
                done[number] = kind == "done", content[0]
                give(process)


def _received(process: _Process) -> tuple[Any, ...]:
    try:
        answer: tuple[Any, ...] = process.answers.recv()
    except (EOFError, OSError):
        code = process.popen.wait(_END_SECONDS)
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        rule = "where memory has run out, give it more"
        raise DataError(f"a process that prepares data has ended by {how}; {rule}") from None
    return answer


def serve(jobs: int, answers: int) -> None:
    """What a process runs: do what comes through ``jobs``, and answer, until the parent has gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started it hears it, too, and ends it
    received: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(Connection(jobs, writable=False), received), daemon=True).start()
    to_parent = Connection(answers, readable=False)
    while True:
        work, job = received.get()
        try:
            answer = "done", work(job, lambda rows, share: to_parent.send(("told", rows, share)))
        except BaseException as error:
            answer = "failed", _portable(error)
        to_parent.send(answer)


def _receive(jobs: Connection, received: queue.SimpleQueue[Any]) -> None:
    """Hand on what comes; the parent's end, however it came, is the end of this process."""
    while True:
        try:
            received.put(jobs.recv())
        except BaseException:
            os._exit(1)


def _portable(error: BaseException) -> BaseException:
    """``error``, or one that says the same where it cannot be sent."""
    try:
        return error if type(pickle.loads(pickle.dumps(error))) is type(error) else RuntimeError(str(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
