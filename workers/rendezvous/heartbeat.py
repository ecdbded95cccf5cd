"""Registration of a role, and heartbeats between a role and the master; does not import torch.

A role registers at the master. The response is "taken" if another process has this role, "rejected" with the
reason, "ended" if the run has ended, or "accepted" with the configuration. The registration is the first
heartbeat, so the master monitors a role from its registration on. A thread of the role sends further
heartbeats over the same connection. If the run has failed, the response to a heartbeat contains the reason.
"""

import dataclasses
import json
import math
import os
import socket
import sys
import threading
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from queue import SimpleQueue
from typing import TYPE_CHECKING, Self

from hybrid import __version__
from hybrid.errors import ClusterError, HybridError, first_line
from hybrid.user_code.user_modules import kind_and_text, log_traceback
from workers.exit_codes import ExitCode, StopMessage, exit_code
from workers.rendezvous.interrupt import StoppedError, describe_final_error

if TYPE_CHECKING:  # secure_channel imports HeartbeatInterval
    from workers.rendezvous.secure_channel import Channel

HEARTBEATS = b"heartbeats"  # purpose of the connection over which a role registers
TAKEN, REJECTED, RUN_ENDED, ACCEPTED = b"taken", b"rejected", b"ended", b"accepted"
_FEWEST_TURNS = 5
_LEAVE_SECONDS = 1.0
ALIVE, SIGNALED, LEAVING = b"alive", b"signaled", b"leaving"


@dataclass(frozen=True, slots=True)
class HeartbeatInterval:
    """The interval between heartbeats (a turn), and how many turns a process may be silent.

    A process is considered frozen if it is silent for ``turns`` turns in a row. The receiver of heartbeats
    waits for each turn separately. So a pause of the receiver itself counts as one silent turn at most.
    """

    timeout_seconds: float  # silence after which a process is considered frozen

    @property
    def turns(self) -> int:
        """The number of turns in the timeout: at least five. A turn takes at most one second."""
        return max(_FEWEST_TURNS, math.ceil(self.timeout_seconds))

    @property
    def turn_seconds(self) -> float:
        return self.timeout_seconds / self.turns

    def describe_silence(self, name: str, is_local: bool) -> str:
        """Return an error message about a silent process. ``is_local``: the process is on this host."""
        state = "frozen" if is_local else "frozen or unreachable"
        timeout = f"{self.timeout_seconds:g} s (cluster.heartbeat_timeout_seconds)"
        return f"{name} is {state}: no heartbeat for {timeout}"


def own_versions() -> str:
    """Return the versions of hybrid, torch and Python, as a text that must be equal on all roles."""
    torch, _, _ = metadata.version("torch").partition("+")
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return f"hybrid-parallel {__version__}, torch {torch}, Python {python}"


@dataclass(frozen=True, slots=True)
class Registration:
    """The data that a role sends to the master to register: its name, host, process and versions."""

    role: str  # name of the role, such as "worker 0"
    files: str  # see filesystem_id; equal for roles that see the same files
    network: str  # see network_id; equal for roles that reach each other by loopback
    host: str = field(default_factory=socket.gethostname)  # not unique
    pid: int = field(default_factory=os.getpid)
    versions: str = field(default_factory=own_versions)
    is_local: bool = False  # whether the role is on the master's host; set by the master

    def __str__(self) -> str:
        return f"{self.role} (host {self.host}, pid {self.pid})"

    def packed(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def unpacked(cls, data: bytes) -> Self:
        return cls(**json.loads(data))


def register(channel: "Channel", registration: Registration) -> str:
    """Register a role at the master; return the run's configuration as TOML.

    The role must send heartbeats over ``channel`` from now on.

    Raises:
        ClusterError: the role is registered already, or the master is frozen.
        HybridError: the cluster has no such role, or the master has other software versions.
        StoppedError: the run or the master has ended.
    """
    try:
        channel.send(HEARTBEATS, registration.packed())
        response, *more = channel.receive()
    except OSError as error:
        raise _lost_master_error(error) from error
    if response == TAKEN:
        raise ClusterError(f"{registration.role} is already taken in this cluster: was it started twice?")
    if response == REJECTED:
        raise HybridError(more[0].decode())
    if response == RUN_ENDED:
        raise StoppedError(more[0].decode(), ExitCode.DONE)
    return zlib.decompress(more[0]).decode()


class HeartbeatSender:
    """Sends a role's heartbeats during a ``with`` block.

    Args:
        channel: the connection over which the role has registered; closed at the end.
        on_failure: called with an error, in the thread that sends, if the master has ended or is frozen, if
            the run has failed, or if this thread fails.
    """

    def __init__(self, channel: "Channel", on_failure: Callable[[ClusterError], None]) -> None:
        self._channel = channel
        self._turn_seconds = channel.interval.turn_seconds
        self._on_failure = on_failure
        self._leaving = threading.Event()
        self._signals: SimpleQueue[int] = SimpleQueue()  # a signal handler can use it
        self._final_report = [b"", b""]
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, StoppedError):
            self._report(error)
        self._leaving.set()
        self._thread.join(_LEAVE_SECONDS)

    def forward_signal(self, number: int) -> None:
        """Report to the master that this role has received signal ``number``, which requests a stop."""
        self._signals.put(number)

    def _report(self, error: BaseException) -> None:
        self._final_report = [describe_final_error(error).encode(), b"%d" % exit_code(error)]

    def _run(self) -> None:
        try:
            text = b""
            while not text and not self._leaving.wait(self._turn_seconds):
                is_signaled = not self._signals.empty()
                self._channel.send(*((SIGNALED, b"%d" % self._signals.get()) if is_signaled else (ALIVE,)))
                # Count the turn before this heartbeat, too, in which the master may have been silent already.
                text = self._channel.receive(-self._turn_seconds)[0]
            if text:  # the run has failed
                message = StopMessage.parse(text.decode())
                self._on_failure(StoppedError(f"stopped by the master: {message.reason}", message.code))
                self._leaving.wait()
            self._channel.send(LEAVING, *self._final_report)
        except OSError as error:
            if not self._leaving.is_set():
                self._on_failure(_lost_master_error(error))
        except Exception as error:  # raised in the main thread
            if not isinstance(error, ClusterError):
                log_traceback(error)
                error = ClusterError(f"the heartbeat thread has failed: {kind_and_text(error)}")
            self._on_failure(error)
            self._report(error)
            with suppress(OSError, ClusterError):  # a master that was frozen receives this when it resumes
                self._channel.send(LEAVING, *self._final_report)
        finally:
            self._channel.close()


def _lost_master_error(error: OSError) -> StoppedError:
    return StoppedError(f"the master went away: {first_line(error)}")
