"""A run's folder: paths, progress, rules for resuming, lock, and the local files of a run in a store.

A store cannot append to a file. So a run in a store keeps logs, metrics.jsonl and other files in a private
folder of this machine, and uploads them before each checkpoint and at the end. The file ``.store`` in this
folder has the URL of the run. Checkpoints are written to the store directly. Does not import torch.
"""

import hashlib
import os
import re
import shlex
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from hybrid.checkpoint import checkpoint_folders
from hybrid.config import RunConfig
from hybrid.config.loading import CONFIG_FILE, fixed_values, load_config
from hybrid.config.sections import NAMED_KEYS, SECTION_KEYS
from hybrid.errors import ConfigError, HybridError, StorageError
from hybrid.loggers.record_file import METRICS_FILE, read_records
from hybrid.storage import files
from hybrid.storage.locked_folders import LOCK_FILE, folder_lock
from hybrid.storage.private_files import private_user_folder, refuse_link
from hybrid.storage.remote_path import RemotePath, StoragePath, parse_path
from hybrid.topology import Role
from hybrid.user_code.run_signature import load_run_config
from workers.console import print_line

RUNS = Path("runs")
RESTARTS_FILE = "restarts.jsonl"
SWEEP = "sweep"  # a launch with ``--seeds``
RESULT_FILE = "result.json"  # exists only if the run has finished
_STORE_FILE = ".store"  # contains the URL of the run
OTHER_OUTPUT = "choose another --output"  # a remedy of run_write_errors
_RESUME_FILE = ".resume"  # in the scratch folder of a script: the path from which the script resumes
_DIGEST_CHARACTERS = 12
_CLOCK_TOLERANCE_NS = 60_000_000_000  # between the clocks of this machine and of the store
UNKNOWN_FRACTION = ".unknown_fraction"  # end of names of numbers in a record
_STALE_SECONDS = 60.0  # by this age, a running command has locked its scratch folder
_LIMITS = ("epochs", "max_steps", "patience")  # keys of [train] that limit the length of a run


def run_path(config: RunConfig) -> StoragePath:
    """Return a path for a new run, and create nothing: ``run.folder``, or an unused runs/NAME-TIME."""
    if config.run.folder:
        return parse_path(config.run.folder)
    first = path = RUNS / f"{config.run.name}-{datetime.now():%Y%m%d-%H%M%S}"
    number = 2
    while files.exists(path):  # another run started in the same second
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
    """Return the path of a role's log in the folder ``run``, for roles that the launcher has started."""
    return run / "logs" / f"{str(role).replace(' ', '-')}.log"


@contextmanager
def run_write_errors(path: StoragePath, remedy: str = "set run.folder to another folder") -> Iterator[None]:
    """Convert OSErrors in this block to a HybridError about ``path``; StorageErrors are not converted.

    Args:
        remedy: the end of the message "free space there, or ...".
    """
    try:
        yield
    except StorageError:  # its message has the remedy
        raise
    except OSError as error:
        reason = error.strerror or error
        raise HybridError(f"{path}: cannot be written: {reason}; free space there, or {remedy}") from error


@contextmanager
def scratch_logs(prefix: str) -> Iterator[Path]:
    """Yield a temporary folder for logs. Remove it at the end, unless a HybridError mentions its path.

    Also remove the folders with this prefix that killed commands have left.
    """
    _remove_stale_logs(prefix)
    with run_write_errors(Path(tempfile.gettempdir()), "set TMPDIR to another folder"):
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


def _remove_stale_logs(prefix: str) -> None:
    """Remove folders of killed commands: this user's old temporary folders whose lock file is not locked."""
    for lock in Path(tempfile.gettempdir()).glob(f"{prefix}*/{LOCK_FILE}"):
        with suppress(OSError, HybridError):  # it is in use, or another command removes it
            status = lock.lstat()
            if status.st_uid == os.geteuid() and status.st_mtime < time.time() - _STALE_SECONDS:
                with folder_lock(lock.parent, wait_seconds=0.0):
                    shutil.rmtree(lock.parent)


def command_name() -> str:
    """Return the command by which the user can call this program from the current folder."""
    script = Path(sys.executable).with_name("hybrid")
    if shutil.which("hybrid"):
        return "hybrid"
    return os.path.relpath(script) if script.exists() else "python -P -m hybrid"


