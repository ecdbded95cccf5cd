"""Output that may go away while a command lasts: a reader has seen enough, a disk is full, a terminal closed.

Whoever prints, in Python, prints on: what cannot be written is lost, and that is said once.
"""

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

_STDOUT, _STDERR = 1, 2


class Losses:
    """What of the output is lost.

    Args:
        name: of the command, for what it says.
        goes_on: whether the command does something else than to print.
        files: what stdout and stderr are called.
        aside: a descriptor of a file to say it on; None where there is no other.
    """

    def __init__(self, name: str, goes_on: bool, files: tuple[str, str], aside: int | None) -> None:
        self._name = name
        self._goes_on = goes_on
        self._files = dict(zip((_STDOUT, _STDERR), files, strict=True))
        self._aside = aside
        self._said: set[str] = set()

    @property
    def any(self) -> bool:
        """Whether there are any."""
        return bool(self._said)

    def add(self, descriptor: int, error: OSError) -> None:
        """Say that nothing more can be written to one of the files, and let its writers believe it can."""
        _open_nothing(descriptor, os.O_WRONLY)
        file = self._files[descriptor]
        if file in self._said:
            return
        self._said.add(file)
        is_wanted = self._goes_on or not isinstance(error, BrokenPipeError)
        if self._aside is not None and self._aside != descriptor and is_wanted:
            then = "output is lost, the run goes on" if self._goes_on else "output is lost"
            with suppress(OSError):
                os.write(self._aside, f"{self._name}: {file}: {error.strerror}; {then}\n".encode())


class _Lasting(io.FileIO):
    """A file of which it is no error that nothing can be written to it."""

    def __init__(self, descriptor: int, lose: Callable[[int, OSError], None]) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._lose = lose

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self._lose(self.fileno(), error)
            return memoryview(data).nbytes


@contextmanager
def lasting_output(
    name: str, *, goes_on: bool, files: tuple[str, str] = ("stdout", "stderr"), aside: int | None = _STDERR
) -> Iterator[Losses]:
    """In here, this process does not fail for want of a place to print to.

    A file that is closed counts as one that cannot be written; what is opened in here is never taken for it.

    Args:
        name, goes_on, files, aside: see :class:`Losses`.
    """
    for descriptor in range(_STDERR + 1):
        try:
            os.fstat(descriptor)
        except OSError:
            _open_nothing(descriptor, os.O_RDONLY)
    losses, before = Losses(name, goes_on, files, aside), (sys.stdout, sys.stderr)
    # Tests put files of their own in the place of the first two.
    if sys.stdout is sys.__stdout__:
        sys.stdout = _wrapped(sys.stdout, _Lasting(_STDOUT, losses.add))
    if sys.stderr is sys.__stderr__:
        sys.stderr = _wrapped(sys.stderr, _Lasting(_STDERR, losses.add))
    try:
        yield losses
    finally:
        for file, previous in zip((sys.stdout, sys.stderr), before, strict=True):
            if file is not None and file is not previous:
                file.flush()
        sys.stdout, sys.stderr = before


def _open_nothing(descriptor: int, how: int) -> None:
    """Have a descriptor lead to nothing: a null device that refuses to be written, or takes it all."""
    opened = os.open(os.devnull, how)
    os.set_inheritable(opened, True)
    if opened != descriptor:
        os.dup2(opened, descriptor)
        os.close(opened)


def _wrapped(before: Any, file: io.FileIO) -> io.TextIOWrapper:
    """``file`` as text, written as the one before was; that may be None where it was closed."""
    return io.TextIOWrapper(
        io.BufferedWriter(file),
        encoding=getattr(before, "encoding", "utf-8"),
        errors=getattr(before, "errors", "backslashreplace"),
        line_buffering=getattr(before, "line_buffering", False) or file.fileno() == _STDERR,
    )
