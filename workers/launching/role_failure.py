"""How the process of a role failed, and what that means for the run. Imports torch only for an error."""

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from hybrid.errors import HybridError
from hybrid.topology import Role
from workers.exit_codes import Cause, cause_of

_MAX_LOG_BYTES = 4096


@dataclass(frozen=True, slots=True)
class RoleFailure:
    """The failure of a role.

    Attributes:
        message: one line.
        logged_by: the role whose log has the traceback, if there is one.
        at: ``time.monotonic()`` when it became known.
    """

    message: str
    cause: Cause
    logged_by: Role | None = None
    at: float = field(default_factory=time.monotonic)

    @property
    def order(self) -> tuple[bool, int, float]:
        """Sort key that puts the first cause first: killed processes, then errors, then consequences."""
        consequences = {Cause.STOPPED: -1, Cause.ECHO: 1, Cause.SILENT: 2}
        is_killed = self.cause in (Cause.KILLED, Cause.STARVED)
        return not is_killed, consequences.get(self.cause, 0), self.at


def describe(role: Role, error: Exception) -> RoleFailure:
    """Return the failure of ``role`` that ``error`` is, as the role reports it to the launcher."""
    try:
        from hybrid import transport
        from hybrid.user_code.tracebacks import describe_error, needs_traceback
        from workers.roles.master import UnexpectedError
    except ImportError:  # the reason for the failure
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return RoleFailure(f"{role}: {text}", Cause.EXCEPTION)
    message = str(error) if isinstance(error, HybridError) else f"{role}: {describe_error(error)}"
    origin = error.error if isinstance(error, UnexpectedError) else error
    if isinstance(origin, transport.RemoteError):
        logged_by = origin.role if origin.failure.is_logged else None
    else:
        logged_by = role if needs_traceback(origin) else None
    return RoleFailure(" ".join(message.split()), cause_of(error), logged_by)


def oom_kills(root: Path = Path("/")) -> int:
    """Return how many processes the kernel has killed for memory in this control group, or this machine.

    Args:
        root: folder with proc and sys.
    """
    # Files that may have a line ``oom_kill N``; see cgroups(7), and proc(5) for the last.
    groups, paths = root / "sys/fs/cgroup", list[Path]()
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if not controllers:  # version 2
                paths.append(groups / group.lstrip("/") / "memory.events")
            elif "memory" in controllers.split(","):
                paths.append(groups / "memory" / group.lstrip("/") / "memory.oom_control")
    # A container may see its own group as the root.
    paths += [groups / "memory.events", groups / "memory/memory.oom_control", root / "proc/vmstat"]
    for path in paths:
        with suppress(OSError):  # another version of control groups, or invisible inside a container
            for line in path.read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == "oom_kill":
                    return int(value)
    return 0


@dataclass(slots=True)
class RoleProcess:
    """The process of a role under the launcher.

    Attributes:
        reports: connection on which the role reports how it fails.
        pid: known once the process has started.
        has_reported: whether the role reported its failure itself.
        failure: how it failed; None while it runs and after a normal end.
    """

    role: Role
    log: Path
    reports: Connection
    pid: int | None = None
    has_ended: bool = False
    has_reported: bool = False
    failure: RoleFailure | None = None
    _oom_kills_before: int = field(default_factory=oom_kills)
    _log_bytes_before: int = field(init=False)

    def __post_init__(self) -> None:
        self._log_bytes_before = self.log.stat().st_size if self.log.exists() else 0

    def end(self, exit_code: int) -> None:
        """Note how the process ended: with an exit code, or minus the number of a signal."""
        self.has_ended = True
        if exit_code:
            reported = None
            with suppress(EOFError):
                reported = self.reports.recv() if self.reports.poll() else None
            self.has_reported = isinstance(reported, RoleFailure)
            self.failure = reported if isinstance(reported, RoleFailure) else self._observe(exit_code)
        self.reports.close()

    def _observe(self, exit_code: int) -> RoleFailure:
        """Return the failure of a role that has not reported one."""
        process, log = f"{self.role} (pid {self.pid})", ""
        with suppress(FileNotFoundError), self.log.open("rb") as file:
            file.seek(max(self._log_bytes_before, file.seek(0, os.SEEK_END) - _MAX_LOG_BYTES))
            log = file.read().decode(errors="replace")
        if exit_code > 0:
            # A main thread that waits in torch cannot report; its last line may be in the log.
            before, _, text = log.rstrip("\n").rpartition("\n")[2].partition(f"hybrid {self.role}: ")
            last_line = f": {text}" if text and not before else ""
            message = f"{process} exited with code {exit_code}{last_line}; see {self.log}"
            return RoleFailure(message, Cause.SILENT)
        number = signal.Signals(-exit_code)
        is_oom = number is signal.SIGKILL and oom_kills() > self._oom_kills_before
        is_oom |= number is signal.SIGABRT and "std::bad_alloc" in log  # C++ code without memory
        why = ", probably since memory ran out" if is_oom else ""
        cause = Cause.STARVED if is_oom else Cause.KILLED
        return RoleFailure(f"{process} was killed by {number.name}{why}; see {self.log}", cause)