def checkpoint_root(folder: Path) -> StoragePath:
    """Return the folder of a run's checkpoints: the URL in its file ``.store``, or the local folder itself.

    HybridError if the file cannot be read, or ``folder`` is not the folder that hybrid creates for the URL.
    """
    path = folder / _STORE_FILE
    if not os.path.lexists(path):
        return folder
    try:
        run, status = parse_path(files.read_text(path)), folder.stat()
    except (OSError, ValueError) as error:
        raise HybridError(f"{path}: cannot be read: {error}; remove it") from error
    is_private = status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    if not (isinstance(run, RemotePath) and is_private and folder.resolve() == _local_folder(run).resolve()):
        rule = "names a store, but this folder was not made for a run in it"
        raise HybridError(f"{path}: {rule}; remove the file, or name the run by its URL")
    return run


def record_script_checkpoints(scratch: Path, folder: StoragePath) -> None:
    """Record the path of a script's checkpoints in ``scratch``, the temporary folder of ``hybrid run``."""
    with run_write_errors(scratch, "set TMPDIR to another folder"):
        files.write_bytes(scratch / _RESUME_FILE, str(folder).encode())


def script_checkpoints(scratch: Path) -> StoragePath | None:
    """Return the folder that :func:`record_script_checkpoints` recorded in ``scratch``, or None.

    A record in a run folder is ignored, because another user may have written it.
    """
    path = scratch / _RESUME_FILE
    is_run = (scratch / CONFIG_FILE).exists()  # another user may have written the files of a run
    return parse_path(files.read_text(path)) if path.is_file() and not is_run else None


@contextmanager
def hold_run(run: StoragePath, is_resumed: bool) -> Iterator[tuple[Path, int]]:
    """Lock the local folder of a run; if the run is in a store, upload the folder's files at the end.

    The files of a resumed run are first fetched from the store, since another machine may have written them.

    Yields:
        The local folder, and the descriptor of its lock, which roles inherit.

    Raises:
        ConfigError: another run holds the lock, or the folder cannot be created.
        HybridError: the folder ``logs`` or ``profile`` is a symbolic link, or a file cannot be written.
        StorageError: the store rejects a request.
    """
    if not isinstance(run, RemotePath):
        for name in ("logs", "profile"):
            refuse_link(run / name)
        with folder_lock(run) as lock:
            yield run, lock
        return
    folder = _local_folder(run)
    with folder_lock(folder) as lock:
        with run_write_errors(folder):
            files.write_bytes(folder / _STORE_FILE, str(run).encode())
        print_line(f"logs and metrics are kept in {folder}, and sent to {run} with each checkpoint")
        if is_resumed:
            for entry in files.list_entries(run):
                if not entry.is_folder:
                    with run_write_errors(folder):
                        files.copy(entry.path, folder / entry.path.name)
        try:
            yield folder, lock
        except BaseException:
            try:
                upload(folder)
            except StorageError as error:  # the first error is the one to report
                print_line(f"{error}; {folder} has all files", to_stderr=True)
            raise
        upload(folder)


def _local_folder(run: RemotePath) -> Path:
    digest = hashlib.sha256(str(run).encode()).hexdigest()[:_DIGEST_CHARACTERS]
    folder = private_user_folder("XDG_STATE_HOME", ".local/state", "runs")
    if folder is None:
        rule = "a run in a store needs a private folder on this machine"
        raise HybridError(f"{run}: {rule}; set XDG_STATE_HOME to a folder that only you can write to")
    return folder / f"{run.name}-{digest}"


def upload(folder: Path) -> None:
    """If the run is in a store, upload the files in ``folder`` that may have changed since the last call."""
    store = checkpoint_root(folder)
    if not isinstance(store, RemotePath):
        return
    uploaded = {entry.path: entry for root in (store, store / "logs") for entry in files.list_entries(root)}
    for local in files.list_entries(folder, is_deep=True):
        relative = Path(str(local.path)).relative_to(folder)
        if any(part.startswith(".") for part in relative.parts) or not local.is_file:
            continue
        target = store / str(relative)
        entry = uploaded.get(target)
        is_older = entry is not None and local.mtime_ns < entry.mtime_ns - _CLOCK_TOLERANCE_NS
        if entry is None or entry.size != local.size or not is_older:
            files.copy(local.path, target)


