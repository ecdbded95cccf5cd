"""Exit codes, causes of failures, and the signals that stop a training run.

::

    launcher                          master                            other roles
    ────────                          ──────                            ───────────
    Ctrl-C: STOP_REQUEST ───────────► finishes its step, saves          ignore the signals
                                      sends the stop message ─────────► end
                             ◄─────── ends
    Ctrl-C again: kills all

    started by hand                   handles Ctrl-C itself
                                      receives the request with ◄────── Ctrl-C: request to the master
                                      the heartbeat, stops as above     Ctrl-C again: ends at once

SIGUSR1, the warning of a scheduler, stops a run like the first Ctrl-C, but with exit code 75. A scheduler may
send the warning to all processes, and more than once. This module does not import torch.
"""

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, IntEnum
from types import FrameType
from typing import Any, Self

from hybrid.errors import ClusterError, HybridError, OutageError

# Slurm sends this signal some time before it ends a job, if the job requests the signal (--signal).
WARNING = signal.SIGUSR1
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
HANDLED_SIGNALS = (*STOP_SIGNALS, WARNING)
# The launcher sends this signal to the master. For another role's request, the master sends it to itself.
STOP_REQUEST = signal.SIGRTMAX
_SIGNAL_BASE = 128  # shells add it to the number of a signal


class ExitCode(IntEnum):
    """The exit code of a command; schedulers use it to decide on a restart."""

    DONE = 0
    FAILED = 1  # a restart would fail in the same way
    USAGE = 2
    AGAIN = 75  # a restart may help; EX_TEMPFAIL of sysexits.h
    HUNG_UP = _SIGNAL_BASE + signal.SIGHUP
    INTERRUPTED = _SIGNAL_BASE + signal.SIGINT
    TERMINATED = _SIGNAL_BASE + signal.SIGTERM

    @classmethod
    def of_signal(cls, number: int) -> Self:
        """Return the exit code of a process that stops because of signal ``number``."""
        return cls.AGAIN if number == WARNING else cls(_SIGNAL_BASE + number)


class Cause(Enum):
    """The reason why a role failed or stopped."""

    STOPPED = "stopped"  # a stop was requested
    KILLED = "killed"  # by a signal
    STARVED = "starved"  # killed because memory ran out
    REFUSED = "refused"  # an error that the user must correct; a restart would fail in the same way
    EXCEPTION = "exception"  # an unexpected exception
    LOST = "lost"  # another role was lost, frozen, or too late; or a store was unreachable
    SILENT = "silent"  # an exit code without a report
    ECHO = "echo"  # a reported failure of another role


class Interrupt(KeyboardInterrupt):
    """A requested stop of this process, with an exit code and a message for the user."""

    def __init__(self, code: ExitCode, message: str = "") -> None:
        super().__init__(*[message] if message else [])
        self.code = code


class ReportedError(ClusterError):
    """A failure, often of another process, after which this process exits with ``code``."""

    def __init__(self, message: str, code: ExitCode = ExitCode.AGAIN) -> None:
        super().__init__(message)
        self.code = code


def cause_of(error: BaseException) -> Cause:
    """Return the cause of a role's failure, from the error that ends the role."""
    if isinstance(error, KeyboardInterrupt):
        return Cause.STOPPED
    if isinstance(error, ReportedError):
        return Cause.ECHO
    if not isinstance(error, HybridError) or not issubclass(error.kind, HybridError):
        return Cause.EXCEPTION
    return Cause.LOST if issubclass(error.kind, ClusterError | OutageError) else Cause.REFUSED


def exit_code(error: BaseException, has_stepped: bool = True) -> ExitCode:
    """Return the exit code of a process that ends with this error; ``has_stepped``: see :func:`code_of`."""
    if isinstance(error, Interrupt | ReportedError):
        return error.code
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    return code_of(cause_of(error), has_stepped)


