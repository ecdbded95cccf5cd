"""What a checkpoint holds, as the file that is written into it last says. Free of torch."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hybrid.checkpoint.checkpoint_files import (
    MANIFEST_FILE,
    Files,
    damage_error,
    shard_file,
    write_errors,
    write_text,
)
from hybrid.errors import CheckpointError, StorageError
from hybrid.storage import files as storage
from hybrid.storage.private_files import sync
from hybrid.storage.remote_path import RemotePath, StoragePath

FORMAT = 2
PARTIAL = ".partial"  # ends the name of what is being written
PARTS = "parts-"  # begins the name of the folder, in that of a checkpoint in a store, with its other files
_VERIFYING_THREADS = 4

# Of the values in a manifest's progress.
BEST = "best"
OWES_EVALUATION = "owes_evaluation"  # whether one of the step is due, and not done yet
# One of a thousand tables on a hundred workers has 20 MB.
_MOST_BYTES = 32 << 20
_LARGEST_COUNT = 2**63 - 1
# Of the folder itself, or of a folder in it; as checkpoints name them, with all else in tables' names quoted.
_PART = r"(?!\.+(?:/|\Z))[\w.~%-]+"
_FILE_NAME = re.compile(rf"(?:{_PART}/)?{_PART}", re.ASCII)
_PARTS_NAME = re.compile(rf"{PARTS}[0-9a-f]{{1,64}}")
_LONGEST_NAME = 512
_CHECKSUM = re.compile(r"[0-9a-f]{64}")


class Best(NamedTuple):
    """The best checkpoint of a run: its step, and its value of a metric."""

    metric: str
    value: float
    step: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        step: optimizer steps taken.
        epoch: epochs finished.
        tables: table name to [number of rows, dim, number of shards].
        files: every other file of the folder.
        metrics: the last evaluation's; empty where there was none.
        progress: what the run has counted so far; empty outside a run.
        parts: name of the folder in the checkpoint's that has the files; empty where they lie in it.
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
        """Read the manifest of a checkpoint; CheckpointError where it is none, or altered."""
        try:
            document = json.loads(_read_text(path))
            if not isinstance(document, dict):
                raise ValueError("it is no object")
            if (version := document.get("format")) != FORMAT:
                raise CheckpointError(f"{path}: written by another version (format {version!r:.80})")
            if not document.keys() >= {"manifest", "sha256"}:
                raise ValueError("it has no fields, or no checksum of them")
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
        read = cls(**fields)
        read._check_shards(path)
        return read

    @property
    def best(self) -> Best | None:
        """The best checkpoint of the run so far, where it keeps one."""
        values = self.progress.get(BEST)
        return None if values is None else Best(*values)

    def _check_shards(self, path: StoragePath) -> None:
        for table, (_, _, count) in self.tables.items():
            # The files are fewer than any number that somebody may have written there.
            for index in range(min(count, len(self.files) + 1)):
                if (name := shard_file(table, index, count)) not in self.files:
                    raise CheckpointError(f"{path}: lists no {name}, which table {table!r} is said to have")

    def write(self, folder: StoragePath) -> None:
        """Write it into ``folder``, with a checksum of its own; at once, if another is there."""
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
        """Compare every file of ``folder`` with its checksum; in a store, that is done as each is fetched.

        Raises:
            CheckpointError: one is missing or altered; names it.
        """
        if isinstance(folder, RemotePath):
            return
        with ThreadPoolExecutor(_VERIFYING_THREADS, "verify") as threads:
            found = threads.map(lambda name: _checksum(folder / name), self.files)
            for (name, (_, sha256)), checksum in zip(self.files.items(), found, strict=True):
                if checksum != sha256:
                    raise damage_error(folder / name)


def _read_text(path: StoragePath) -> str:
    """The text of a manifest; ValueError where it is larger than one can be."""
    if not storage.is_file(path):
        raise ValueError("it is no file")
    with storage.open_reader(path) as file:
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES >> 20} MiB")
    return content.decode()


def _checksum(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def _text_checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _check_fields(fields: object) -> None:
    """See that fields, as JSON gives them, are those of a manifest, and that its files lie in its folder.

    It comes from whoever handed out the checkpoint.

    Raises:
        ValueError: they are not; says which.
    """
    known = {each.name for each in dataclasses.fields(Manifest)}
    if not isinstance(fields, dict) or fields.keys() not in (known, known - {"parts"}):
        raise ValueError("its fields are not those of one")
    for name in ("step", "epoch"):
        _expect(_is_count(fields[name]), f"{name} must be a number of them")
    for name in ("tables", "files", "metrics", "progress"):
        _expect(isinstance(fields[name], dict), f"{name} must be an object")
    for table, shape in fields["tables"].items():
        is_shape = _is_list(shape, 3) and all(map(_is_count, shape)) and shape[2] > 0
        _expect(is_shape, f"table {table!r:.80} must have a number of rows, a width, and a number of files")
    for file, entry in fields["files"].items():
        is_name = len(file) <= _LONGEST_NAME and _FILE_NAME.fullmatch(file)
        _expect(is_name, f"{file!r:.80} cannot be the name of a file in a checkpoint")
        is_entry = _is_list(entry, 2) and _is_count(entry[0]) and _is_checksum(entry[1])
        _expect(is_entry, f"file {file} must have a size and a checksum")
    for metric, value in fields["metrics"].items():
        _expect(_is_number(value), f"metric {metric!r:.80} must be a number")
    parts = fields.get("parts", "")
    is_parts = isinstance(parts, str) and (not parts or _PARTS_NAME.fullmatch(parts))
    _expect(is_parts, f"{parts!r:.80} cannot be the name of a folder in a checkpoint")
    best = fields["progress"].get(BEST)
    _expect(best is None or _is_best(best), "best must be a metric, its value, and a step")


def _expect(is_right: object, rule: str) -> None:
    if not is_right:
        raise ValueError(rule)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= _LARGEST_COUNT


def _is_number(value: object) -> bool:
    return type(value) is int or type(value) is float


def _is_list(value: object, size: int) -> bool:
    return isinstance(value, list) and len(value) == size


def _is_checksum(value: object) -> bool:
    return isinstance(value, str) and _CHECKSUM.fullmatch(value) is not None


def _is_best(value: Any) -> bool:
    return _is_list(value, 3) and type(value[0]) is str and _is_number(value[1]) and _is_count(value[2])
