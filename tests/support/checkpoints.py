"""Small checkpoints, written without a cluster."""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import torch

from hybrid import transport
from hybrid.checkpoint import checkpoint_folders
from hybrid.checkpoint.checkpoint_folders import DENSE_FILE, MANIFEST_FILE, Files, Manifest, shard_file
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.checkpoint.deltas import DeltaChain, ModelVersion, identity_of
from hybrid.checkpoint.tensor_file import write_tensors
from hybrid.storage.remote_path import StoragePathT

SHAPES = {"C1": (5, 3, 2)}
SHARDS = [shard_file("C1", index, 2) for index in range(2)]


def write_checkpoint(folder: StoragePathT, step: int = 1) -> StoragePathT:
    """Write a complete checkpoint of one table and a net, and return its folder."""
    partial = checkpoint_folders.begin(folder)
    files: Files = {}
    for index, name in enumerate(SHARDS):
        files |= write_tensors(partial, name, {"weight": torch.full((3 - index, 3), float(step))})
    files |= write_tensors(partial, DENSE_FILE, {"net.w": torch.arange(4.0)})
    return checkpoint_folders.commit(partial, Manifest(step, 2, SHAPES, files, {"auc": 0.75}, {"samples": 7}))


def write_run(run: StoragePathT, *steps: int) -> StoragePathT:
    """Write checkpoints after these steps into a run folder."""
    for step in steps:
        write_checkpoint(checkpoint_folders.step_folder(run, step), step)
    return run


def start_before(run: Path, step: int) -> DeltaChain:
    """Make an earlier checkpoint the base of the run's chain, as it was when the deltas were written."""
    chain = DeltaChain.read(run)
    identity = identity_of(Checkpoint.open(checkpoint_folders.step_folder(run, step)).manifest)
    assert chain is not None
    first = chain.deltas[0]
    base = ModelVersion(first.sequence - 1, step, first.parent, "", first.taken_at)
    earlier = dataclasses.replace(chain, base=base, base_checkpoint=identity)
    earlier.write(run)
    return earlier


def flip_a_bit(path: Path) -> None:
    """Alter one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def forge(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Change the manifest of a checkpoint, and correct its checksum."""
    path = folder / MANIFEST_FILE
    document = json.loads(path.read_text())
    change(document["manifest"])
    document["sha256"] = hashlib.sha256(json.dumps(document["manifest"]).encode()).hexdigest()
    path.write_text(json.dumps(document))
    return path


def names(folder: Path) -> list[str]:
    """Return the names in a folder."""
    return sorted(path.name for path in folder.iterdir())


class Call(transport.Pending[Files]):
    """A call of a role that writes its files; it completes with a future."""

    def __init__(self, written: Future[Files]) -> None:
        self._written = written

    def done(self, wait_seconds: float = 0.0) -> bool:
        return bool(wait([self._written], wait_seconds).done)

    def wait(self) -> Files:
        return self._written.result()
