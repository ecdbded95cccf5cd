"""The files of a checkpoint, and its manifest, which lists them and is written last. Free of torch."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import quote

from hybrid.errors import CheckpointError, StorageError
from hybrid.storage import files as storage
from hybrid.storage.private_files import sync
from hybrid.storage.remote_path import RemotePath, StoragePath

FORMAT = 2
PARTIAL = ".partial"  # suffix of unfinished files and folders
_THREADS = 4
PARTS = "parts-"  # prefix of the folder with the files of a checkpoint in a store

# Keys of a manifest's progress.
BEST = "best"
OWES_EVALUATION = "owes_evaluation"  # whether the evaluation after this step is still to be done
_MAX_BYTES = 32 << 20  # the manifest of a thousand tables on a hundred workers has 20 MB
_MAX_COUNT = 2**63 - 1
# A file in the checkpoint's folder, or in a folder of it; names of tables are quoted.
_COMPONENT = r"(?!\.+(?:/|\Z))[\w.~%-]+"
_FILE_NAME = re.compile(rf"(?:{_COMPONENT}/)?{_COMPONENT}", re.ASCII)
_PARTS_NAME = re.compile(rf"{PARTS}[0-9a-f]{{1,64}}")
_MAX_NAME_LENGTH = 512
_CHECKSUM = re.compile(r"[0-9a-f]{64}")
MANIFEST_FILE = "manifest.json"
DENSE_FILE = "dense.safetensors"
REMOTE_FILE = "remote.safetensors"
PROGRESS_FILE = "progress.safetensors"
_PRE_UPDATE = "earlier."
_MAX_NAME_BYTES = 255  # of file systems
_PREFIX_BYTES = 100

# The path of each file relative to the checkpoint, with its size in bytes and its SHA-256.
Files: TypeAlias = dict[str, tuple[int, str]]


class Best(NamedTuple):
    """The best checkpoint of a run: its step, and its value of a metric."""

    metric: str
    value: float
    step: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of a checkpoint.

    Attributes:
        step: optimizer steps taken.
        epoch: epochs finished.
        tables: table name to [number of rows, dim, number of shards].
        files: every other file of the folder.
        metrics: of the last evaluation; empty if there was none.
        progress: counters of the run; empty outside a run.
        parts: name of the folder with the files; empty if they are beside the manifest.
    """

    step: int
    epoch: int
    tables: dict[str, tuple[int, int, int]]
    files: Files = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    progress: dict[str, Any] = field(default_factory=dict)
    parts: str = ""

    @classmethod
    def read(cls, path: StoragePath) -> Manifest:
        """Read a manifest; CheckpointError if it is invalid or altered."""
        try:
            _expect(storage.is_file(path), "it is not a file")
            with storage.open_reader(path) as file:
                content = file.read(_MAX_BYTES + 1)
            _expect(len(content) <= _MAX_BYTES, f"it has more than {_MAX_BYTES >> 20} MiB")
            document = json.loads(content.decode())
            _expect(isinstance(document, dict), "it is not an object")
            if (version := document.get("format")) != FORMAT:
                rule = f"has format {version!r:.80}, not {FORMAT}; use the version of hybrid that wrote it"
                raise CheckpointError(f"{path}: {rule}")
            _expect(document.keys() >= {"manifest", "sha256"}, "it has no fields, or no checksum of them")
            fields = document["manifest"]
            if document["sha256"] != _text_checksum(json.dumps(fields)):
                raise CheckpointError(f"{path}: altered since the checkpoint was written")
            _check_fields(fields)
        except StorageError:
            raise
        except RecursionError as error:
            raise CheckpointError(f"{path}: is not a manifest: nested too deeply") from error
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: is not a manifest: {error}") from error
        fields["files"] = {name: (size, sha256) for name, (size, sha256) in fields["files"].items()}
        fields["tables"] = {name: tuple(shape) for name, shape in fields["tables"].items()}
        manifest = cls(**fields)
        for table, (_, _, count) in manifest.tables.items():
            # The bound guards against a huge count in the file.
            for index in range(min(count, len(manifest.files) + 1)):
                if (name := shard_file(table, index, count)) not in manifest.files:
                    raise CheckpointError(f"{path}: lists no {name}, a shard of table {table!r}")
        return manifest

    @property
    def best(self) -> Best | None:
        """The best checkpoint of the run so far, if the run keeps one."""
        values = self.progress.get(BEST)
        return None if values is None else Best(*values)

    def write(self, folder: StoragePath) -> None:
        """Write it into ``folder`` with its own checksum, replacing another one atomically."""
        fields = dataclasses.asdict(self)
        if not self.parts:
            del fields["parts"]
        document = {"format": FORMAT, "manifest": fields, "sha256": _text_checksum(json.dumps(fields))}
        if isinstance(folder, RemotePath):
            write_text(folder, MANIFEST_FILE, json.dumps(document, indent=1))
            return
        partial = MANIFEST_FILE + PARTIAL
        write_text(folder, partial, json.dumps(document, indent=1))
        with write_errors(folder / MANIFEST_FILE):
            os.replace(folder / partial, folder / MANIFEST_FILE)
            sync(folder)

    def verify(self, folder: StoragePath) -> None:
        """Compare every file with its checksum; files in a store are verified when they are fetched.

        Raises:
            CheckpointError: a file is missing or altered.
        """
        if isinstance(folder, RemotePath):
            return

        def check(name: str) -> None:
            path = folder / name
            try:
                with path.open("rb") as file:
                    checksum = hashlib.file_digest(file, "sha256").hexdigest()
            except OSError as error:
                raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
            if checksum != self.files[name][1]:
                raise damage_error(path)

        with ThreadPoolExecutor(_THREADS, "verify") as threads:
            list(threads.map(check, self.files))


