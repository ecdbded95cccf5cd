"""Errors found out by another thread, raised in the main thread; and an end by all means. Free of torch."""

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

from hybrid.errors import ClusterError, HybridError, first_line
from workers.console.messages import print_line
from workers.exit_codes import ExitCode, ToldError, exit_code

_SIGNAL = signal.SIGRTMIN  # SIGUSR1 is what schedulers warn with


class StoppedError(ToldError):
    """The run failed, or had ended, elsewhere; this role is only told so."""


class LostRoleError(ClusterError):
    """A role is gone, or gives no sign of life."""


class LostHostError(LostRoleError):
    """All roles of a host are gone or out of reach, or the master's host was: no log says why."""


class EndedRoleError(ToldError, LostRoleError):
    """A role has ended with an error, and tells it itself."""


class Alarm:
    """Raises an error in the main thread, wherever it waits; where it cannot be reached, the process ends.

    A call into torch that waits for a frozen role notices no signal, and neither do torch's own threads, for
    which Python would wait at its end. So a process whose block has failed ends as soon as Python does, and
    ``seconds`` after the error at the latest; it says the error then.

    Args:
        name: of the process, for that.
        code_of: the exit code of a process that is ended by an error.
    """

    def __init__(
        self, name: str, seconds: float, code_of: Callable[[BaseException], ExitCode] = exit_code
    ) -> None:
        self._name = name
        self._seconds = seconds
        self._code_of = code_of
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._last_resort: threading.Timer | None = None
        self._is_armed = False

    @contextmanager
    def armed(self) -> Iterator[None]:
        """The length in which it can be rung; entered by the main thread."""
        previous = signal.signal(_SIGNAL, self._raise)
        self._is_armed = True
        try:
            yield
        except BaseException as error:
            self._disarm(previous)
            self._end_soon(error)
            atexit.register(end_now, self._code_of(error))
            raise
        else:
            self._disarm(previous)
            if self._last_resort is not None:
                self._last_resort.cancel()

    def ring(self, error: HybridError) -> None:
        """Raise ``error`` in the main thread; called by another thread. Only the first error counts."""
        with self._lock:
            if not self._is_armed or self._error is not None:
                return
            self._end_soon(error)
            signal.pthread_kill(threading.main_thread().ident or 0, _SIGNAL)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if self._is_armed and self._error is not None:
            raise self._error

    def _disarm(self, previous: Any) -> None:
        with self._lock:
            self._is_armed = False
        signal.signal(_SIGNAL, previous)

    def _end_soon(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error
            self._last_resort = threading.Timer(self._seconds, self._end)
            self._last_resort.daemon = True
            self._last_resort.start()

    def _end(self) -> None:
        assert self._error is not None
        try:
            print_line(f"{self._name}: {last_words(self._error)}", to_stderr=True)
        finally:  # the log may be full
            end_now(self._code_of(self._error))


def run_interruptibly(function: Callable[[], None]) -> None:
    """Run a function that may wait in torch, where the main thread would hear no alarm.

    It gets a thread of its own, which after an alarm is left to itself until the process ends.
    """
    ended: Future[None] = Future()

    def run() -> None:
        try:
            function()
        except BaseException as error:  # raised where it is waited for
            ended.set_exception(error)
        else:
            ended.set_result(None)

    threading.Thread(target=run, name="interruptible", daemon=True).start()
    ended.result()


def last_words(error: BaseException) -> str:
    """What a process says to others of the error that ends it."""
    return "interrupted" if isinstance(error, KeyboardInterrupt) else first_line(error)


def end_now(code: int) -> NoReturn:
    """End this process, whatever its threads wait for."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # a full disk, or nobody who reads it
            stream.flush()
    os._exit(code)
