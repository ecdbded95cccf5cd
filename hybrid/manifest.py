"""The folders of checkpoints: each there whole or not at all, which are there, which are kept. Free of torch.

::

    RUN/checkpoints/step-00000293/
        manifest.json                     what is in here, with sizes and checksums; written last
        config.toml                       the effective configuration
        features.json                     how raw values become numbers (see hybrid/data/encode.py)
        data.json                         which samples it was trained on (see hybrid/data/manifest.py)
        dense.safetensors                 the dense net, and its optimizer's state
        dense.1.safetensors               that of trainer 1, where trainers have nets of their own (dense.ddp)
        remote.safetensors                the remote dense net, where there is one
        tables/C1.0-of-2.safetensors      rows 0, 2, 4, ... of table C1, and their optimizer state
        progress.safetensors              what trainers have reported since the last line of metrics.jsonl

Every role writes its own part into ``step-N.partial``; the manifest and one rename make it a checkpoint.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import quote

from hybrid.errors import CheckpointError
from hybrid.manifest_rules import check_fields
from hybrid.private_files import make_folder, sync

FORMAT = 2
MANIFEST_FILE = "manifest.json"
_FOLDER = "checkpoints"  # of a run
_PARTIAL = ".partial"
_VERIFYING_THREADS = 4

# Of the values in a manifest's progress.
BEST = "best"
# One of a thousand tables on a hundred workers has 20 MB.
_MOST_BYTES = 32 << 20

# Files by their path relative to the checkpoint, with their size in bytes and their SHA-256.
Files: TypeAlias = dict[str, tuple[int, str]]


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
    """

    step: int
    epoch: int
    tables: dict[str, tuple[int, int, int]]
    files: Files = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    progress: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Manifest:
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
            check_fields(fields, {each.name for each in dataclasses.fields(cls)})
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

    def _check_shards(self, path: Path) -> None:
        for table, (_, _, count) in self.tables.items():
            # The files are fewer than any number that somebody may have written there.
            for index in range(min(count, len(self.files) + 1)):
                if (name := shard_file(table, index, count)) not in self.files:
                    raise CheckpointError(f"{path}: lists no {name}, which table {table!r} is said to have")

    def write(self, folder: Path) -> None:
        """Write it into ``folder``, with a checksum of its own; at once, if another is there."""
        fields = dataclasses.asdict(self)
        document = {"format": FORMAT, "manifest": fields, "sha256": _text_checksum(json.dumps(fields))}
        partial = MANIFEST_FILE + _PARTIAL
        write_text(folder, partial, json.dumps(document, indent=1))
        with writing(folder / MANIFEST_FILE):
            os.replace(folder / partial, folder / MANIFEST_FILE)
            sync(folder)

    def verify(self, folder: Path) -> None:
        """Compare every file of ``folder`` with its checksum.

        Raises:
            CheckpointError: one is missing or altered; names it.
        """
        with ThreadPoolExecutor(_VERIFYING_THREADS, "verify") as threads:
            found = threads.map(lambda name: _checksum(folder / name), self.files)
            for (name, (_, sha256)), checksum in zip(self.files.items(), found, strict=True):
                if checksum != sha256:
                    raise damaged(folder / name)


def damaged(path: Path) -> CheckpointError:
    """What to raise for a file that is not as it was."""
    return CheckpointError(f"{path}: missing or altered since the checkpoint was written")


def shard_file(table: str, index: int, count: int) -> str:
    """Relative path of the file with one shard of a table."""
    return f"tables/{quote(table, safe='')}.{index}-of-{count}.safetensors"


def step_folder(run: Path, step: int) -> Path:
    """Where a run keeps its checkpoint after ``step`` steps."""
    return run / _FOLDER / f"step-{step:08d}"


def stored(run: Path) -> list[Path]:
    """The checkpoints of a run, newest first; none that is partial."""
    folders = [path.parent for path in run.glob(f"{_FOLDER}/step-*/{MANIFEST_FILE}")]
    return sorted((f for f in folders if re.fullmatch(r"step-\d+", f.name)), key=step_of, reverse=True)


