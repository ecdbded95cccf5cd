"""Folders of checkpoints: their names, their manifest, and functions to create, list and remove them.

Each role writes its files into the folder ``step-N.partial``. The master adds the manifest, which lists the
files, and renames the folder to ``step-N``. An object store cannot rename folders. In a store, the roles
write into ``step-N/parts-X``, where X is random. Then the master writes the manifest, which names the folder
``parts-X``, into ``step-N``. docs/checkpoints.md describes every file. The module does not import torch.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import math
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast
from urllib.parse import quote

from hybrid.config.task_sections import is_lower_better
from hybrid.errors import CheckpointError, OutageError, StorageError
from hybrid.storage import files as storage
from hybrid.storage.file_formats import is_inner_name, parse_fields, parse_json, parse_value
from hybrid.storage.private_files import make_folder, refuse_link, sync
from hybrid.storage.remote_path import RemotePath, StoragePath, StoragePathT

FORMAT = 2
_FOLDER = "checkpoints"  # within the run folder
_VOCABULARIES = "vocabularies"
DELTAS_FOLDER = "deltas"
CURRENT_FILE = "current.json"  # lists the deltas of a run, or names the newest folder of a followed export
_RANDOM_BYTES = 8
_PARTIAL = ".partial"  # suffix of unfinished files and folders
_THREADS = 4
_PARTS = "parts-"  # prefix of the folder with the files of a checkpoint in a store

# Keys of a manifest's progress.
BEST = "best"
OWES_EVALUATION = "owes_evaluation"  # whether the evaluation after this step is still to be done
CUSTOM_LOOP = "custom_loop"  # whether a custom training loop wrote the checkpoint
EXPORTED = "exported"  # whether it is an export: without optimizer state; its shards are ranges of rows
_MAX_BYTES = 32 << 20  # the manifest of a thousand tables on a hundred workers has 20 MB
_MAX_COUNT = 2**63 - 1
_STEP_NAME = re.compile(r"step-[0-9]{1,18}")
_PARTS_NAME = re.compile(rf"{_PARTS}[0-9a-f]{{1,64}}")
_CHECKSUM = re.compile(r"[0-9a-f]{64}")
MANIFEST_FILE = "manifest.json"
VOCABULARIES_FILE = "vocabularies.parquet"
DENSE_FILE = "dense.safetensors"
REMOTE_FILE = "remote.safetensors"
PROGRESS_FILE = "progress.safetensors"
_MAX_NAME_BYTES = 255  # the limit of file systems
_PREFIX_BYTES = 100  # kept prefix of a longer name
_CLOCK_SECONDS = 2.0  # resolution of the times of files
# Device, inode, size, time and checksum of local files that this process has verified. The exports of a
# followed run share most shards, so a server that loads each export does not read all of them again.
_VERIFIED: set[tuple[int, int, int, int, str]] = set()

# The path of each file relative to the checkpoint, with its size in bytes and its SHA-256.
Files: TypeAlias = dict[str, tuple[int, str]]


class Best(NamedTuple):
    """The best checkpoint of a run: its step, and the value of the metric that selects it."""

    metric: str
    value: float
    step: int


def choose_best(best: Best | None, metric: str, metrics: Mapping[str, float], step: int) -> Best | None:
    """Return the better of ``best`` and the checkpoint after ``step``, by the metric named ``metric``.

    ``metrics`` are the results of the checkpoint after ``step``. Return ``best`` if they lack the metric, or
    if both values are equal. Return the checkpoint after ``step`` if ``best`` has no value of the metric.
    """
    if (value := metrics.get(metric)) is None:  # "none" is no metric
        return best
    if best is not None and best.metric == metric and not math.isnan(best.value):
        is_better = value < best.value if is_lower_better(metric) else value > best.value
        if not is_better:
            return best
    return Best(metric, value, step)


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of a manifest file, which lists the tables and files of a checkpoint, export or delta.

    ``tables`` maps the name of a table to its number of rows, its dim and its number of shards.
    """

    step: int  # optimizer steps taken
    epoch: int  # epochs finished
    tables: dict[str, tuple[int, int, int]]
    files: Files = field(default_factory=dict)  # every other file of the folder
    # Results of the last evaluation; empty if there was none.
    metrics: dict[str, float] = field(default_factory=dict)
    progress: dict[str, Any] = field(default_factory=dict)  # counters of the run; empty outside a run
    parts: str = ""  # name of the folder with the files; empty if they are beside the manifest

    @classmethod
    def read(cls, path: StoragePath) -> Manifest:
        """Read a manifest file.

        Raise CheckpointError if the file is missing or invalid, OutageError if the store is down.
        """
        try:
            document = parse_json(storage.read_bytes(path, _MAX_BYTES))
            _expect(isinstance(document, dict), "it is not an object")
            if (version := document.get("format")) != FORMAT:
                rule = f"has format {version!r:.80}, not {FORMAT}; use the version of hybrid that wrote it"
                raise CheckpointError(f"{path}: {rule}")
            _expect(document.keys() >= {"manifest", "sha256"}, "it lacks its fields or their checksum")
            fields = document["manifest"]
            if document["sha256"] != _text_checksum(json.dumps(fields)):
                raise CheckpointError(f"{path}: altered since the checkpoint was written")
            manifest = _parse_fields(fields)
        except OutageError:
            raise
        except StorageError as error:  # its message names the path
            raise CheckpointError(str(error)) from error
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(f"{path}: is not a manifest: {error}") from error
        folder = path.parent
        is_of_run = folder.parent.name == _FOLDER and _STEP_NAME.fullmatch(folder.name)
        if is_of_run and parse_step(folder) != manifest.step:
            raise CheckpointError(f"{path}: is of step {manifest.step}, unlike the name of its folder")
        for table, (_, _, count) in manifest.tables.items():
            # The bound guards against a huge count in the file.
            for index in range(min(count, len(manifest.files) + 1)):
                if (name := shard_file(table, index, count)) not in manifest.files:
                    raise CheckpointError(f"{path}: lists no {name}, a shard of table {table!r}")
        return manifest

    @property
    def best(self) -> Best | None:
        """The best checkpoint of the run so far; None if no metric has selected one."""
        values = self.progress.get(BEST)
        return None if values is None else Best(*values)

    def write(self, folder: StoragePath) -> None:
        """Write the manifest and its checksum into ``folder``; replace an existing manifest atomically.

        Raise CheckpointError if the manifest cannot be written, or is larger than :meth:`read` accepts.
        """
        fields = dataclasses.asdict(self)
        if not self.parts:
            del fields["parts"]
        document = {"format": FORMAT, "manifest": fields, "sha256": _text_checksum(json.dumps(fields))}
        content = json.dumps(document, indent=1).encode()
        if len(content) > _MAX_BYTES:
            rule = f"it would have more than {_MAX_BYTES >> 20} MiB; use fewer tables or workers"
            raise CheckpointError(f"cannot write {folder / MANIFEST_FILE}: {rule}")
        with write_errors(folder / MANIFEST_FILE):
            storage.write_bytes(folder / MANIFEST_FILE, content)
            sync(folder)

    def verify(self, folder: StoragePath) -> None:
        """Compare every file in ``folder`` with its checksum; in an object store, only the text files.

        Other files in a store are compared with their checksums when they are fetched. A local file is
        skipped if this process has verified it before, and its size and modification time are the same.

        Raises:
            CheckpointError: a file is missing or altered.
            StorageError: a store is down or refuses a request, or a file is a symbolic link.
        """

        def check(name: str) -> None:
            path, version, sha256 = folder / name, None, self.files[name][1]
            try:
                if isinstance(path, Path):
                    found = path.lstat()
                    version = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, sha256
                    if version in _VERIFIED:
                        return
                checksum = storage.compute_checksum(path, folder)
            except StorageError:
                raise
            except OSError as error:
                raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
            if checksum != sha256:
                raise damage_error(path)
            # The time of a file does not reveal a change that closely follows another change.
            if version is not None and found.st_mtime < time.time() - _CLOCK_SECONDS:
                _VERIFIED.add(version)

        names = [n for n in self.files if isinstance(folder, Path) or n.endswith((".json", ".toml"))]
        with ThreadPoolExecutor(_THREADS, "verify") as threads:
            list(threads.map(check, names))
        if len(_VERIFIED) > 1 << 16:  # of a server that loads exports for weeks
            _VERIFIED.clear()


