"""The folders of checkpoints: each there whole or not at all, which are there, which are kept. Free of torch.

Every role writes its own part into ``step-N.partial``; the manifest and one rename make it a checkpoint. In
a store, which renames nothing, parts are written below a name that is new each time, ``step-N/parts-X``, and
the manifest, put into ``step-N`` at once, makes it one and says which parts are its own.
docs/checkpoints.md draws one, and says what is in every file.
"""

import dataclasses
import os
import re
import secrets
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import cast

from hybrid.checkpoint.checkpoint_files import MANIFEST_FILE, find_mismatch, write_errors
from hybrid.checkpoint.checkpoint_manifest import PARTIAL, PARTS, Manifest
from hybrid.errors import CheckpointError
from hybrid.storage import files
from hybrid.storage.private_files import make_folder, refuse_link, sync
from hybrid.storage.remote_path import RemotePath, StoragePath, StoragePathT

_FOLDER = "checkpoints"  # of a run
_SHARED = "vocabularies"
_ATTEMPT_BYTES = 8


def checkpoints_folder(run: StoragePathT) -> StoragePathT:
    """Where a run keeps its checkpoints."""
    return cast(StoragePathT, run / _FOLDER)


def step_folder(run: StoragePathT, step: int) -> StoragePathT:
    """Where a run keeps its checkpoint after ``step`` steps."""
    return cast(StoragePathT, checkpoints_folder(run) / f"step-{step:08d}")


def list_checkpoints(run: StoragePathT) -> list[StoragePathT]:
    """The checkpoints of a run, newest first; none that is partial.

    Raises:
        HybridError: their folder is a link.
    """
    if isinstance(run, RemotePath):
        named = [each.path for each in files.list_entries(checkpoints_folder(run)) if each.is_folder]
        folders = [f for f in _of_steps(named) if files.is_file(f / MANIFEST_FILE)]
    else:
        refuse_link(checkpoints_folder(run))
        folders = _of_steps(path.parent for path in run.glob(f"{_FOLDER}/step-*/{MANIFEST_FILE}"))
    return cast(list[StoragePathT], sorted(folders, key=parse_step, reverse=True))


def belongs_to_run(folder: StoragePath) -> bool:
    """Whether a checkpoint is among those of a run."""
    return folder.parent.name == _FOLDER


def vocabulary_path(parts: StoragePathT, name: str) -> StoragePathT:
    """Where a run keeps a vocabulary, which all its checkpoints share.

    Args:
        parts: the folder of the files of one of these.
    """
    folder = parts.parent if parts.name.startswith(PARTS) else parts
    return cast(StoragePathT, folder.parent.parent / _SHARED / name)


def save_vocabulary(source: Path, folder: StoragePath, name: str) -> None:
    """Keep a vocabulary for the checkpoints of a run, of which ``folder`` is one, unless it is there already.

    Raises:
        CheckpointError: it cannot be copied.
    """
    target = vocabulary_path(folder, name)
    with write_errors(target):
        if files.exists(target):
            return
        if isinstance(target, RemotePath):  # where it is there whole or not at all
            files.copy(source, target)
            return
        refuse_link(target.parent)
        make_folder(target.parent)
        partial = target.with_name(target.name + PARTIAL)
        try:
            shutil.copyfile(source, partial)
            sync(partial)
            os.rename(partial, target)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        sync(target.parent)


def _of_steps(folders: Iterable[StoragePath]) -> list[StoragePath]:
    return [folder for folder in folders if re.fullmatch(r"step-\d+", folder.name)]


def parse_step(folder: StoragePath) -> int:
    """After how many steps a checkpoint of a run was written, by its name."""
    return int(folder.name.removeprefix("step-"))


def begin(folder: StoragePathT) -> StoragePathT:
    """Make the empty folder into which every role writes its part of checkpoint ``folder``."""
    if files.exists(folder / MANIFEST_FILE if isinstance(folder, RemotePath) else folder):
        raise CheckpointError(f"{folder}: exists already; it is not overwritten")
    if isinstance(folder, RemotePath):
        return cast(StoragePathT, folder / (PARTS + secrets.token_hex(_ATTEMPT_BYTES)))
    partial = folder.with_name(folder.name + PARTIAL)
    with write_errors(partial):
        if partial.exists():  # left by a run that was killed while writing
            shutil.rmtree(partial)
        make_folder(partial)
    return partial


def commit(partial: StoragePathT, manifest: Manifest) -> StoragePathT:
    """Seal a folder to which every file that ``manifest`` lists has been written; its final path.

    Raises:
        CheckpointError: a file is not there, or the folder cannot be written.
    """
    if (path := find_mismatch(partial, manifest.files)) is not None:
        rule = "run.folder must be storage that all hosts share"
        raise CheckpointError(f"{path}: a role wrote this elsewhere; {rule}")
    if isinstance(partial, RemotePath):
        return cast(StoragePathT, _commit_parts(partial, manifest))
    manifest.write(partial)
    final = partial.with_name(partial.name.removesuffix(PARTIAL))
    with write_errors(final):
        for path in {(partial / name).parent for name in manifest.files} - {partial}:
            sync(path)
        os.rename(partial, final)
        sync(final.parent)
    return final


def _commit_parts(parts: RemotePath, manifest: Manifest) -> StoragePath:
    final = parts.parent
    if files.exists(final / MANIFEST_FILE):
        rule = "has been written meanwhile, by another run in the same folder; stop one of them"
        raise CheckpointError(f"{final}: {rule}")
    dataclasses.replace(manifest, parts=parts.name).write(final)
    return final


def discard(partial: StoragePath) -> None:
    """Remove what was written of a checkpoint that will not be one."""
    if isinstance(partial, RemotePath):
        with suppress(OSError):
            files.remove(partial)
    else:
        shutil.rmtree(partial, ignore_errors=True)


def remove(folder: StoragePath) -> None:
    """Remove a checkpoint; killed meanwhile, it is partial and no checkpoint any more."""
    if isinstance(folder, RemotePath):
        with write_errors(folder):
            files.remove(folder / MANIFEST_FILE)
            files.remove(folder)
        return
    partial = folder.with_name(folder.name + PARTIAL)
    with write_errors(folder):
        os.rename(folder, partial)
    discard(partial)


def drop_later(run: StoragePath, step: int) -> None:
    """Remove what a run that goes on after ``step`` has left of later steps, and what is unfinished."""
    for folder in list_checkpoints(run):
        if parse_step(folder) > step:
            remove(folder)
    if isinstance(run, RemotePath):
        for parts in _unfinished_parts(run):
            discard(parts)
    else:
        for partial in run.glob(f"{_FOLDER}/*{PARTIAL}"):
            discard(partial)


def _unfinished_parts(run: RemotePath) -> list[StoragePath]:
    """What is in the folders of checkpoints and of none of them."""
    whole = list_checkpoints(run)
    kept = {folder / Manifest.read(folder / MANIFEST_FILE).parts for folder in whole}
    inside = [each.path for folder in whole for each in files.list_entries(folder) if each.is_folder]
    beside = [each.path for each in files.list_entries(checkpoints_folder(run)) if each.path not in whole]
    return [*beside, *(parts for parts in inside if parts not in kept)]


def prune(run: StoragePath, keep_last: int, best_step: int | None) -> None:
    """Remove all checkpoints of a run but the newest and the best one."""
    kept = {*list_checkpoints(run)[:keep_last], *([] if best_step is None else [step_folder(run, best_step)])}
    for folder in list_checkpoints(run):
        if folder not in kept:
            remove(folder)
