"""A process that imports torch once and forks from itself whatever the launcher asks for.

::

    launcher                     server                        role
    ────────                     ──────                        ────
    "start worker 0"  ─────────► forks  ─────────────────────► runs
                      ◄───────── "started", with its pid       │
                      ◄───────── "ended", and how  ◄───────────┘ exit code or signal
    "signal worker 0" ─────────► signals it

They end in a chain: the system kills the server when the launcher ends, however it ends, and the roles
when the server does, frozen ones too. What multiprocessing has of this kind lets its children run on, and
leaves the folder of its socket behind. Free of torch, and so is the launcher.
"""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from types import TracebackType
from typing import Any, Self

import psutil

from hybrid.errors import ClusterError
from workers.launching.imports import lasting_imports

_END_SECONDS = 2.0
_POLL_SECONDS = 0.01
# Who stops a launch with Ctrl-Z and goes on stops the server as well: it must be stopped at two looks.
_LOOK_SECONDS = 2.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_MOST_DESCRIPTORS = 8
_MARKER = b"."  # ancillary data needs a byte to travel with


@dataclass(frozen=True, slots=True)
class Started:
    """A process is there."""

    name: str
    pid: int


@dataclass(frozen=True, slots=True)
class Ended:
    """A process has ended: with an exit code, or with minus the number of the signal that killed it."""

    name: str
    exit_code: int


@dataclass(frozen=True, slots=True)
class Broken:
    """The server cannot import what it is to, and ends."""

    error: str


class BrokenServerError(ClusterError):
    """The server cannot import what it is to; another one could not either."""


class ForkServer:
    """The launcher's side; leave it by ``with``, which ends the server and all that it has forked.

    Args:
        preload: modules to import before the first fork.
    """

    def __init__(self, preload: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = self._start_server(theirs, preload)
        self._socket = ours
        self._connection = Connection(os.dup(ours.fileno()))
        self._pids: dict[str, int] = {}

    def _start_server(self, theirs: socket.socket, preload: Sequence[str]) -> subprocess.Popen[bytes]:
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from workers.launching.fork_server import serve; "
            f"serve({theirs.fileno()}, {os.getpid()}, {list(preload)!r})"
        )
        # Ctrl-C is not meant for it: blocked until it has said so itself.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            return subprocess.Popen(
                [sys.executable, "-c", code], stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
            )
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()  # by itself it would take torch down for seconds first
        self._process.wait(_END_SECONDS)
        self._await_end()
        self._connection.close()
        self._socket.close()

    def is_running(self) -> bool:
        """Whether the server is there; without it, nothing that it has forked is."""
        return self._process.poll() is None

    def start(
        self, name: str, target: Callable[..., None], args: Sequence[Any], files: Sequence[int]
    ) -> None:
        """Start a process that runs ``target(*args, *files)``; ``Started`` tells when it is there.

        Args:
            name: not that of a process that is running.
            target: a function of a module.
            files: file descriptors to pass on; the process gets descriptors of its own for them.

        Raises:
            ClusterError: the server has ended.
        """
        self._ask("start", name, pickle.dumps((target, tuple(args))), len(files))
        if files:
            socket.send_fds(self._socket, [_MARKER], list(files))

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a process; nothing happens where it has ended.

        Raises:
            ClusterError: the server has ended.
        """
        self._ask("signal", name, number)

    def event(self, timeout_seconds: float) -> Started | Ended | None:
        """The next thing that has happened, or None where nothing does in time.

        Raises:
            BrokenServerError: the server could not import what it is to.
            ClusterError: the server has ended, and with it every process; one that is frozen is ended.
        """
        deadline, was_frozen = time.monotonic() + timeout_seconds, False
        try:
            while not self._connection.poll(min(max(0.0, deadline - time.monotonic()), _LOOK_SECONDS)):
                if time.monotonic() >= deadline:
                    return None
                is_frozen = psutil.Process(self._process.pid).status() == psutil.STATUS_STOPPED
                if is_frozen and was_frozen:
                    self._process.kill()
                    raise self._gone("was frozen")
                was_frozen = is_frozen
            event: Started | Ended | Broken = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._gone() from error
        if isinstance(event, Broken):
            raise BrokenServerError(f"the process that starts the roles has failed: {event.error}")
        if isinstance(event, Started):
            self._pids[event.name] = event.pid
        else:
            del self._pids[event.name]
        return event

    def _await_end(self) -> None:
        """Without the server its processes are ending; return once they have."""
        deadline = time.monotonic() + _END_SECONDS
        while any(map(is_alive, self._pids.values())) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def _ask(self, *request: object) -> None:
        try:
            self._connection.send(request)
        except OSError as error:
            raise self._gone() from error

    def _gone(self, how: str = "has ended") -> ClusterError:
        self._process.wait(_END_SECONDS)
        self._await_end()
        return ClusterError(f"the process that starts the roles (pid {self._process.pid}) {how}")


def is_alive(pid: int) -> bool:
    """Whether a process is there that has not ended."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def end_with_parent(parent: int) -> None:
    """Have the system kill this process when its parent does, whatever either is doing.

    Args:
        parent: pid of the process that must be there.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it ended before that
        os._exit(1)


def serve(descriptor: int, launcher: int, preload: Sequence[str]) -> None:
    """What the server runs.

    Args:
        descriptor: of the socket to the launcher.
        launcher: its pid.
    """
    end_with_parent(launcher)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    try:
        with lasting_imports():
            for module in preload:
                importlib.import_module(module)
    except Exception as error:  # told to the launcher
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        Connection(descriptor).send(Broken(reason))
        return
    server = _Server(socket.socket(fileno=descriptor))
    with suppress(EOFError):  # the launcher is done
        while True:
            server.turn()


class _Server:
    def __init__(self, to_launcher: socket.socket) -> None:
        self._socket = to_launcher
        self._connection = Connection(os.dup(to_launcher.fileno()))
        self._processes: dict[str, ForkProcess] = {}

    def turn(self) -> None:
        """Wait for something to happen, and deal with it; EOFError where the launcher is gone."""
        by_sentinel = {process.sentinel: name for name, process in self._processes.items()}
        for ready in wait([self._connection, *by_sentinel]):
            if ready is self._connection:
                request, *args = self._connection.recv()
                if request == "start":
                    self._start(*args)
                else:
                    self._signal(*args)
            else:
                self._reap(by_sentinel[ready])  # type: ignore[index]  # the rest are numbers

    def _start(self, name: str, work: bytes, num_files: int) -> None:
        files = socket.recv_fds(self._socket, len(_MARKER), _MOST_DESCRIPTORS)[1] if num_files else []
        context = multiprocessing.get_context("fork")
        process = context.Process(target=self._run, args=(work, files, os.getpid()), name=name)
        process.start()
        for file in files:
            os.close(file)
        self._processes[name] = process
        self._connection.send(Started(name, process.pid or 0))

    def _run(self, work: bytes, files: list[int], server: int) -> None:
        end_with_parent(server)
        self._connection.close()
        self._socket.close()
        target, args = pickle.loads(work)
        target(*args, *files)

    def _signal(self, name: str, number: int) -> None:
        # One that has ended is not waited for yet, so its number is nobody else's.
        if (process := self._processes.get(name)) is not None and process.pid is not None:
            os.kill(process.pid, number)

    def _reap(self, name: str) -> None:
        process = self._processes.pop(name)
        process.join()
        self._connection.send(Ended(name, process.exitcode or 0))
        process.close()
