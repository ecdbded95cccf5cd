"""Processes of one's own for work on files: started, watched, told what to do, and ended with their parent.

They are started by a plain command, neither forked (the parent has threads) nor spawned by multiprocessing
(which would run the user's script again), and import no torch.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from hybrid.errors import DataError

Job = TypeVar("Job")
Result = TypeVar("Result")
# Told how many rows are done since the last time, and which share of the job by now.
Told = Callable[[int, float], None]

_END_SECONDS = 10.0
# Who stops a run may send them to all of its processes: whoever started these hears them, too, and ends them.
_PARENTS_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_SERVE = (
    "import sys; sys.path[:] = {path!r}; "
    "from hybrid.data.prepare.process_pool import serve; serve({jobs}, {answers})"
)


class Event(NamedTuple):
    """What is heard of a job.

    Attributes:
        kind: "told", "done" or "failed".
        number: of the job.
        content: rows and share as a job tells them; what it has come to; or why it has failed.
    """

    kind: str
    number: int
    content: Any


class _Process:
    """One of them, and the two ends of its pipes."""

    def __init__(self, folder: Path | None) -> None:
        jobs, to_jobs = os.pipe()
        from_answers, answers = os.pipe()
        code = _SERVE.format(path=[*map(os.path.abspath, sys.path)], jobs=jobs, answers=answers)
        command = [sys.executable, "-P", "-c", code]
        try:
            self.popen = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=(jobs, answers), cwd=folder
            )
        except OSError:
            os.close(to_jobs)
            os.close(from_answers)
            raise
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


class Pool:
    """Processes of this host, each of which does a job at a time; to be closed.

    Args:
        size: how many there may be. One is started when there is a job for it.
        folder: that they work in; else that of this process.
    """

    def __init__(self, size: int, folder: Path | None = None) -> None:
        self._size = size
        self._folder = folder
        self._idle: list[_Process] = []
        self._busy: dict[Any, tuple[_Process, int]] = {}

    @property
    def has_room(self) -> bool:
        """Whether one is free."""
        return len(self._busy) < self._size

    def give(self, number: int, work: Callable[[Job, Told], Any], job: Job) -> None:
        """Have one that is free do ``work``, a function of a module, on a job.

        Raises:
            OSError: the system starts none.
        """
        process = self._idle.pop() if self._idle else _Process(self._folder)
        self._busy[process.answers] = process, number
        process.jobs.send((work, job))

    def hear(self, seconds: float) -> list[Event]:
        """What jobs say, which is waited for so long.

        Raises:
            DataError: a process has died.
        """
        events = []
        for answers in wait([*self._busy], seconds):
            process, number = self._busy[answers]
            kind, content = _received(process)
            if kind != "told":
                del self._busy[answers]
                self._idle.append(process)
            if kind == "failed":
                content, cause = content
                content.__cause__ = cause
            events.append(Event(kind, number, content))
        return events

    def close(self) -> None:
        """End all at once."""
        for process in [*self._idle, *(process for process, _ in self._busy.values())]:
            process.end()
        self._idle, self._busy = [], {}


def _received(process: _Process) -> tuple[str, Any]:
    try:
        answer: tuple[str, Any] = process.answers.recv()
    except (EOFError, OSError):
        code = process.popen.wait(_END_SECONDS)
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        rule = "where memory has run out, give it more"
        raise DataError(f"a process that prepares data has ended by {how}; {rule}") from None
    return answer


def serve(jobs: int, answers: int) -> None:
    """What a process runs: do what comes through ``jobs``, and answer, until the parent has gone."""
    for number in _PARENTS_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    received: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(Connection(jobs, writable=False), received), daemon=True).start()
    to_parent = Connection(answers, readable=False)
    while True:
        work, job = received.get()
        try:
            answer = "done", work(job, lambda rows, share: to_parent.send(("told", (rows, share))))
        except BaseException as error:
            cause = error.__cause__  # which pickling forgets, and which may be an outage
            answer = "failed", (_portable(error), cause and _portable(cause))
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
