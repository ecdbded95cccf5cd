"""Commands that start fast, because they are forked from a process that has imported torch.

They run as ``python -m hybrid`` does, but start no interpreter: neither for the command, nor under
``launch`` for the server that forks the roles.
"""

import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkProcess
from pathlib import Path
from unittest import mock

from support.fork_context import fork_context
from support.namespaces import enter

from workers.cli import main
from workers.launching import fork_server
from workers.launching.fork_server import serve

_FIRST_FILE = 3  # after those of input and output


class ForkedCommand:
    """A command in a new session, with some of the methods of :class:`subprocess.Popen`.

    Args:
        arguments: the words after ``hybrid``.
        output: a terminal, or the name of files to which the suffixes ``.out`` and ``.err`` are added.
        host: a process whose namespaces the command enters; 0 for none. ``folder`` is a path in them.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        output: Path,
        host: int = 0,
    ) -> None:
        for file in _files(output)[1:]:
            file.touch()
        context = fork_context()
        self._process = context.Process(
            target=_main, args=(list(arguments), folder, dict(environment), output, host), name="hybrid"
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


def _main(arguments: list[str], folder: Path, environment: dict[str, str], output: Path, host: int) -> None:
    os.setsid()
    # These tests may run under nohup or in the background, where signals are ignored; the command does not.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environment)
    for descriptor, path in enumerate(_files(output)):
        opened = os.open(path, os.O_WRONLY | os.O_APPEND if descriptor else os.O_RDONLY)
        os.dup2(opened, descriptor)
        os.close(opened)
    if host:
        enter(host)
        if child := os.fork():  # only a child is in the namespace of process numbers
            os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    os.chdir(folder)
    with mock.patch.object(fork_server, "spawn_server", _Server):
        main(arguments)


def _files(output: Path) -> tuple[Path, Path, Path]:
    if output.is_char_device():
        return output, output, output
    return Path(os.devnull), output.with_suffix(".out"), output.with_suffix(".err")


class _Server(ForkProcess):
    """The server of a launch, with some of the methods of :class:`subprocess.Popen`."""

    def __init__(self, connection: socket.socket, inherited: Sequence[int]) -> None:
        super().__init__()
        self._connection, self._inherited, self._launcher = connection.fileno(), inherited, os.getpid()
        self.start()

    def run(self) -> None:
        # As in a new interpreter: no handlers, and only the given files.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        first = _FIRST_FILE
        for kept in sorted([self._connection, *self._inherited]):
            os.closerange(first, kept)
            first = kept + 1
        os.closerange(first, os.sysconf("SC_OPEN_MAX"))
        serve(self._connection, self._launcher)

    def poll(self) -> int | None:
        return self.exitcode

    def wait(self, timeout: float) -> None:
        self.join(timeout)