@dataclass(frozen=True, slots=True)
class RunState:
    """The progress of a run at one time, as the files of the run show it."""

    logged_step: int  # the last step in metrics.jsonl
    checkpoint_step: int | None  # the step of the newest checkpoint; None if there is none
    # log, result: size and time of the last write of metrics.jsonl and of result.json; None if missing.
    log: files.Entry | None
    result: files.Entry | None

    @classmethod
    def of(cls, folder: Path) -> Self:
        """Return the state of the run in a local folder, which may be empty or missing."""
        log = folder / METRICS_FILE
        logged = next((each["step"] for each in reversed(read_records(log)) if each["kind"] == "train"), 0)
        saved = checkpoint_folders.list_checkpoints(script_checkpoints(folder) or checkpoint_root(folder))
        step = checkpoint_folders.parse_step(saved[0]) if saved else None
        return cls(logged, step, files.find_entry(log), files.find_entry(folder / RESULT_FILE))

    @property
    def resumed_step(self) -> int:
        return self.checkpoint_step or 0

    def has_stepped_since(self, before: Self) -> bool:
        """Return whether the run has taken a step since ``before``, its state at the start."""
        has_logged = self.log != before.log and self.logged_step > before.resumed_step
        return has_logged or self.resumed_step > before.resumed_step


def describe_saved_state(folder: Path, command: str) -> str:
    """Describe what a stopped run has saved and lost, and how to resume it.

    Args:
        command: the stopped command: "launch", "master", "run", or SWEEP for "launch" with several seeds.
    """
    try:
        state = RunState.of(folder)
    except StorageError as error:  # must not hide why the run ends
        return str(error)
    lost = state.logged_step - state.resumed_step
    parts = [f"steps {state.resumed_step} to {state.logged_step - 1} are lost"] if lost > 0 else []
    resume = f"to resume: {command_name()} {command} --resume {shlex.quote(str(checkpoint_root(folder)))}"
    if command == "run":
        resume = "the same command resumes"
    elif command == SWEEP:
        resume = "the same command with --resume auto continues all runs"
    if state.checkpoint_step is None:
        return "; ".join(["nothing is saved", *parts, *([resume] if command == SWEEP else [])])
    return "; ".join([f"step {state.checkpoint_step} is saved", *parts, resume])


def read_restarts(folder: Path) -> list[dict[str, Any]]:
    """Return the records of restarts.jsonl; skip damaged lines."""
    return read_records(folder / RESTARTS_FILE)


def load_resumed_config(run: StoragePath, overrides: Sequence[str], trust_code: bool = False) -> RunConfig:
    """Return the configuration of a run to resume, with overrides (``section.key=value``).

    Raises:
        ConfigError: ``run`` contains no run, or is a checkpoint; an override changes the model or the data;
            or, unless ``trust_code``, a value needs this user's signature and has none.
    """
    if not files.is_file(run / CONFIG_FILE):
        raise ConfigError("--resume", "contains no run", str(run))
    if files.exists(run / checkpoint_folders.MANIFEST_FILE):
        raise ConfigError("--resume", "is a checkpoint or an export; name the folder of its run", str(run))
    used = {*SECTION_KEYS, *NAMED_KEYS} - {"run"}  # which has the folder, and a name for new folders
    config = load_run_config(run / CONFIG_FILE, overrides, trust_code, uses=used)
    check_same_model(run, config)
    return config


def check_same_model(run: StoragePath, config: RunConfig) -> None:
    """Raise ConfigError if ``config`` has another model or other data than ``run``."""
    before, now = fixed_values(load_config(run / CONFIG_FILE, is_stored=True)), fixed_values(config)
    for dotted in before | now:
        # A key of [tables.NAME] or [columns.NAME] without such a section has its default.
        kind, _, rest = dotted.partition(".")
        key = NAMED_KEYS.get(kind, {}).get(rest.rpartition(".")[2])
        default = None if key is None else key.default
        default = list(default) if isinstance(default, tuple) else default
        old, new = before.get(dotted, default), now.get(dotted, default)
        if old != new:
            raise ConfigError(dotted, f"the run to resume has {old!r}; keep that, or start a new run", new)


def newest_run(config: RunConfig) -> StoragePath | None:
    """Return the run in ``run.folder``; if the key is empty, the newest runs/NAME-TIME. None if missing."""
    if folder := config.run.folder:
        return parse_path(folder) if files.is_file(parse_path(folder) / CONFIG_FILE) else None
    # run_path makes these names.
    pattern = re.compile(rf"{re.escape(config.run.name)}-(\d{{8}}-\d{{6}})(?:\.(\d+))?")
    runs = [
        (match[1], int(match[2] or 1), path)
        for path in RUNS.glob("*")
        if (match := pattern.fullmatch(path.name)) and files.is_file(path / CONFIG_FILE)
    ]
    return max(runs)[2] if runs else None


def is_finished(run: StoragePath, config: RunConfig) -> bool:
    """Return whether a run has finished, and ``config`` has the same limits, such as ``train.epochs``."""
    if not files.exists(run / RESULT_FILE):
        return False
    before, now = load_config(run / CONFIG_FILE, is_stored=True).train, config.train
    return all(getattr(before, key) == getattr(now, key) for key in _LIMITS)
