"""A process that imports torch once and forks from itself whatever the launcher asks for.

::

    launcher                     server                        role
    ────────                     ──────                        ────
    "isolate"         ─────────► enters a network of its own
    "listen"          ─────────► makes a socket there
                      ◄───────── the socket
    "start worker 0"  ─────────► forks  ─────────────────────► runs
                      ◄───────── "started", with its pid       │
                      ◄───────── "ended", and how  ◄───────────┘ exit code or signal
    "signal worker 0" ─────────► signals it

They end in a chain: the system kills the server when the launcher ends, however it ends, and the roles
when the server does, frozen ones too. What multiprocessing has of this kind lets its children run on, and
leaves the folder of its socket behind. Free of torch, and so is the launcher.
"""

import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Self

import psutil

from hybrid.errors import ClusterError
from workers.launching.forked_roles import MARKER, Answer, Ended, Started
from workers.signals import HEARD

_END_SECONDS = 10.0
_ANSWER_SECONDS = 30.0
_IMPORT_SECONDS = 600.0
_POLL_SECONDS = 0.01
# Who stops a launch with Ctrl-Z and goes on stops the server as well: it must be stopped at two looks.
_LOOK_SECONDS = 2.0


class ForkServer:
    """The launcher's side; leave it by ``with``, which ends the server and all that it has forked.

    Every method raises ClusterError where the server has ended, and with it every process.

    Args:
        preload: modules to import before the first fork.

    Attributes:
        is_isolated: whether what it starts has a network of its own.
    """

    def __init__(self, preload: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = self._start_server(theirs)
        self._socket = ours
        self._connection = Connection(os.dup(ours.fileno()))
        self._preload = tuple(preload)
        self._pids: dict[str, int] = {}
        self.is_isolated = False

    def _start_server(self, theirs: socket.socket) -> subprocess.Popen[bytes]:
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from workers.launching.forked_roles import serve; "
            f"serve({theirs.fileno()}, {os.getpid()})"
        )
        # Ctrl-C and the like are not meant for it: blocked until it has said so itself.
        signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)
        try:
            return subprocess.Popen(
                [sys.executable, "-c", code], stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
            )
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HEARD)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._connection.close()
        self._socket.close()

    def is_running(self) -> bool:
        """Whether the server is there; without it, nothing that it has forked is."""
        return self._process.poll() is None

    def isolate(self) -> None:
        """Give what it starts a network of its own, without any connection to others; before the first start.

        Raises:
            OSError: the system does not allow it.
        """
        self._ask("isolate")
        self._await_answer()
        self.is_isolated = True

    def listen(self, address: str, port: int) -> socket.socket:
        """A socket as of :func:`workers.rendezvous.listener.listen`, in the network of what it starts."""
        self._ask("listen", address, port)
        self._await_answer()
        _, (descriptor,), *_ = socket.recv_fds(self._socket, len(MARKER), 1)
        return socket.socket(fileno=descriptor)

    @property
    def has_imported(self) -> bool:
        """Whether it has been asked to import what it is to."""
        return not self._preload

    def preload(self) -> None:
        """Import what is to be imported, and return when that is done; the first start does it, too.

        Raises:
            BrokenServerError: something cannot be imported.
        """
        if not self.has_imported:
            self._ask("preload", self._preload)
            self._preload = ()
            self._await_answer(_IMPORT_SECONDS)

    def start(
        self, name: str, target: Callable[..., None], args: Sequence[Any], files: Sequence[int]
    ) -> None:
        """Start a process that runs ``target(*args, *files)``; ``Started`` tells when it is there.

        Args:
            name: not that of a process that is running.
            target: a function of a module.
            files: file descriptors to pass on; the process gets descriptors of its own for them.

        Raises:
            BrokenServerError: as :meth:`preload`.
        """
        self.preload()
        self._ask("start", name, pickle.dumps((target, tuple(args))), len(files))
        if files:
            socket.send_fds(self._socket, [MARKER], list(files))

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a process; nothing happens where it has ended."""
        self._ask("signal", name, number)

    def event(self, timeout_seconds: float) -> Started | Ended | None:
        """The next thing that has happened, or None where nothing does in time; ends a frozen server."""
        message = self._receive(timeout_seconds)
        assert not isinstance(message, Answer), "nothing was asked"
        return message

    def _await_answer(self, seconds: float = _ANSWER_SECONDS) -> None:
        # What is told of processes meanwhile is of a start that is over.
        while not isinstance(message := self._receive(seconds), Answer):
            if message is None:
                raise self._gone(f"has not answered for {seconds:g} s")
        if message.error is not None:
            raise message.error

    def _receive(self, timeout_seconds: float) -> Started | Ended | Answer | None:
        deadline, was_frozen = time.monotonic() + timeout_seconds, False
        try:
            while not self._connection.poll(min(max(0.0, deadline - time.monotonic()), _LOOK_SECONDS)):
                if time.monotonic() >= deadline:
                    return None
                is_frozen = psutil.Process(self._process.pid).status() == psutil.STATUS_STOPPED
                if is_frozen and was_frozen:
                    raise self._gone("was frozen")
                was_frozen = is_frozen
            message: Started | Ended | Answer = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._gone() from error
        if isinstance(message, Started):
            self._pids[message.name] = message.pid
        elif isinstance(message, Ended):
            del self._pids[message.name]
        return message

    def _end(self) -> None:
        """End the server, and return once its processes, which end with it, have."""
        self._process.kill()  # by itself it would take torch down for seconds first
        # On a busy machine this takes longer; nothing can refuse the signal, so nothing is left to do.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        deadline = time.monotonic() + _END_SECONDS
        while any(map(is_alive, self._pids.values())) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def _ask(self, *request: object) -> None:
        try:
            self._connection.send(request)
        except OSError as error:
            raise self._gone() from error

    def _gone(self, how: str = "has ended") -> ClusterError:
        self._end()
        return ClusterError(f"the process that starts the roles (pid {self._process.pid}) {how}")


def is_alive(pid: int) -> bool:
    """Whether a process is there that has not ended."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
