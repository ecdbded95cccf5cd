"""The paths of a run's files. Free of torch, so that the launcher can refuse a run at once."""

import os
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
RESULT_FILE = "result.json"  # exists only if the run has finished


def run_path(config: RunConfig) -> StoragePath:
    """Return the folder of a new run: run.folder, or a name from the run's name and the time."""
    if config.run.folder:
        return parse_path(config.run.folder)
    first = path = RUNS / f"{config.run.name}-{datetime.now():%Y%m%d-%H%M%S}"
    number = 2
    while path.exists():  # another run of the same second
        path = first.with_name(f"{first.name}.{number}")
        number += 1
    return path


def refuse_existing(path: StoragePath) -> None:
    """Raise ConfigError if ``path`` contains a run, or is a file."""
    if files.is_file(path):
        raise ConfigError("run.folder", "is a file; choose another folder", str(path))
    if any(files.exists(path / name) for name in (CONFIG_FILE, METRICS_FILE, RESULT_FILE)):
        rule = "contains a run already; choose another folder, or remove it"
        raise ConfigError("run.folder", rule, str(path))


def log_path(run: Path, role: Role) -> Path:
    """Return the path of the log of a role that the launcher has started."""
    return run / "logs" / f"{str(role).replace(' ', '-')}.log"


@contextmanager
def run_write_errors(path: Path, remedy: str = "set run.folder to another folder") -> Iterator[None]:
    """Convert an OSError in the context to one line for the user: ``path`` cannot be written.

    Args:
        remedy: what helps besides freeing space.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise HybridError(f"{path}: cannot be written: {reason}; free space there, or {remedy}") from error


def scratch_write_errors() -> AbstractContextManager[None]:
    """Convert an OSError in the context to one line about the system's temporary folder."""
    return run_write_errors(Path(tempfile.gettempdir()), "set TMPDIR to another folder")


@contextmanager
def scratch_logs(prefix: str) -> Iterator[Path]:
    """Yield a folder for the logs of a cluster without a run; it remains only if an error names it."""
    with scratch_write_errors():
        folder = Path(tempfile.mkdtemp(prefix=prefix))
    is_named = False
    try:
        yield folder
    except HybridError as error:
        is_named = str(folder) in str(error)
        raise
    finally:
        if not is_named:
            shutil.rmtree(folder)


def command_name() -> str:
    """Return how the user can call this program from the current folder."""
    script = Path(sys.executable).with_name("hybrid")
    if shutil.which("hybrid"):
        return "hybrid"
    return os.path.relpath(script) if script.exists() else "python -P -m workers"
