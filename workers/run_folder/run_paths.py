"""Where a run keeps its files. Free of torch, so that the launcher can refuse at once."""

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from pathlib import Path

from hybrid.config import RunConfig
from hybrid.config.loading import CONFIG_FILE
from hybrid.errors import ConfigError, HybridError
from hybrid.storage import files
from hybrid.storage.remote_path import StoragePath, parse_path
from hybrid.topology import Role

RUNS = Path("runs")
METRICS_FILE = "metrics.jsonl"
RESULT_FILE = "result.json"  # there only if the run came to its end
_RUN_FILES = (CONFIG_FILE, METRICS_FILE, RESULT_FILE)


def run_path(config: RunConfig) -> StoragePath:
    """The folder of a new run: run.folder, or one named after the run and the time."""
    if config.run.folder:
        return parse_path(config.run.folder)
    first = path = RUNS / f"{config.run.name}-{datetime.now():%Y%m%d-%H%M%S}"
    number = 2
    while path.exists():  # another run of the same second
        path = first.with_name(f"{first.name}.{number}")
        number += 1
    return path


def runs_named(name: str) -> list[Path]:
    """The folders of the runs of a name, as :func:`run_path` names them, the newest first."""
    found = {
        path: re.fullmatch(rf"{re.escape(name)}-(\d{{8}}-\d{{6}})(?:\.(\d+))?", path.name)
        for path in RUNS.glob("*")
    }
    started = {path: (match[1], int(match[2] or 1)) for path, match in found.items() if match}
    return sorted(started, key=lambda path: started[path], reverse=True)


def refuse_existing(path: StoragePath) -> None:
    """ConfigError where ``path`` holds a run, or is no folder."""
    if files.is_file(path):
        raise ConfigError("run.folder", "is a file; choose another", str(path))
    if any(files.exists(path / name) for name in _RUN_FILES):
        raise ConfigError("run.folder", "holds a run already; choose another, or remove it", str(path))


def log_path(run: Path, role: Role) -> Path:
    """The log of one role, where the launcher started it."""
    return run / "logs" / f"{str(role).replace(' ', '-')}.log"


@contextmanager
def run_write_errors(path: Path, elsewhere: str = "set run.folder to another place") -> Iterator[None]:
    """Turn an OSError in here into one line for the user, that ``path`` cannot be written.

    Args:
        elsewhere: what else can be done than to make room.
    """
    try:
        yield
    except OSError as error:
        why = error.strerror or error
        raise HybridError(f"{path}: cannot be written: {why}; make room there, or {elsewhere}") from error


def scratch_write_errors() -> AbstractContextManager[None]:
    """The same, for the system's temporary folder."""
    return run_write_errors(Path(tempfile.gettempdir()), "set TMPDIR to another place")


@contextmanager
def scratch_logs(prefix: str) -> Iterator[Path]:
    """A folder for the logs of a cluster that leaves no run; it stays only where an error points to it."""
    with scratch_write_errors():
        folder = Path(tempfile.mkdtemp(prefix=prefix))
    is_wanted = False
    try:
        yield folder
    except HybridError as error:
        is_wanted = str(folder) in str(error)
        raise
    finally:
        if not is_wanted:
            shutil.rmtree(folder)


def command_name() -> str:
    """How the user can call this program from the current folder."""
    script = Path(sys.executable).with_name("hybrid")
    if shutil.which("hybrid"):
        return "hybrid"
    return os.path.relpath(script) if script.exists() else "python -P -m workers"
