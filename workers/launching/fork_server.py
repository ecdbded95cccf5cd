"""A server process that imports torch once and forks the processes of a launch.

::

    launcher                     server                        role
    ────────                     ──────                        ────
    "isolate"         ─────────► enters a network namespace
    "listen"          ─────────► opens a socket there
                      ◄───────── the socket
    "start worker 0"  ─────────► forks  ─────────────────────► runs
                      ◄───────── "started", with its pid       │
                      ◄───────── "ended", and how  ◄───────────┘ exit code or signal
    "signal worker 0" ─────────► signals it

The system kills the server when the launcher ends, and the roles when the server ends, even frozen ones.
The fork server of multiprocessing lets its children run on and leaves a socket folder behind. Free of torch,
as the launcher is.
"""

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
from typing import Any, Self

import psutil

from hybrid.errors import ClusterError, HybridError
from workers.launching.network_namespace import enter_network_namespace
from workers.module_imports import importing_much
from workers.rendezvous.master_address import listen
from workers.signals import HANDLED_SIGNALS, STOP_REQUEST

MARKER = b"."  # ancillary data needs a byte to travel with
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_MAX_DESCRIPTORS = 8
_END_SECONDS = 10.0
_REPLY_SECONDS = 30.0
_IMPORT_SECONDS = 600.0
_POLL_SECONDS = 0.01
# Ctrl-Z stops the server too, for a moment: it counts as frozen if it is stopped at two checks in a row.
_CHECK_SECONDS = 2.0


class BrokenServerError(ClusterError):
    """The server cannot import a module; another server could not either."""


@dataclass(frozen=True, slots=True)
class Started:
    """A process was started."""

    name: str
    pid: int


@dataclass(frozen=True, slots=True)
class Ended:
    """A process has ended: with an exit code, or minus the number of the signal that killed it."""

    name: str
    exit_code: int


@dataclass(frozen=True, slots=True)
class ServerReply:
    """The server's reply to a request; None means success."""

    error: Exception | None