def _text_checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _parse_fields(fields: Any) -> Manifest:
    """Create a manifest from untrusted JSON; raise TypeError or ValueError if a field is invalid."""
    known = {each.name for each in dataclasses.fields(Manifest)}
    is_manifest = isinstance(fields, dict) and fields.keys() | {"parts"} == known
    _expect(is_manifest, "its fields are not those of a manifest")
    manifest = parse_fields(Manifest, fields)
    counts: dict[str, tuple[int, ...]] = {"step": (manifest.step,), "epoch": (manifest.epoch,)}
    for table, (num_rows, dim, num_shards) in manifest.tables.items():
        counts[f"table {table!r:.80}"] = (num_rows, dim, num_shards - 1)
    for file, (size, sha256) in manifest.files.items():
        _expect(is_inner_name(file), f"{file!r:.80} must be the name of a file in the checkpoint")
        _expect(_CHECKSUM.fullmatch(sha256), f"file {file} must have a checksum")
        counts[f"file {file}"] = (size,)
    if (best := manifest.progress.get(BEST)) is not None:
        _, _, step = parse_value(BEST, tuple[str, float, int], best)
        counts[BEST] = (step, manifest.step - step)
    for name, numbers in counts.items():
        _expect(min(numbers) >= 0 and max(numbers) <= _MAX_COUNT, f"{name} has a number out of range")
    is_folder = not manifest.parts or _PARTS_NAME.fullmatch(manifest.parts)
    _expect(is_folder, f"{manifest.parts!r:.80} must be the name of a folder in the checkpoint")
    return manifest