def code_of(cause: Cause, has_stepped: bool) -> ExitCode:
    """Return FAILED if a restart of a failed run would fail in the same way, else AGAIN.

    An error that the user must correct would occur again. If the run has taken no step since its start (not
    ``has_stepped``), an exception or a lack of memory would occur again, too.
    """
    is_final = cause is Cause.REFUSED or (cause in (Cause.EXCEPTION, Cause.STARVED) and not has_stepped)
    return ExitCode.FAILED if is_final else ExitCode.AGAIN


@dataclass(frozen=True, slots=True)
class StopMessage:
    """The master's last message to every role."""

    code: ExitCode = ExitCode.DONE  # exit code of the roles
    reason: str = ""  # why the run has failed; empty after a normal end

    def __str__(self) -> str:
        return f"{self.code:d} {self.reason}"

    @classmethod
    def parse(cls, text: str) -> Self:
        code, _, reason = text.partition(" ")
        return cls(ExitCode(int(code)), reason)


@contextmanager
def handling(
    numbers: Iterable[signal.Signals], handle: Callable[[int, FrameType | None], object]
) -> Iterator[dict[int, Any]]:
    """Call ``handle`` at each signal in ``numbers`` during this block, which runs in the main thread.

    Ignored signals stay ignored, such as SIGHUP under nohup. Yields the previous handlers of the other
    signals, by number. If the block sets another handler, that handler stays after the block.
    """
    previous: dict[int, Any] = {
        each: handler for each in numbers if (handler := signal.getsignal(each)) != signal.SIG_IGN
    }
    for number in previous:
        signal.signal(number, handle)
    try:
        yield previous
    finally:
        for number, handler in previous.items():
            if signal.getsignal(number) == handle:
                signal.signal(number, handler)


class StopRequest:
    """A request to stop a run, made by a signal in a ``with`` block of :meth:`handling_signals`.

    Args:
        seconds: how long this block may still run after the request; then an Interrupt ends the block.
        forward: called when the stop is requested.
    """

    def __init__(self, seconds: float, forward: Callable[[], object] = lambda: None) -> None:
        self.is_requested = False  # whether the run must stop
        self.code = ExitCode.DONE  # exit code of the process if the run must stop
        self._has_direct_signal = False  # one of STOP_SIGNALS has come
        self._seconds = seconds
        self._forward = forward
        self._previous: dict[int, Any] = {}  # handlers by signal

    @contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Request a stop at the first signal in this block, which runs in the main thread.

        A second SIGINT, SIGTERM or SIGHUP goes to the previous handler. A second SIGUSR1 or STOP_REQUEST is
        ignored, because these signals may arrive more than once.
        """
        previous_handler = signal.signal(signal.SIGALRM, self._give_up)
        try:
            with handling((*HANDLED_SIGNALS, STOP_REQUEST), self._handle) as self._previous:
                yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous_handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        is_direct = number in STOP_SIGNALS
        if is_direct and self._has_direct_signal:
            self._previous[number](number, frame)
            return
        self._has_direct_signal |= is_direct
        if self.is_requested:
            return
        self.is_requested = True
        self.code = ExitCode.TERMINATED if number == STOP_REQUEST else ExitCode.of_signal(number)
        signal.setitimer(signal.ITIMER_REAL, self._seconds)
        self._forward()

    def _give_up(self, number: int, frame: FrameType | None) -> None:
        raise Interrupt(
            self.code,
            f"the step or the checkpoint took longer than {self._seconds:g} s (cluster.timeout_seconds)",
        )


@contextmanager
def forwarding_signals(forward: Callable[[int], object]) -> Iterator[None]:
    """Call ``forward(number)`` at each stop signal or SIGUSR1, so that the role reports it to the master.

    If Ctrl-C follows an earlier signal, the role ends at once. Other signals do not end the role, because a
    scheduler may send them to all roles, and more than once. Ignored signals stay ignored.
    """
    received = list[int]()

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and received:
            previous[number](number, frame)
        received.append(number)
        forward(number)

    with handling(HANDLED_SIGNALS, handle) as previous:
        yield
