"""What the server of a launch runs: it forks processes, and tells what becomes of them. Free of torch."""

import ctypes
import importlib
import multiprocessing
import os
import pickle
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess

from hybrid.errors import ClusterError, ConfigError
from workers.launching.network_namespace import enter_network_namespace
from workers.launching.preloading import lasting_imports
from workers.rendezvous.master_address import listen
from workers.signals import ASK_SIGNAL, HEARD

MARKER = b"."  # ancillary data needs a byte to travel with
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_MOST_DESCRIPTORS = 8


class BrokenServerError(ClusterError):
    """The server cannot import what it is to; another one could not either."""


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
class Answer:
    """What the server itself was asked for has been done, or not."""

    error: Exception | None


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


def serve(descriptor: int, launcher: int) -> None:
    """What the server runs.

    Args:
        descriptor: of the socket to the launcher.
        launcher: its pid.
    """
    end_with_parent(launcher)
    for name in ("LOCAL_RANK", "SLURM_LOCALID"):  # the launcher's: all trainers would take one GPU
        os.environ.pop(name, None)
    # A terminal or a scheduler may send them to every process: the launcher decides what they mean.
    for number in HEARD:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HEARD)
    signal.pthread_sigmask(signal.SIG_BLOCK, [ASK_SIGNAL])  # until the master is ready for it
    server = _Server(socket.socket(fileno=descriptor))
    with suppress(EOFError):  # the launcher is done
        while True:
            server.turn()


class _Server:
    def __init__(self, to_launcher: socket.socket) -> None:
        self._socket = to_launcher
        self._connection = Connection(os.dup(to_launcher.fileno()))
        self._processes: dict[str, ForkProcess] = {}
        self._is_isolated = False
        self._requests: dict[str, Callable[..., None]] = {
            "isolate": self._isolate,
            "listen": self._listen,
            "preload": self._preload,
            "start": self._start,
            "signal": self._signal,
        }

    def turn(self) -> None:
        """Wait for something to happen, and deal with it; EOFError where the launcher is gone."""
        by_sentinel = {process.sentinel: name for name, process in self._processes.items()}
        for ready in wait([self._connection, *by_sentinel]):
            if ready is self._connection:
                request, *args = self._connection.recv()
                self._requests[request](*args)
            else:
                self._reap(by_sentinel[ready])  # type: ignore[index]  # the rest are numbers

    def _isolate(self) -> None:
        error = None
        try:
            if not self._is_isolated:
                enter_network_namespace()
            self._is_isolated = True
        except OSError as raised:
            error = raised
        self._connection.send(Answer(error))

    def _listen(self, address: str, port: int) -> None:
        try:
            listener = listen(address, port)
        except ConfigError as error:
            self._connection.send(Answer(error))
            return
        with listener:
            self._connection.send(Answer(None))
            socket.send_fds(self._socket, [MARKER], [listener.fileno()])

    def _preload(self, modules: Sequence[str]) -> None:
        error = None
        try:
            with lasting_imports():
                for module in modules:
                    importlib.import_module(module)
        except Exception as raised:  # told to the launcher
            reason = f"{type(raised).__name__}: {' '.join(str(raised).split())}"
            error = BrokenServerError(f"the process that starts the roles has failed: {reason}")
        self._connection.send(Answer(error))

    def _start(self, name: str, work: bytes, num_files: int) -> None:
        files = socket.recv_fds(self._socket, len(MARKER), _MOST_DESCRIPTORS)[1] if num_files else []
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
