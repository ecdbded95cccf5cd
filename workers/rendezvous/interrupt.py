"""Raising errors of other threads in the main thread, and ending a stuck process; does not import torch."""

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

from hybrid.errors import ClusterError, HybridError, first_line, shorten
from workers.console import print_line
from workers.exit_codes import ExitCode, ReportedError, exit_code

_SIGNAL = signal.SIGRTMIN  # schedulers use SIGUSR1 as a warning


class StoppedError(ReportedError):
    """The run has failed or ended: another role reported that, or the connection to another role closed."""


class LostRoleError(ClusterError):
    """A role has ended, or sends no heartbeats."""


class EndedRoleError(ReportedError, LostRoleError):
    """A role has ended with an error that the role reported."""


@dataclass(eq=False)
class Interrupter:
    """Raises an error in the main thread; if the main thread does not react, ends the process.

    A call into torch that waits for a frozen role does not handle signals. So if Python does not exit within
    ``seconds`` after an error, a timer prints the error and ends the process. If Python exits in time, the
    process ends without waiting for threads of torch. Neither happens once another interrupter is enabled.
    """

    name: str  # name of the process in the message
    seconds: float  # time from the error to the forced end
    # Returns the exit code for the error that ends the process.
    code_of: Callable[[BaseException], ExitCode] = exit_code

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._timer: threading.Timer | None = None
        self._is_enabled = False

    @contextmanager
    def enabled(self) -> Iterator[None]:
        """Allow interrupts in a block of the main thread; an error that leaves the block starts the timer."""
        atexit.unregister(end_now)
        signal.signal(_SIGNAL, self._raise)
        self._is_enabled = True
        try:
            try:
                yield
            finally:
                with self._lock:
                    self._is_enabled = False
        except BaseException as error:
            self._end_later(error)
            atexit.register(end_now, self.code_of(error))
            raise
        if self._timer is not None:
            self._timer.cancel()

    def interrupt(self, error: HybridError) -> None:
        """Raise ``error`` in the main thread; called by another thread. Only the first call has an effect."""
        with self._lock:
            if not self._is_enabled or self._error is not None:
                return
            self._end_later(error)
            signal.pthread_kill(threading.main_thread().ident or 0, _SIGNAL)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if self._is_enabled and self._error is not None:
            raise self._error

    def _end_later(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error
            self._timer = threading.Timer(self.seconds, self._end)
            self._timer.daemon = True
            self._timer.start()

    def _end(self) -> None:
        assert self._error is not None
        if signal.getsignal(_SIGNAL) != self._raise:  # another interrupter is or was enabled since
            return
        try:
            print_line(f"{self.name}: {describe_final_error(self._error)}", to_stderr=True)
        finally:  # printing may fail on a full disk
            end_now(self.code_of(self._error))


def run_interruptibly(function: Callable[[], object]) -> None:
    """Run ``function`` in a new thread, wait for the end, and raise its error. An interrupt ends the wait."""
    result: Future[object] = Future()

    def run() -> None:
        try:
            result.set_result(function())
        except BaseException as error:  # raised in the main thread
            result.set_exception(error)

    threading.Thread(target=run, name="interruptible", daemon=True).start()
    result.result()


def describe_final_error(error: BaseException) -> str:
    """Return one line about the error that ends this process; "interrupted" for a KeyboardInterrupt."""
    return "interrupted" if isinstance(error, KeyboardInterrupt) else shorten(first_line(error))


def end_now(code: int) -> NoReturn:
    """End this process with exit code ``code``; wait for no thread, and call no exit handlers."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # a full disk, or a closed pipe
            stream.flush()
    os._exit(code)
