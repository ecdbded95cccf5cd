"""A server process that imports torch once and forks the processes of a launch.

::

    launcher                     server                        role
    ────────                     ──────                        ────
    "isolate"         ─────────► enters a network namespace
    "preload"         ─────────► imports torch
    "start"           ─────────► listens, forks all roles ───► run
                      ◄───────── their pids                    │
                      ◄───────── ProcessEnd ◄──────────────────┘ report, exit code or signal
    "signal worker 0" ─────────► signals it

The system kills the server when the launcher ends, and the roles when the server ends, even frozen roles.
The fork server of ``multiprocessing`` is not used, because its children outlive it, and it leaves a folder
with a socket. Neither this module nor the launcher imports torch.
"""

import ctypes
import fcntl
import importlib
import multiprocessing
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, Self, TypeAlias

import psutil

from hybrid.errors import ClusterError, HybridError
from hybrid.module_imports import fast_imports
from workers.exit_codes import HANDLED_SIGNALS, STOP_REQUEST
from workers.rendezvous.host_setup import LOOPBACK, listen

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15  # linux/prctl.h
_ARG_START, _ARG_END = 45, 46  # positions in proc_pid_stat(5), after the name
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000  # linux/sched.h
_SIOCGIFFLAGS, _SIOCSIFFLAGS = 0x8913, 0x8914  # linux/sockios.h
_IFF_UP = 1
_INTERFACE_FLAGS = struct.Struct("16sh22x")  # struct ifreq of netdevice(7)
_END_SECONDS = 10.0
_REPLY_SECONDS = 600.0  # a request may include the import of torch
_POLL_SECONDS = 0.01

# The response to a request: the pids of started processes, nothing, or the error.
Reply: TypeAlias = dict[str, int] | Exception | None


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """The event that a process has ended."""

    name: str
    exit_code: int  # of the process; minus the number of the signal if a signal killed it
    report: Any = None  # the report that the process sent, or None


def end_with_parent(parent: int) -> None:
    """Make the system kill this process, even if frozen, when ``parent`` ends; exit if it ended already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # the parent has ended already
        os._exit(1)


def name_process(name: str) -> None:
    """Name this process "hybrid NAME" for ``ps``, and NAME for ``top``, which shows 15 characters."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[_ARG_START]), int(fields[_ARG_END])  # of the arguments in memory
    title = f"hybrid {name}".encode()[: max(0, end - start - 1)]  # no addresses if the system hides them
    ctypes.memmove(start, title.ljust(end - start, b"\0"), end - start)


def serve(descriptor: int, launcher: int) -> None:
    """Run the server: handle requests from the socket ``descriptor`` until the process ``launcher`` ends."""
    end_with_parent(launcher)
    name_process("fork server")
    for name in ("LOCAL_RANK", "SLURM_LOCALID"):  # with these variables, all trainers would use the same GPU
        os.environ.pop(name, None)
    # A terminal or scheduler may send these signals to every process; only the launcher handles them.
    for number in HANDLED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED_SIGNALS)
    signal.pthread_sigmask(signal.SIG_BLOCK, [STOP_REQUEST])  # until the master is ready for it
    server = _Server(Connection(descriptor))
    with suppress(EOFError):
        while True:
            server.handle_events()


class _Server:
    """The server's side: handles the requests of the launcher, and reports the ends of processes."""

    def __init__(self, to_launcher: Connection) -> None:
        self._connection = to_launcher
        self._handlers: dict[str, Callable[..., Reply]] = {
            "isolate": enter_network_namespace,
            "preload": _import,
            "start": self._start,
        }
        self._processes: dict[str, tuple[ForkProcess, Connection]] = {}

    def handle_events(self) -> None:
        """Wait for a request or the end of a process, and handle it; EOFError if the launcher has ended."""
        by_sentinel = {process.sentinel: name for name, (process, _) in self._processes.items()}
        for ready in wait([self._connection, *by_sentinel]):
            if ready is self._connection:
                request, *args = self._connection.recv()
                if request == "signal":
                    name, number = args
                    # The pid cannot belong to another process, because the ended process is not reaped yet.
                    if name in self._processes and (pid := self._processes[name][0].pid) is not None:
                        os.kill(pid, number)
                    continue
                try:
                    reply = self._handlers[request](*args)
                except (OSError, HybridError) as error:
                    reply = error
                self._connection.send(reply)
            else:
                process, reader = self._processes.pop(by_sentinel[ready])  # type: ignore[index]  # a number
                process.join()
                report = None
                # Without a report, recv would wait for the children of the process, which may outlive it.
                with reader, suppress(EOFError):
                    report = reader.recv() if reader.poll() else None
                self._connection.send(ProcessEnd(process.name, process.exitcode or 0, report))
                process.close()

    def _start(self, work: bytes, address: str, port: int) -> dict[str, int]:
        with listen(address, port) as listener:
            target, calls = pickle.loads(work)
            context = multiprocessing.get_context("fork")
            pids = {}
            for name, args in calls.items():
                reader, writer = context.Pipe(duplex=False)
                run = (os.getpid(), target, (*args, listener, writer.send))
                process = context.Process(target=self._run, args=run, name=name)
                process.start()
                writer.close()
                self._processes[name] = process, reader
                pids[name] = process.pid or 0
        return pids

    def _run(self, server: int, target: Callable[..., None], args: Sequence[Any]) -> None:
        end_with_parent(server)
        name_process(multiprocessing.current_process().name)
        self._connection.close()
        target(*args)


