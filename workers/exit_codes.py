"""How a process ends: why, with which exit code, and whether another start may help. Free of torch."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import Enum, IntEnum

from hybrid.errors import ClusterError, HybridError, OutageError

# Slurm sends it when told to (--signal), some time before it takes a job's machines away.
WARNING = signal.SIGUSR1
_ABOVE_SIGNALS = 128  # what shells add to the number of a signal


class ExitCode(IntEnum):
    """What a command ends with; schedulers decide by it whether to start a job again."""

    DONE = 0
    FAILED = 1  # another start would fail the same way
    USAGE = 2
    AGAIN = 75  # another start may help; sysexits.h has it as EX_TEMPFAIL
    HUNG_UP = _ABOVE_SIGNALS + signal.SIGHUP
    INTERRUPTED = _ABOVE_SIGNALS + signal.SIGINT
    TERMINATED = _ABOVE_SIGNALS + signal.SIGTERM

    @classmethod
    def of_signal(cls, number: int) -> ExitCode:
        """That of a process which ends since it was asked to by a signal."""
        return cls.AGAIN if number == WARNING else cls(_ABOVE_SIGNALS + number)


class Cause(Enum):
    """Why a role failed."""

    STOPPED = "stopped"  # it was asked to
    KILLED = "killed"  # its process was ended by a signal
    STARVED = "starved"  # the same, since memory ran out
    REFUSED = "refused"  # it said what the user can mend; another start would end the same way
    OUTAGE = "outage"  # a store was down, or out of reach, for longer than it was asked again
    EXCEPTION = "exception"  # an exception that nobody has thought of
    LOST = "lost"  # it found another role gone, frozen, or too late
    SILENT = "silent"  # it ended with an error and said nothing
    ECHO = "echo"  # it was told that another one had failed


def may_help(cause: Cause, has_stepped: bool) -> bool:
    """Whether a run that has failed may come further by another start.

    Args:
        has_stepped: whether it has taken a step since the last one: an exception, or memory that runs out,
            before the first is a mistake in somebody's code or settings, and not of this moment.
    """
    if cause in (Cause.EXCEPTION, Cause.STARVED):
        return has_stepped
    return cause is not Cause.REFUSED


class Interrupt(KeyboardInterrupt):
    """This process was asked to stop.

    Args:
        code: that it ends with.
        said: what came of it, where that is not all.
    """

    def __init__(self, code: ExitCode, said: str = "") -> None:
        super().__init__(*[said] if said else [])
        self.code = code


class ToldError(ClusterError):
    """A failure whose exit code is known to whoever tells it."""

    def __init__(self, message: str, code: ExitCode = ExitCode.AGAIN) -> None:
        super().__init__(message)
        self.code = code


def cause_of(error: BaseException) -> Cause:
    """Why a role has failed that is ended by this error."""
    if isinstance(error, KeyboardInterrupt):
        return Cause.STOPPED
    if isinstance(error, ToldError):
        return Cause.ECHO
    if not isinstance(error, HybridError) or not issubclass(error.kind, HybridError):
        return Cause.EXCEPTION
    if issubclass(error.kind, OutageError):
        return Cause.OUTAGE
    return Cause.LOST if issubclass(error.kind, ClusterError) else Cause.REFUSED


def exit_code(error: BaseException, has_stepped: bool = True) -> ExitCode:
    """What a process ends with that is ended by this error.

    Args:
        has_stepped: see :func:`may_help`; who does not know takes it to have.
    """
    if isinstance(error, Interrupt | ToldError):
        return error.code
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    return code_of(cause_of(error), has_stepped)


def code_of(cause: Cause, has_stepped: bool) -> ExitCode:
    """What a run ends with that nobody starts again from within."""
    return ExitCode.AGAIN if may_help(cause, has_stepped) else ExitCode.FAILED


@dataclass(frozen=True, slots=True)
class Word:
    """What the master tells every role at the end, so that all end alike.

    Attributes:
        code: that they end with.
        reason: why the run has failed; empty where they are to end in peace.
    """

    code: ExitCode = ExitCode.DONE
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.code:d} {self.reason}"

    @classmethod
    def parse(cls, text: str) -> Word:
        """The word of which ``text`` is the text."""
        code, _, reason = text.partition(" ")
        return cls(ExitCode(int(code)), reason)
