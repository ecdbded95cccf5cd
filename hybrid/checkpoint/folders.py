"""The folders of checkpoints: each there whole or not at all, which are there, which are kept. Free of torch.

Every role writes its own part into ``step-N.partial``; the manifest and one rename make it a checkpoint.
docs/checkpoints.md draws one, and says what is in every file.
"""

import os
import re
import shutil
from pathlib import Path

from hybrid.checkpoint.files import MANIFEST_FILE, misfit, writing
from hybrid.checkpoint.manifest import PARTIAL, Manifest
from hybrid.errors import CheckpointError
from hybrid.private_files import make_folder, sync

_FOLDER = "checkpoints"  # of a run


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
    partial = folder.with_name(folder.name + PARTIAL)
    with writing(partial):
        if partial.exists():  # left by a run that was killed while writing
            shutil.rmtree(partial)
        make_folder(partial)
    return partial


def commit(partial: Path, manifest: Manifest) -> Path:
    """Seal a folder to which every file that ``manifest`` lists has been written; its final path.

    Raises:
        CheckpointError: a file is not there, or the folder cannot be written.
    """
    if (path := misfit(partial, manifest.files)) is not None:
        rule = "run.folder must be storage that all hosts share"
        raise CheckpointError(f"{path}: a role wrote this elsewhere; {rule}")
    manifest.write(partial)
    final = partial.with_name(partial.name.removesuffix(PARTIAL))
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
    partial = folder.with_name(folder.name + PARTIAL)
    with writing(folder):
        os.rename(folder, partial)
    discard(partial)


def drop_later(run: Path, step: int) -> None:
    """Remove what a run that goes on after ``step`` has left of later steps, and what is unfinished."""
    for folder in stored(run):
        if step_of(folder) > step:
            remove(folder)
    for partial in run.glob(f"{_FOLDER}/*{PARTIAL}"):
        discard(partial)


def prune(run: Path, keep_last: int, best_step: int | None) -> None:
    """Remove all checkpoints of a run but the newest and the best one."""
    kept = {*stored(run)[:keep_last], *([] if best_step is None else [step_folder(run, best_step)])}
    for folder in stored(run):
        if folder not in kept:
            remove(folder)
