"""Starting a command whose processes are all found and ended again."""

import os
import subprocess
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from benchmark.systems import ROOT

ERRORS = "errors.txt"
_GRACE_SECONDS = 8.0  # for a command that is asked to stop
_MARK = "BENCH_ID"


@contextmanager
def started(
    arguments: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[str]]:
    """A command in a process group of its own; nothing is left of it at the end of the block.

    Args:
        folder: where it runs and keeps its temporary files; what it prints as errors goes to a file there.
        environment: variables that it gets on top of those of this process.
    """
    mark = uuid.uuid4().hex
    paths = os.pathsep.join([str(ROOT / "scripts"), str(ROOT)])
    variables = {**os.environ, "PYTHONPATH": paths, "TMPDIR": str(folder), **environment, _MARK: mark}
    with (folder / ERRORS).open("w") as errors:
        process = subprocess.Popen(
            arguments,
            cwd=folder,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    try:
        yield process
    finally:
        _end(process, mark)


def _end(process: subprocess.Popen[str], mark: str) -> None:
    """Ask the command to stop where it still runs, and kill what is left of it."""
    try:
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_SECONDS)
    finally:
        for left in _marked(mark):
            with suppress(psutil.NoSuchProcess):
                left.kill()
        process.wait()


def _marked(mark: str) -> list[psutil.Process]:
    """All living processes that the command started, whoever their parent is now."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.environ().get(_MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