def end_with_parent(parent: int) -> None:
    """Make the system kill this process when its parent ends, in whatever state both are.

    Args:
        parent: pid of the parent.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it has ended already
        os._exit(1)


def serve(descriptor: int, launcher: int) -> None:
    """Run the server until the launcher ends.

    Args:
        descriptor: of the socket to the launcher.
        launcher: its pid.
    """
    end_with_parent(launcher)
    for name in ("LOCAL_RANK", "SLURM_LOCALID"):  # the launcher's: all trainers would take one GPU
        os.environ.pop(name, None)
    # A terminal or scheduler may send these to every process; only the launcher acts on them.
    for number in HANDLED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED_SIGNALS)
    signal.pthread_sigmask(signal.SIG_BLOCK, [STOP_REQUEST])  # until the master is ready for it
    server = _Server(socket.socket(fileno=descriptor))
    with suppress(EOFError):
        while True:
            server.handle_events()


class _Server:
    """Handles the requests of the launcher by the methods of their names."""

    def __init__(self, to_launcher: socket.socket) -> None:
        self._socket = to_launcher
        self._connection = Connection(os.dup(to_launcher.fileno()))
        self._processes: dict[str, ForkProcess] = {}
        self._is_isolated = False

    def handle_events(self) -> None:
        """Wait for a request or the end of a process, and handle it; EOFError if the launcher has ended."""
        by_sentinel = {process.sentinel: name for name, process in self._processes.items()}
        for ready in wait([self._connection, *by_sentinel]):
            if ready is self._connection:
                request, *args = self._connection.recv()
                getattr(self, request)(*args)
            else:
                process = self._processes.pop(by_sentinel[ready])  # type: ignore[index]  # a number
                process.join()
                self._connection.send(Ended(process.name, process.exitcode or 0))
                process.close()

    def isolate(self) -> None:
        """Enter a network namespace."""
        error = None
        try:
            if not self._is_isolated:
                enter_network_namespace()
            self._is_isolated = True
        except OSError as raised:
            error = raised
        self._connection.send(ServerReply(error))

    def listen(self, address: str, port: int) -> None:
        """Send a listening socket to the launcher."""
        try:
            listener = listen(address, port)
        except HybridError as error:
            self._connection.send(ServerReply(error))
            return
        with listener:
            self._connection.send(ServerReply(None))
            socket.send_fds(self._socket, [MARKER], [listener.fileno()])

    def preload(self, modules: Sequence[str]) -> None:
        """Import modules."""
        error = None
        try:
            with importing_much():
                for module in modules:
                    importlib.import_module(module)
        except Exception as raised:
            reason = f"{type(raised).__name__}: {' '.join(str(raised).split())}"
            error = BrokenServerError(f"the process that starts the roles has failed: {reason}")
        self._connection.send(ServerReply(error))

    def start(self, name: str, work: bytes, num_files: int) -> None:
        """Fork a process that runs a pickled function."""
        files = socket.recv_fds(self._socket, len(MARKER), _MAX_DESCRIPTORS)[1] if num_files else []
        context = multiprocessing.get_context("fork")
        process = context.Process(target=self._run, args=(work, files, os.getpid()), name=name)
        process.start()
        for file in files:
            os.close(file)
        self._processes[name] = process
        self._connection.send(Started(name, process.pid or 0))

    def signal(self, name: str, number: int) -> None:
        """Send a signal to a process unless it has ended."""
        # A process that is not reaped keeps its pid.
        if (process := self._processes.get(name)) is not None and process.pid is not None:
            os.kill(process.pid, number)

    def _run(self, work: bytes, files: list[int], server: int) -> None:
        end_with_parent(server)
        self._connection.close()
        self._socket.close()
        target, args = pickle.loads(work)
        target(*args, *files)


class ForkServer:
    """The launcher's side of the server; the end of its ``with`` block ends the server and its processes.

    Every method raises ClusterError if the server has ended, and with it every process.

    Args:
        preload: modules to import before the first fork.

    Attributes:
        is_isolated: whether its processes run in a network namespace.
    """

    def __init__(self, preload: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            code = (
                f"import sys; sys.path[:] = {sys.path!r}; from workers.launching.fork_server import serve; "
                f"serve({theirs.fileno()}, {os.getpid()})"
            )
            # Blocked until the server ignores them itself.
            signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED_SIGNALS)
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", code], stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
                )
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED_SIGNALS)
        self._socket = ours
        self._connection = Connection(os.dup(ours.fileno()))
        self._preload = tuple(preload)
        self._pids: dict[str, int] = {}
        self.is_isolated = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._connection.close()
        self._socket.close()

    def is_running(self) -> bool:
        """Whether the server runs; its processes end with it."""
        return self._process.poll() is None

    def isolate(self) -> None:
        """Move the server into a network namespace without outside connections, before the first start.

        Raises:
            OSError: the system does not allow it.
        """
        self._request("isolate")
        self._await_reply()
        self.is_isolated = True

    def listen(self, address: str, port: int) -> socket.socket:
        """Return a socket of :func:`workers.rendezvous.listener.listen` in the network of the processes."""
        self._request("listen", address, port)
        self._await_reply()
        _, (descriptor,), *_ = socket.recv_fds(self._socket, len(MARKER), 1)
        return socket.socket(fileno=descriptor)

    @property
    def has_imported(self) -> bool:
        """Whether :meth:`preload` was called."""
        return not self._preload

    def preload(self) -> None:
        """Import the modules of the server; the first start does it otherwise.

        Raises:
            BrokenServerError: a module cannot be imported.
        """
        if not self.has_imported:
            self._request("preload", self._preload)
            self._preload = ()
            self._await_reply(_IMPORT_SECONDS)

    def start(
        self, name: str, target: Callable[..., None], args: Sequence[Any], files: Sequence[int]
    ) -> None:
        """Start a process that runs ``target(*args, *files)``; the event ``Started`` follows.

        Args:
            name: unique among the running processes.
            target: a function of a module.
            files: file descriptors; the process gets duplicates of them.

        Raises:
            BrokenServerError: as :meth:`preload`.
        """
        self.preload()
        self._request("start", name, pickle.dumps((target, tuple(args))), len(files))
        if files:
            socket.send_fds(self._socket, [MARKER], list(files))

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a process; nothing happens if it has ended."""
        self._request("signal", name, number)

    def event(self, timeout_seconds: float) -> Started | Ended | None:
        """Return the next event, or None after the timeout; ends a frozen server."""
        message = self._receive(timeout_seconds)
        assert not isinstance(message, ServerReply), "no request is open"
        return message

    def _await_reply(self, seconds: float = _REPLY_SECONDS) -> None:
        # Events of processes before the reply belong to the start before.
        while not isinstance(message := self._receive(seconds), ServerReply):
            if message is None:
                raise self._dead_server(f"has not replied for {seconds:g} s")
        if message.error is not None:
            raise message.error

    def _receive(self, timeout_seconds: float) -> Started | Ended | ServerReply | None:
        deadline, was_frozen = time.monotonic() + timeout_seconds, False
        try:
            while not self._connection.poll(min(max(0.0, deadline - time.monotonic()), _CHECK_SECONDS)):
                if time.monotonic() >= deadline:
                    return None
                is_frozen = psutil.Process(self._process.pid).status() == psutil.STATUS_STOPPED
                if is_frozen and was_frozen:
                    raise self._dead_server("was frozen")
                was_frozen = is_frozen
            message: Started | Ended | ServerReply = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._dead_server() from error
        if isinstance(message, Started):
            self._pids[message.name] = message.pid
        elif isinstance(message, Ended):
            del self._pids[message.name]
        return message

    def _end(self) -> None:
        """End the server and wait until its processes, which end with it, have ended."""
        self._process.kill()  # a normal exit would take seconds to unload torch
        # On a busy machine this takes longer; nothing can refuse the signal, so nothing is left to do.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        deadline = time.monotonic() + _END_SECONDS
        while any(map(is_alive, self._pids.values())) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def _request(self, *request: object) -> None:
        try:
            self._connection.send(request)
        except OSError as error:
            raise self._dead_server() from error

    def _dead_server(self, how: str = "has ended") -> ClusterError:
        self._end()
        return ClusterError(f"the process that starts the roles (pid {self._process.pid}) {how}")


def is_alive(pid: int) -> bool:
    """Whether a process exists and has not ended."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