def _text_checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _check_fields(fields: object) -> None:
    """Check the fields of a manifest, which may come from another user, and that its files are in its folder.

    Raises:
        ValueError: a field is invalid; names it.
    """
    known = {each.name for each in dataclasses.fields(Manifest)}
    if not isinstance(fields, dict) or fields.keys() not in (known, known - {"parts"}):
        raise ValueError("it has other fields than a manifest")
    for name in ("step", "epoch"):
        _expect(_is_count(fields[name]), f"{name} must be a count")
    for name in ("tables", "files", "metrics", "progress"):
        _expect(isinstance(fields[name], dict), f"{name} must be an object")
    for table, shape in fields["tables"].items():
        is_shape = _is_list(shape, 3) and all(map(_is_count, shape)) and shape[2] > 0
        _expect(is_shape, f"table {table!r:.80} must have a number of rows, a width, and a number of files")
    for file, entry in fields["files"].items():
        is_name = len(file) <= _MAX_NAME_LENGTH and _FILE_NAME.fullmatch(file)
        _expect(is_name, f"{file!r:.80} must be the name of a file in the checkpoint")
        is_valid = _is_list(entry, 2) and _is_count(entry[0]) and isinstance(entry[1], str)
        _expect(is_valid and _CHECKSUM.fullmatch(entry[1]), f"file {file} must have a size and a checksum")
    for metric, value in fields["metrics"].items():
        _expect(type(value) in (int, float), f"metric {metric!r:.80} must be a number")
    parts = fields.get("parts", "")
    is_folder = isinstance(parts, str) and (not parts or _PARTS_NAME.fullmatch(parts))
    _expect(is_folder, f"{parts!r:.80} must be the name of a folder in the checkpoint")
    best = fields["progress"].get(BEST)
    is_best = _is_list(best, 3) and [type(best[0]), type(best[1]) in (int, float)] == [str, True]
    _expect(best is None or (is_best and _is_count(best[2])), "best must be a metric, its value, and a step")


def _expect(condition: object, rule: str) -> None:
    if not condition:
        raise ValueError(rule)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MAX_COUNT


def _is_list(value: object, size: int) -> bool:
    return isinstance(value, list) and len(value) == size


def shard_file(table: str, index: int, count: int) -> str:
    """Return the relative path of the file with one shard of a table.

    If the table's name is too long for a file name, a prefix and a hash of it replace it.
    """
    name, end = quote(table, safe=""), f".{index}-of-{count}.safetensors"
    if len(name) + len(end) > _MAX_NAME_BYTES:
        digest = hashlib.sha256(table.encode()).hexdigest()
        name = f"{name[:_PREFIX_BYTES]}%-{digest}"  # no quoted name contains "%-"
    return f"tables/{name}{end}"


def pre_update_file(worker: int) -> str:
    """Return the name of the file with a worker's rows before the last update."""
    return f"{_PRE_UPDATE}{worker}.safetensors"


def is_pre_update_file(name: str) -> bool:
    """Return whether a name is one of :func:`pre_update_file`."""
    return name.startswith(_PRE_UPDATE)


def dense_file(trainer: int) -> str:
    """Return the name of the file with a trainer's dense net; only the first has one if all are equal."""
    return f"dense.{trainer}.safetensors" if trainer else DENSE_FILE


def write_text(folder: StoragePath, name: str, text: str) -> Files:
    """Write a text file of a checkpoint, and flush it to the disk."""
    path, content = folder / name, text.encode()
    with write_errors(path):
        storage.write_bytes(path, content)
    return {name: (len(content), hashlib.sha256(content).hexdigest())}


def write_copy(folder: StoragePath, name: str, source: Path) -> Files:
    """Copy a file of this machine into a checkpoint, and flush it to the disk."""
    path = folder / name
    with write_errors(path):
        storage.copy(source, path)
        return {name: (source.stat().st_size, storage.compute_checksum(source))}


@contextmanager
def write_errors(path: StoragePath) -> Iterator[None]:
    """Convert an OSError in the context to a CheckpointError."""
    try:
        yield
    except OSError as error:
        raise write_error(path, error) from error


def write_error(path: StoragePath, error: OSError, missing_bytes: int = 0) -> CheckpointError:
    """Return the error for a file that cannot be written, with the missing bytes if the disk is full."""
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT) and missing_bytes
    more = f" ({missing_bytes:,} bytes of it are missing)" if is_full else ""
    return CheckpointError(f"cannot write {path}: {error.strerror or error}{more}")


def damage_error(path: StoragePath) -> CheckpointError:
    """Return the error for a file whose size or checksum differs from the manifest."""
    return CheckpointError(f"{path}: missing or altered since the checkpoint was written")


def find_mismatch(folder: StoragePath, files: Files) -> StoragePath | None:
    """Return the first file that is missing or has another size than in the manifest, or None."""
    sizes = {each.path: each.size for each in storage.list_entries(folder, is_deep=True)}
    paths = ((folder / name, size) for name, (size, _) in files.items())
    return next((path for path, size in paths if sizes.get(path) != size), None)