def _expect(condition: object, rule: str) -> None:
    if not condition:
        raise ValueError(rule)


def shard_file(table: str, index: int, count: int) -> str:
    """Return the path, within a checkpoint, of the file with shard ``index`` of a table's ``count`` shards.

    If the name of the table is too long for a file name, the file name has its first bytes and its hash.
    """
    name, end = quote(table, safe=""), f".{index}-of-{count}.safetensors"
    if len(name) + len(end) > _MAX_NAME_BYTES:
        digest = hashlib.sha256(table.encode()).hexdigest()
        name = f"{name[:_PREFIX_BYTES]}%-{digest}"  # quote() never writes "%-"
    return f"tables/{name}{end}"


def dense_file(trainer: int) -> str:
    """Return the name of the file for the dense net of trainer number ``trainer``."""
    return f"dense.{trainer}.safetensors" if trainer else DENSE_FILE


def write_text(folder: StoragePath, name: str, text: str) -> Files:
    """Write and flush a text file; return its size and checksum. Raise CheckpointError if this fails."""
    content = text.encode()
    with write_errors(folder / name):
        storage.write_bytes(folder / name, content)
    return {name: (len(content), hashlib.sha256(content).hexdigest())}


@contextmanager
def write_errors(path: StoragePath) -> Iterator[None]:
    """Convert an OSError in the context to a CheckpointError that names ``path``."""
    try:
        yield
    except OSError as error:
        raise to_checkpoint_error(path, error) from error


def to_checkpoint_error(path: StoragePath, error: OSError, missing_bytes: int = 0) -> CheckpointError:
    """Return the error for a failed write. On a full disk, the message has the number of unwritten bytes."""
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT) and missing_bytes
    more = f" ({missing_bytes:,} bytes could not be written)" if is_full else ""
    return CheckpointError(f"cannot write {path}: {error.strerror or error}{more}")


def damage_error(path: StoragePath) -> CheckpointError:
    """Return the error for a file that is missing, or has another size or checksum than in the manifest."""
    return CheckpointError(f"{path}: missing or altered since the checkpoint was written")


def find_mismatch(folder: StoragePath, files: Files) -> StoragePath | None:
    """Return the path of the first of ``files`` that is missing or differs in size; None if all fit."""
    sizes = {each.path: each.size for each in storage.list_entries(folder, is_deep=True)}
    paths = ((folder / name, size) for name, (size, _) in files.items())
    return next((path for path, size in paths if sizes.get(path) != size), None)


def step_folder(run: StoragePathT, step: int) -> StoragePathT:
    """Return the folder of the checkpoint that a run writes after ``step`` steps."""
    return cast(StoragePathT, run / _FOLDER / f"step-{step:08d}")


def list_checkpoints(run: StoragePathT) -> list[StoragePathT]:
    """Return the folders of a run's complete checkpoints, newest first.

    Raise StorageError if the folder of checkpoints, or a folder in it named like a checkpoint, is a link.
    """
    folder = run / _FOLDER
    refuse_link(folder)
    entries = [each for each in storage.list_entries(folder) if _STEP_NAME.fullmatch(each.path.name)]
    for each in entries:
        refuse_link(each.path)
    complete = [each.path for each in entries if each.is_folder and storage.exists(each.path / MANIFEST_FILE)]
    return cast(list[StoragePathT], sorted(complete, key=parse_step, reverse=True))


def parse_step(folder: StoragePath) -> int:
    """Parse the step of a checkpoint from the name of its folder."""
    return int(folder.name.removeprefix("step-"))


def vocabulary_path(files_folder: StoragePathT, name: str) -> StoragePathT:
    """Return the path of the vocabulary file ``name`` of a run, given the folder of a checkpoint's files."""
    folder = files_folder.parent if files_folder.name.startswith(_PARTS) else files_folder
    return cast(StoragePathT, folder.parent.parent / _VOCABULARIES / name)


