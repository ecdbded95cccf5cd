"""Folders of checkpoints: creating them atomically, listing and removing them. Free of torch.

Each role writes its files into ``step-N.partial``; the manifest and one rename make it a checkpoint. A store
cannot rename: there, the files go below a new name, ``step-N/parts-X``, and the manifest, written last into
``step-N``, names that folder. docs/checkpoints.md describes every file.
"""

import dataclasses
import os
import re
import secrets
import shutil
from contextlib import suppress
from pathlib import Path
from typing import cast

from hybrid.checkpoint.checkpoint_manifest import (
    MANIFEST_FILE,
    PARTIAL,
    PARTS,
    Manifest,
    find_mismatch,
    write_errors,
)
from hybrid.errors import CheckpointError
from hybrid.storage import files
from hybrid.storage.private_files import make_folder, refuse_link, sync
from hybrid.storage.remote_path import RemotePath, StoragePath, StoragePathT

_FOLDER = "checkpoints"  # of a run
_VOCABULARIES = "vocabularies"
_RANDOM_BYTES = 8


def checkpoints_folder(run: StoragePathT) -> StoragePathT:
    """Return the folder of a run's checkpoints."""
    return cast(StoragePathT, run / _FOLDER)


def step_folder(run: StoragePathT, step: int) -> StoragePathT:
    """Return the folder of a run's checkpoint after ``step`` steps."""
    return cast(StoragePathT, checkpoints_folder(run) / f"step-{step:08d}")


def list_checkpoints(run: StoragePathT) -> list[StoragePathT]:
    """Return the complete checkpoints of a run, newest first.

    Raises:
        HybridError: their folder is a symbolic link.
    """
    folder = checkpoints_folder(run)
    if isinstance(run, RemotePath):
        folders = [each.path for each in files.list_entries(folder) if each.is_folder]
    else:
        refuse_link(str(folder))
        folders = [path.parent for path in run.glob(f"{_FOLDER}/step-*/{MANIFEST_FILE}")]
    named = [each for each in folders if re.fullmatch(r"step-\d+", each.name)]
    complete = [each for each in named if files.is_file(each / MANIFEST_FILE)]
    return cast(list[StoragePathT], sorted(complete, key=parse_step, reverse=True))


def belongs_to_run(folder: StoragePath) -> bool:
    """Return whether a checkpoint is one of a run's."""
    return folder.parent.name == _FOLDER


def parse_step(folder: StoragePath) -> int:
    """Return the number of steps before a checkpoint of a run, from its name."""
    return int(folder.name.removeprefix("step-"))


def vocabulary_path(parts: StoragePathT, name: str) -> StoragePathT:
    """Return the path of a vocabulary, which all checkpoints of a run share.

    Args:
        parts: the folder of the files of one of these checkpoints.
    """
    folder = parts.parent if parts.name.startswith(PARTS) else parts
    return cast(StoragePathT, folder.parent.parent / _VOCABULARIES / name)


def save_vocabulary(source: Path, folder: StoragePath, name: str) -> None:
    """Copy a vocabulary for the checkpoints of a run, unless the run has it already.

    Args:
        folder: one of the checkpoints.

    Raises:
        CheckpointError: it cannot be copied.
    """
    target = vocabulary_path(folder, name)
    with write_errors(target):
        if files.exists(target):
            return
        if isinstance(target, RemotePath):
            files.copy(source, target)
            return
        refuse_link(target.parent)
        make_folder(target.parent)
        partial = target.with_name(target.name + PARTIAL)
        try:
            files.copy(source, partial)
            os.rename(partial, target)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        sync(target.parent)


def begin(folder: StoragePathT) -> StoragePathT:
    """Make the empty folder into which the roles write their files of checkpoint ``folder``."""
    if files.exists(folder / MANIFEST_FILE if isinstance(folder, RemotePath) else folder):
        raise CheckpointError(f"{folder}: exists already; it is not overwritten")
    if isinstance(folder, RemotePath):
        return cast(StoragePathT, folder / (PARTS + secrets.token_hex(_RANDOM_BYTES)))
    partial = folder.with_name(folder.name + PARTIAL)
    with write_errors(partial):
        if partial.exists():  # left by a killed run
            shutil.rmtree(partial)
        make_folder(partial)
    return partial


def commit(partial: StoragePathT, manifest: Manifest) -> StoragePathT:
    """Make a checkpoint of a folder that has every file of the manifest, and return its final path.

    Raises:
        CheckpointError: a file is missing, or the folder cannot be written.
    """
    if (path := find_mismatch(partial, manifest.files)) is not None:
        rule = "set run.folder to storage that all hosts share"
        raise CheckpointError(f"{path}: a role has written this file to another folder; {rule}")
    if isinstance(partial, RemotePath):
        final: StoragePath = partial.parent
        if files.exists(final / MANIFEST_FILE):
            rule = "another run in the same folder has written this checkpoint; stop one of them"
            raise CheckpointError(f"{final}: {rule}")
        dataclasses.replace(manifest, parts=partial.name).write(final)
        return cast(StoragePathT, final)
    manifest.write(partial)
    final = partial.with_name(partial.name.removesuffix(PARTIAL))
    with write_errors(final):
        for folder in {(partial / name).parent for name in manifest.files} - {partial}:
            sync(folder)
        os.rename(partial, final)
        sync(final.parent)
    return final


def discard(partial: StoragePath) -> None:
    """Remove an unfinished checkpoint; errors are ignored."""
    if isinstance(partial, RemotePath):
        with suppress(OSError):
            files.remove(partial)
    else:
        shutil.rmtree(partial, ignore_errors=True)


def remove(folder: StoragePath) -> None:
    """Remove a checkpoint; a kill meanwhile leaves an unfinished one."""
    with write_errors(folder):
        if isinstance(folder, RemotePath):
            files.remove(folder / MANIFEST_FILE)
            files.remove(folder)
            return
        partial = folder.with_name(folder.name + PARTIAL)
        os.rename(folder, partial)
    discard(partial)


def drop_later(run: StoragePath, step: int) -> None:
    """Remove the checkpoints of a run after ``step``, and unfinished ones."""
    for folder in list_checkpoints(run):
        if parse_step(folder) > step:
            remove(folder)
    if not isinstance(run, RemotePath):
        for partial in run.glob(f"{_FOLDER}/*{PARTIAL}"):
            discard(partial)
        return
    complete = list_checkpoints(run)
    used = {folder / Manifest.read(folder / MANIFEST_FILE).parts for folder in complete}
    inside = [each.path for folder in complete for each in files.list_entries(folder) if each.is_folder]
    beside = [each.path for each in files.list_entries(checkpoints_folder(run)) if each.path not in complete]
    for unfinished in (*beside, *(folder for folder in inside if folder not in used)):
        discard(unfinished)


def prune(run: StoragePath, keep_last: int, best_step: int | None) -> None:
    """Remove all checkpoints of a run except the newest and the best one."""
    folders = list_checkpoints(run)
    best = None if best_step is None else step_folder(run, best_step)
    for folder in folders[keep_last:]:
        if folder != best:
            remove(folder)
