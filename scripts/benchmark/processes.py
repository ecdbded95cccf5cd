"""Starting a command, and ending all of its processes."""

import os
import subprocess
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from benchmark.systems import ROOT

ERRORS = "errors.txt"
_GRACE_SECONDS = 8.0  # between SIGTERM and SIGKILL
_MARK = "BENCH_ID"


@contextmanager
def started(
    arguments: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[str]]:
    """Start a command in a separate process group, and end all of its processes at the end of the block.

    Args:
        folder: working directory, also for temporary files and standard error.
        environment: additional environment variables.
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
    """Terminate the command, and kill its remaining processes."""
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
    """Return all living processes that the command started, whatever their parent is now."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.environ().get(_MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