def step_of(folder: Path) -> int:
    """After how many steps a checkpoint of a run was written, by its name."""
    return int(folder.name.removeprefix("step-"))


def begin(folder: Path) -> Path:
    """Make the empty folder into which every role writes its part of checkpoint ``folder``."""
    if folder.exists():
        raise CheckpointError(f"{folder}: exists already; it is not overwritten")
    partial = folder.with_name(folder.name + _PARTIAL)
    with writing(partial):
        if partial.exists():  # left by a run that was killed while writing
            shutil.rmtree(partial)
        make_folder(partial)
    return partial


def write_text(folder: Path, name: str, text: str) -> Files:
    """Write a text file of ``folder`` and see it safely on the disk."""
    path, content = folder / name, text.encode()
    with writing(path), path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return {name: (len(content), hashlib.sha256(content).hexdigest())}


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError in here into a CheckpointError."""
    try:
        yield
    except OSError as error:
        raise cannot_write(path, error) from error


def cannot_write(path: Path, error: OSError, missing_bytes: int = 0) -> CheckpointError:
    """What to raise where a file cannot be written, with how much room it lacks where that is known."""
    room = error.errno in (errno.ENOSPC, errno.EDQUOT) and missing_bytes
    more = f" ({missing_bytes:,} bytes of it are missing)" if room else ""
    return CheckpointError(f"cannot write {path}: {error.strerror or error}{more}")


def commit(partial: Path, manifest: Manifest) -> Path:
    """Seal a folder to which every file that ``manifest`` lists has been written; its final path.

    Raises:
        CheckpointError: a file is not there, or the folder cannot be written.
    """
    for name, (size, _) in manifest.files.items():
        if not _has_size(partial / name, size):
            raise CheckpointError(
                f"{partial / name}: a role wrote this elsewhere; run.folder must be storage that all hosts "
                "share"
            )
    manifest.write(partial)
    final = partial.with_name(partial.name.removesuffix(_PARTIAL))
    with writing(final):
        for path in {(partial / name).parent for name in manifest.files} - {partial}:
            sync(path)
        os.rename(partial, final)
        sync(final.parent)
    return final


def discard(partial: Path) -> None:
    """Remove what was written of a checkpoint that will not be one."""
    shutil.rmtree(partial, ignore_errors=True)


def remove(folder: Path) -> None:
    """Remove a checkpoint; killed meanwhile, it is partial and no checkpoint any more."""
    partial = folder.with_name(folder.name + _PARTIAL)
    with writing(folder):
        os.rename(folder, partial)
    discard(partial)


def remove_partial(run: Path) -> None:
    """Remove what a run that was killed has left of unfinished checkpoints."""
    for partial in run.glob(f"{_FOLDER}/*{_PARTIAL}"):
        discard(partial)


def drop_later(run: Path, step: int) -> None:
    """Remove what a run that goes on after ``step`` has left of later steps, and what is unfinished."""
    for folder in stored(run):
        if step_of(folder) > step:
            remove(folder)
    remove_partial(run)


def prune(run: Path, keep_last: int, best_step: int | None) -> None:
    """Remove all checkpoints of a run but the newest and the best one."""
    kept = {*stored(run)[:keep_last], *([] if best_step is None else [step_folder(run, best_step)])}
    for folder in stored(run):
        if folder not in kept:
            remove(folder)


def check_sizes(folder: Path, files: Mapping[str, tuple[int, str]]) -> None:
    """CheckpointError, naming it, where a file is missing or has another size than it had."""
    for name, (size, _) in files.items():
        if not _has_size(folder / name, size):
            raise damaged(folder / name)


def _has_size(path: Path, size: int) -> bool:
    try:
        return path.is_file() and path.stat().st_size == size
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def _read_text(path: Path) -> str:
    """The text of a manifest; ValueError where it is larger than one can be."""
    if not path.is_file():
        raise ValueError("it is no file")
    with path.open("rb") as file:
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
