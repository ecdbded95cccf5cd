"""Output that may go away while a command runs: a closed pipe, a full disk, a closed terminal.

Python code prints on: text that cannot be written is lost, and the command reports the loss once.
"""

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

_STDOUT, _STDERR = 1, 2


class LostOutput:
    """The output streams of a process that cannot be written any more.

    Args:
        command: its name, for messages.
        run_continues: whether the command does more than print.
        names: of stdout and stderr, for messages.
        report_to: descriptor for messages; None for no messages.
    """

    def __init__(
        self, command: str, run_continues: bool, names: tuple[str, str], report_to: int | None
    ) -> None:
        self._command = command
        self._run_continues = run_continues
        self._names = dict(zip((_STDOUT, _STDERR), names, strict=True))
        self._report_to = report_to
        self._reported: set[str] = set()

    @property
    def any(self) -> bool:
        """Whether output was lost."""
        return bool(self._reported)

    def add(self, descriptor: int, error: OSError) -> None:
        """Report that a stream cannot be written, and redirect it to the null device."""
        _open_null_device(descriptor, os.O_WRONLY)
        name = self._names[descriptor]
        if name in self._reported:
            return
        self._reported.add(name)
        # A command that only prints has nothing to report to a reader that closes the pipe.
        is_news = self._run_continues or not isinstance(error, BrokenPipeError)
        if self._report_to is not None and self._report_to != descriptor and is_news:
            effect = "output is lost, the run continues" if self._run_continues else "output is lost"
            with suppress(OSError):
                os.write(self._report_to, f"{self._command}: {name}: {error.strerror}; {effect}\n".encode())


class _TolerantFile(io.FileIO):
    """A file whose write errors are reported instead of raised."""

    def __init__(self, descriptor: int, report: Callable[[int, OSError], None]) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._report = report

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self._report(self.fileno(), error)
            return memoryview(data).nbytes


@contextmanager
def tolerate_lost_output(
    command: str,
    *,
    run_continues: bool,
    names: tuple[str, str] = ("stdout", "stderr"),
    report_to: int | None = _STDERR,
) -> Iterator[LostOutput]:
    """Keep this process running in the block although stdout or stderr cannot be written.

    A closed descriptor counts as one that cannot be written; files that are opened later get other numbers.

    Args:
        command, run_continues, names, report_to: see :class:`LostOutput`.
    """
    for descriptor in range(_STDERR + 1):
        try:
            os.fstat(descriptor)
        except OSError:
            _open_null_device(descriptor, os.O_RDONLY)
    lost, before = LostOutput(command, run_continues, names, report_to), (sys.stdout, sys.stderr)
    # Tests replace the streams by files of their own.
    if sys.stdout is sys.__stdout__:
        sys.stdout = _wrap(sys.stdout, _TolerantFile(_STDOUT, lost.add))
    if sys.stderr is sys.__stderr__:
        sys.stderr = _wrap(sys.stderr, _TolerantFile(_STDERR, lost.add))
    try:
        yield lost
    finally:
        for file, previous in zip((sys.stdout, sys.stderr), before, strict=True):
            if file is not None and file is not previous:
                file.flush()
        sys.stdout, sys.stderr = before


def _open_null_device(descriptor: int, flags: int) -> None:
    """Open the null device as ``descriptor``: read-only, it refuses writes; write-only, it takes them."""
    opened = os.open(os.devnull, flags)
    os.set_inheritable(opened, True)
    if opened != descriptor:
        os.dup2(opened, descriptor)
        os.close(opened)


def _wrap(before: Any, file: io.FileIO) -> io.TextIOWrapper:
    """Return ``file`` as text with the settings of the stream before, which is None if that was closed."""
    return io.TextIOWrapper(
        io.BufferedWriter(file),
        encoding=getattr(before, "encoding", "utf-8"),
        errors=getattr(before, "errors", "backslashreplace"),
        line_buffering=getattr(before, "line_buffering", False) or file.fileno() == _STDERR,
    )