def write_vocabulary(folder: StoragePath, name: str, source: StoragePath) -> Files:
    """Copy the vocabulary file ``source`` for a new checkpoint; return its entry for the manifest.

    An export gets a copy in ``folder``. The checkpoints of a run share a copy, named ``name``, outside their
    folders. Manifests do not list this copy: the result is {}. Raise CheckpointError if this fails.
    """
    checkpoint = folder.parent if isinstance(folder, RemotePath) else folder
    if checkpoint.parent.name != _FOLDER:
        with write_errors(folder / VOCABULARIES_FILE):
            storage.copy(source, folder / VOCABULARIES_FILE)
            return {VOCABULARIES_FILE: (storage.require_file(source).size, storage.compute_checksum(source))}
    target = vocabulary_path(folder, name)
    with write_errors(target):
        if not storage.exists(target):
            refuse_link(target.parent)
            make_folder(target.parent)
            storage.copy(source, target)
            sync(target.parent)
    return {}


def begin(folder: StoragePathT) -> StoragePathT:
    """Return the folder into which roles write the files of a new checkpoint.

    A local folder is created, and replaces the folder of an unfinished checkpoint. Raise CheckpointError if
    the checkpoint exists already, or the folder cannot be created.
    """
    if storage.exists(folder / MANIFEST_FILE if isinstance(folder, RemotePath) else folder):
        raise CheckpointError(f"{folder}: this checkpoint exists already, and is not overwritten")
    if isinstance(folder, RemotePath):
        return cast(StoragePathT, folder / (_PARTS + secrets.token_hex(_RANDOM_BYTES)))
    partial = folder.with_name(folder.name + _PARTIAL)
    with write_errors(partial):
        storage.remove(partial)  # left by a killed run
        make_folder(partial)
    return partial


def commit(partial: StoragePathT, manifest: Manifest) -> StoragePathT:
    """Complete a checkpoint whose roles have written all files into ``partial``; return its final path.

    Raise CheckpointError if a file is missing, the folder cannot be written, or the checkpoint exists.
    """
    if (path := find_mismatch(partial, manifest.files)) is not None:
        rule = "set run.folder to storage that all hosts share"
        raise CheckpointError(f"{path}: a role has written this file to another folder; {rule}")
    if isinstance(partial, RemotePath):
        final: StoragePath = partial.parent
        if storage.exists(final / MANIFEST_FILE):
            rule = "another run in the same folder has written this checkpoint; stop one of them"
            raise CheckpointError(f"{final}: {rule}")
        dataclasses.replace(manifest, parts=partial.name).write(final)
        return cast(StoragePathT, final)
    manifest.write(partial)
    final = partial.with_name(partial.name.removesuffix(_PARTIAL))
    with write_errors(final):
        for folder in {(partial / name).parent for name in manifest.files} - {partial}:
            sync(folder)
        os.rename(partial, final)
        sync(final.parent)
    return final


def discard(partial: StoragePath) -> None:
    """Remove an unfinished checkpoint; errors are ignored."""
    with suppress(OSError):
        storage.remove(partial)


def remove(folder: StoragePath) -> None:
    """Mark a checkpoint as unfinished, then remove its files.

    Local files that cannot be removed are left. Raise CheckpointError if the mark or an object store fails.
    """
    with write_errors(folder):
        if isinstance(folder, RemotePath):
            storage.remove(folder / MANIFEST_FILE)
            storage.remove(folder)
            return
        partial = folder.with_name(folder.name + _PARTIAL)
        os.rename(folder, partial)
    discard(partial)


def remove_after(run: StoragePath, step: int) -> None:
    """Remove unfinished checkpoints, checkpoints after ``step``, and all deltas.

    Raise CheckpointError or StorageError if a complete checkpoint or the deltas cannot be removed.
    """
    refuse_link(run / DELTAS_FOLDER)
    with write_errors(run / DELTAS_FOLDER):
        storage.remove(run / DELTAS_FOLDER / CURRENT_FILE)  # first, since followers read it first
        storage.remove(run / DELTAS_FOLDER)
    for folder in list_checkpoints(run):
        if parse_step(folder) > step:
            remove(folder)
    if not isinstance(run, RemotePath):
        for partial in run.glob(f"{_FOLDER}/*{_PARTIAL}"):
            discard(partial)
        return
    complete = list_checkpoints(run)
    used = {run / _FOLDER: complete}
    for folder in complete:
        with suppress(CheckpointError):  # all folders of a damaged checkpoint stay
            used[folder] = [folder / Manifest.read(folder / MANIFEST_FILE).parts]
    for folder, kept in used.items():
        for entry in storage.list_entries(folder):
            if entry.is_folder and entry.path not in kept:
                discard(entry.path)


def prune(run: StoragePath, keep_last: int, best_step: int | None) -> None:
    """Remove the checkpoints of a run, except the ``keep_last`` newest and the best (after ``best_step``).

    Raise CheckpointError or StorageError if a checkpoint cannot be removed.
    """
    for folder in list_checkpoints(run)[keep_last:]:
        if parse_step(folder) != best_step:
            remove(folder)