def _import(modules: Sequence[str]) -> None:
    try:
        with fast_imports():
            for module in modules:
                importlib.import_module(module)
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise HybridError(f"the process that starts the roles has failed: {reason}") from None


def spawn_server(connection: socket.socket, inherited: Sequence[int]) -> Any:
    """Start a server, and return its Popen; the server and roles inherit the descriptors ``inherited``."""
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; from workers.launching.fork_server import serve; "
        f"serve({connection.fileno()}, {os.getpid()})"
    )
    # The signals are blocked until the server ignores them.
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED_SIGNALS)
    try:
        command = [sys.executable, "-c", code]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[connection.fileno(), *inherited])
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED_SIGNALS)


class ForkServer:
    """The launcher's side of the server; its ``with`` block ends the server and all roles.

    If the server has ended, all roles have ended, too. Then every method but :meth:`is_running` raises
    ClusterError.

    Args:
        preload: modules to import before the first start.
        inherited: descriptors that the server and all roles inherit.

    Attributes:
        is_isolated: whether the server and the roles are in a network namespace.
    """

    def __init__(self, preload: Sequence[str], inherited: Sequence[int] = ()) -> None:
        launcher_end, server_end = socket.socketpair()
        with server_end:
            self._process = spawn_server(server_end, inherited)
        self._connection = Connection(launcher_end.detach())
        self._preload = tuple(preload)
        self._pids: dict[str, int] = {}
        self.is_isolated = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._connection.close()

    def is_running(self) -> bool:
        return self._process.poll() is None

    def isolate(self) -> None:
        """Move the server into a network namespace, before the first start.

        OSError if the system forbids it; then another server is needed.
        """
        self._call("isolate")
        self.is_isolated = True

    def preload(self) -> None:
        """Import the modules now instead of in the first :meth:`start`; HybridError if an import fails."""
        self._call("preload", self._preload)

    def start(
        self,
        target: Callable[..., None],
        calls: Mapping[str, Sequence[Any]],
        address: str = "127.0.0.1",
        port: int = 0,
    ) -> dict[str, int]:
        """Start processes that run ``target(*args, listener, report)``; :meth:`event` returns their ends.

        Args:
            target: a module-level function. All processes share ``listener``, a socket that listens on the
                address. ``report`` takes one object of less than 64 KiB, which the launcher receives when the
                process has ended.
            calls: the arguments ``args`` of each process, by the name of the process.
            address, port: where ``listener`` listens; port 0 selects a free port.

        Returns:
            The process ids by name.

        Raises:
            HybridError: a module cannot be imported, the server cannot listen on the address, or the system
                refuses to start another process.
        """
        self.preload()
        try:
            self._pids = self._call("start", pickle.dumps((target, calls)), address, port)
        except OSError as error:
            remedy = "check the memory, and the limit on processes (ulimit -u)"
            raise ClusterError(f"the system starts no process: {error.strerror}; {remedy}") from error
        return dict(self._pids)

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to the process called ``name``; nothing happens if the process has ended."""
        self._send(("signal", name, number))

    def event(self, timeout_seconds: float) -> ProcessEnd | None:
        """Wait until a process ends, and return the event; None if the timeout passes first."""
        if not self._connection.poll(timeout_seconds):
            return None
        message = self._receive()
        assert isinstance(message, ProcessEnd), "no request is open"
        return message

    def _call(self, *request: object) -> dict[str, int]:
        """Send a request; return the process ids in the reply, or raise the error in the reply."""
        self._send(request)
        while self._connection.poll(_REPLY_SECONDS):
            reply = self._receive()
            if isinstance(reply, Exception):
                raise reply
            if not isinstance(reply, ProcessEnd):  # the end of a role of the previous start
                return reply or {}
        raise self._dead_server(f"has not replied for {_REPLY_SECONDS:g} s")

    def _receive(self) -> ProcessEnd | Reply:
        try:
            message: ProcessEnd | Reply = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._dead_server() from error
        if isinstance(message, ProcessEnd):
            self._pids.pop(message.name, None)
        return message

    def _end(self) -> None:
        self._process.kill()  # a normal exit would take seconds to unload torch
        # A process cannot refuse SIGKILL, so nothing else helps if a busy machine takes longer.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        deadline = time.monotonic() + _END_SECONDS
        while any(map(is_alive, self._pids.values())) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def _send(self, request: object) -> None:
        try:
            self._connection.send(request)
        except OSError as error:
            raise self._dead_server() from error

    def _dead_server(self, how: str = "has ended") -> ClusterError:
        self._end()
        return ClusterError(f"the process that starts the roles (pid {self._process.pid}) {how}")


def is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def enter_network_namespace() -> None:
    """Move this process and its future children into a new network namespace that has only loopback.

    OSError if the system forbids it; then the process may have lost its user id, and should end. Root creates
    the network namespace directly. Other users also create a user namespace, in which they keep their user
    id. The process must not have started threads yet.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) != 0:
        user, group = os.geteuid(), os.getegid()
        if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        process = Path("/proc/self")
        (process / "setgroups").write_text("deny")
        (process / "uid_map").write_text(f"{user} {user} 1")
        (process / "gid_map").write_text(f"{group} {group} 1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = _INTERFACE_FLAGS.pack(LOOPBACK.encode(), 0)
        name, flags = _INTERFACE_FLAGS.unpack(fcntl.ioctl(control, _SIOCGIFFLAGS, request))
        fcntl.ioctl(control, _SIOCSIFFLAGS, _INTERFACE_FLAGS.pack(name, flags | _IFF_UP))
