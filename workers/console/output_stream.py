"""Output that may go away while a command runs: a closed pipe, a full disk, a closed terminal.

Printing raises no error: text that cannot be written is lost, and the command reports the loss once.
"""

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

_STDOUT, _STDERR = 1, 2


@dataclass
class LostOutput:
    """The output streams of a process that cannot be written any more."""

    command: str  # name of the command, for messages
    run_continues: bool  # whether the command does more than print
    names: tuple[str, str]  # of stdout and stderr, for messages
    report_to: int  # descriptor to which messages are written
    streams: set[str] = field(default_factory=set)  # names of the lost streams

    def add(self, descriptor: int, error: OSError) -> None:
        """Report once that a stream cannot be written."""
        name = self.names[descriptor - _STDOUT]
        if name in self.streams:
            return
        self.streams.add(name)
        # If a reader closes the pipe of a command that only prints, nothing is wrong.
        should_report = self.run_continues or not isinstance(error, BrokenPipeError)
        if self.report_to != descriptor and should_report:
            effect = "output is lost, the run continues" if self.run_continues else "output is lost"
            with suppress(OSError):
                os.write(self.report_to, f"{self.command}: {name}: {error.strerror}; {effect}\n".encode())


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
    report_to: int = _STDERR,
) -> Iterator[LostOutput]:
    """Keep this process running in the block although stdout or stderr cannot be written.

    A closed descriptor is replaced by one that refuses writes, so that no other file gets its number.

    Args:
        command, run_continues, names, report_to: see :class:`LostOutput`.
    """
    for descriptor in range(_STDERR + 1):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDONLY)  # gets the lowest free number
            os.set_inheritable(opened, True)
    lost, before = LostOutput(command, run_continues, names, report_to), (sys.stdout, sys.stderr)
    # Tests replace the streams.
    if sys.stdout is sys.__stdout__:
        sys.stdout = _wrap(sys.stdout, _TolerantFile(_STDOUT, lost.add))
    if sys.stderr is sys.__stderr__:
        sys.stderr = _wrap(sys.stderr, _TolerantFile(_STDERR, lost.add))
    try:
        yield lost
    finally:
        for file, previous in zip((sys.stdout, sys.stderr), before, strict=True):
            if file is not previous:
                file.flush()
        sys.stdout, sys.stderr = before


def _wrap(previous: Any, file: io.FileIO) -> io.TextIOWrapper:
    """Return ``file`` as a text stream with the settings of ``previous``, which is None if it was closed."""
    return io.TextIOWrapper(
        io.BufferedWriter(file),
        encoding=getattr(previous, "encoding", "utf-8"),
        errors=getattr(previous, "errors", "backslashreplace"),
        line_buffering=getattr(previous, "line_buffering", False) or file.fileno() == _STDERR,
    )
