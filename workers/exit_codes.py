"""Exit codes of processes, causes of failures, and whether a restart may help. Free of torch."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import Enum, IntEnum

from hybrid.errors import ClusterError, HybridError, OutageError

# Slurm sends it some time before it takes the machines of a job away, if told to (--signal).
WARNING = signal.SIGUSR1
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
    def of_signal(cls, number: int) -> ExitCode:
        """Return the code of a process that a signal has asked to stop."""
        return cls.AGAIN if number == WARNING else cls(_SIGNAL_BASE + number)


class Cause(Enum):
    """Why a role failed."""

    STOPPED = "stopped"  # a stop was requested
    KILLED = "killed"  # by a signal
    STARVED = "starved"  # killed since memory ran out
    REFUSED = "refused"  # an error that the user must correct; a restart would fail in the same way
    OUTAGE = "outage"  # a store was unreachable for longer than requests are repeated
    EXCEPTION = "exception"  # an unexpected exception
    LOST = "lost"  # another role was lost, frozen, or too late
    SILENT = "silent"  # an exit code without a report
    ECHO = "echo"  # a reported failure of another role


def may_help(cause: Cause, has_stepped: bool) -> bool:
    """Whether a restart of a failed run may help.

    Args:
        has_stepped: whether the run took a step since its start. An exception or a lack of memory before the
            first step comes from code or settings and would occur again.
    """
    if cause in (Cause.EXCEPTION, Cause.STARVED):
        return has_stepped
    return cause is not Cause.REFUSED


class Interrupt(KeyboardInterrupt):
    """A requested stop of this process.

    Args:
        code: exit code of the process.
        message: what the stop has left, if there is something to say.
    """

    def __init__(self, code: ExitCode, message: str = "") -> None:
        super().__init__(*[message] if message else [])
        self.code = code


class ReportedError(ClusterError):
    """A failure that another process has reported, with its exit code."""

    def __init__(self, message: str, code: ExitCode = ExitCode.AGAIN) -> None:
        super().__init__(message)
        self.code = code


def cause_of(error: BaseException) -> Cause:
    """Return the cause of the failure of a role that ends with this error."""
    if isinstance(error, KeyboardInterrupt):
        return Cause.STOPPED
    if isinstance(error, ReportedError):
        return Cause.ECHO
    if not isinstance(error, HybridError) or not issubclass(error.kind, HybridError):
        return Cause.EXCEPTION
    if issubclass(error.kind, OutageError):
        return Cause.OUTAGE
    return Cause.LOST if issubclass(error.kind, ClusterError) else Cause.REFUSED


def exit_code(error: BaseException, has_stepped: bool = True) -> ExitCode:
    """Return the exit code of a process that ends with this error.

    Args:
        has_stepped: see :func:`may_help`; True if unknown.
    """
    if isinstance(error, Interrupt | ReportedError):
        return error.code
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    return code_of(cause_of(error), has_stepped)


def code_of(cause: Cause, has_stepped: bool) -> ExitCode:
    """Return the exit code of a failed run that is not restarted."""
    return ExitCode.AGAIN if may_help(cause, has_stepped) else ExitCode.FAILED


@dataclass(frozen=True, slots=True)
class StopMessage:
    """The master's last message to every role.

    Attributes:
        code: exit code of the roles.
        reason: why the run has failed; empty after a normal end.
    """

    code: ExitCode = ExitCode.DONE
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.code:d} {self.reason}"

    @classmethod
    def parse(cls, text: str) -> StopMessage:
        """Return the message with this text."""
        code, _, reason = text.partition(" ")
        return cls(ExitCode(int(code)), reason)
