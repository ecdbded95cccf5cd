"""How the process of a role ended, and what that means for the run. Free of torch."""

import os
import signal
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from hybrid.topology import Role
from workers.exit_codes import Cause
from workers.launching.oom import oom_kills

_MOST_LOG_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Outcome:
    """A failure of a role.

    Attributes:
        message: one line.
        logged_by: the role whose log has its stack, if there is one.
        at: ``time.monotonic()`` when it was known.
    """

    message: str
    cause: Cause
    logged_by: Role | None = None
    at: float = field(default_factory=time.monotonic)

    @property
    def order(self) -> tuple[bool, int, float]:
        """Sorts the first failure to the front: who was killed, who tells something new, who repeats it."""
        echoes = {Cause.STOPPED: -1, Cause.ECHO: 1, Cause.SILENT: 2}
        is_killed = self.cause in (Cause.KILLED, Cause.STARVED)
        return not is_killed, echoes.get(self.cause, 0), self.at


@dataclass(slots=True)
class Child:
    """A role's process under the launcher.

    Attributes:
        outcomes: where it tells how it fails.
        pid: known once it is there.
        has_told: whether it has said how it failed, as one does whose end was its own doing.
        failure: how it failed; None as long as it runs, and where it ended in peace.
    """

    role: Role
    log: Path
    outcomes: Connection
    pid: int | None = None
    has_ended: bool = False
    has_told: bool = False
    failure: Outcome | None = None
    _oom_kills_before: int = field(default_factory=oom_kills)
    _log_bytes_before: int = field(init=False)

    def __post_init__(self) -> None:
        self._log_bytes_before = self.log.stat().st_size if self.log.exists() else 0

    def end(self, exit_code: int) -> None:
        """Note how the process ended: with an exit code, or minus the number of a signal."""
        self.has_ended = True
        if exit_code:
            told = self._told()
            self.has_told = told is not None
            self.failure = told or self._seen(exit_code)
        self.outcomes.close()

    def _told(self) -> Outcome | None:
        try:
            told = self.outcomes.recv() if self.outcomes.poll() else None
        except EOFError:
            told = None
        return told if isinstance(told, Outcome) else None

    def _seen(self, exit_code: int) -> Outcome:
        who = f"{self.role} (pid {self.pid})"
        if exit_code > 0:
            said = f"exited with code {exit_code}{self._last_words()}"
            return Outcome(f"{who} {said}; see {self.log}", Cause.SILENT)
        number = signal.Signals(-exit_code)
        is_oom = number is signal.SIGKILL and oom_kills() > self._oom_kills_before
        # C++ code that finds no memory ends the process with this word.
        is_oom |= number is signal.SIGABRT and "std::bad_alloc" in self._end_of_log()
        why = ", probably since memory ran out" if is_oom else ""
        cause = Cause.STARVED if is_oom else Cause.KILLED
        return Outcome(f"{who} was killed by {number.name}{why}; see {self.log}", cause)

    def _last_words(self) -> str:
        """The error in its log, where its main thread was beyond reach and could not tell it; see Alarm."""
        last = self._end_of_log().rstrip("\n").rpartition("\n")[2]
        before, _, words = last.partition(f"hybrid {self.role}: ")
        return f": {words}" if words and not before else ""

    def _end_of_log(self) -> str:
        """What it has written last, if it has written anything."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(self._log_bytes_before, file.seek(0, os.SEEK_END) - _MOST_LOG_BYTES))
                return file.read().decode(errors="replace")
        except FileNotFoundError:
            return ""


def outcome_pipe() -> tuple[Connection, int]:
    """The launcher's end of a pipe for the outcome of a role, and the descriptor of the role's."""
    reader, writer = os.pipe()
    return Connection(reader, writable=False), writer
