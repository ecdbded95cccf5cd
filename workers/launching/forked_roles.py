"""The server process of a launch: it forks role processes and reports how they end. Free of torch."""

import ctypes
import importlib
import multiprocessing
import os
import pickle
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess

from hybrid.errors import ClusterError, HybridError
from workers.launching.network_namespace import enter_network_namespace
from workers.module_imports import importing_much
from workers.rendezvous.master_address import listen
from workers.signals import HANDLED_SIGNALS, STOP_REQUEST

MARKER = b"."  # ancillary data needs a byte to travel with
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_MAX_DESCRIPTORS = 8


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
                self._reap(by_sentinel[ready])  # type: ignore[index]  # the rest are numbers

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

    def _reap(self, name: str) -> None:
        process = self._processes.pop(name)
        process.join()
        self._connection.send(Ended(name, process.exitcode or 0))
        process.close()
