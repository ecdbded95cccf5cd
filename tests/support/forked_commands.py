"""Commands without the seconds that it takes to import torch: forked from a process that has imported it.

Of ``python -m workers`` only the start of the interpreter is left out, twice: that of the command, and under
``launch`` that of the server which forks the roles.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from unittest import mock

from support.fork_context import fork_context

from workers.cli import main
from workers.launching import fork_server
from workers.launching.fork_server import serve

_POLL_SECONDS = 0.005
_FIRST_FILE = 3  # after those of input and output


def _stay() -> None:
    """Stay in the namespaces of this process."""


class ForkedCommand:
    """A command in a new session, with some of the methods of :class:`subprocess.Popen`.

    Args:
        arguments: of the command, after ``hybrid``.
        output: of this name with the suffixes ``.out`` and ``.err``.
        enter: called by its process once its output is open, and before it goes to its folder.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        output: Path,
        enter: Callable[[], None] = _stay,
    ) -> None:
        for file in _files(output):
            file.touch()
        context = fork_context()
        self._process = context.Process(
            target=_main, args=(list(arguments), folder, dict(environment), output, enter), name="hybrid"
        )
        self._process.start()
        self.pid: int = self._process.pid or 0

    def wait(self, timeout: float) -> int:
        """Return the exit code, or minus the number of the signal that killed it."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("hybrid", timeout)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send a signal if the command runs."""
        if self._process.is_alive():
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the command."""
        self._process.kill()


def _main(
    arguments: list[str], folder: Path, environment: dict[str, str], output: Path, enter: Callable[[], None]
) -> None:
    os.setsid()
    # These tests may run under nohup or in the background, where signals are ignored; the command does not.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environment)
    for descriptor, path in enumerate((Path(os.devnull), *_files(output))):
        opened = os.open(path, os.O_WRONLY | os.O_APPEND if descriptor else os.O_RDONLY)
        os.dup2(opened, descriptor)
        os.close(opened)
    enter()
    os.chdir(folder)
    with mock.patch.object(fork_server, "spawn_server", _fork_server):
        main(arguments)


def _files(output: Path) -> tuple[Path, Path]:
    return output.with_suffix(".out"), output.with_suffix(".err")


def _fork_server(connection: socket.socket, inherited: Sequence[int]) -> "_Child":
    """Fork the server of a launch, instead of starting an interpreter as spawn_server does."""
    launcher = os.getpid()
    if pid := os.fork():
        return _Child(pid)
    try:
        # As in a new interpreter: no handlers, and only the given files.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        first = _FIRST_FILE
        for kept in sorted([connection.fileno(), *inherited]):
            os.closerange(first, kept)
            first = kept + 1
        os.closerange(first, os.sysconf("SC_OPEN_MAX"))
        serve(connection.fileno(), launcher)
    finally:
        sys.stdout.flush()
        os._exit(1)


class _Child:
    """The forked server, with some of the methods of :class:`subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("the server", timeout)
            time.sleep(_POLL_SECONDS)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
