"""Deltas, which store the changes of a run's model between two steps, and the list of a run's deltas.

A delta is a folder ``deltas/step-N``, written like a checkpoint, but without optimizer state. It has the
changed rows, the dense nets, and the keys that lost their rows in growing tables. ``deltas/current.json``
lists the deltas, and is replaced after each new delta. docs/checkpoints.md describes the files.

The identity of a model is a checksum of its step and the files of its checkpoint or delta. For a delta, it
also covers the identity of the parent, which is the model that the delta changes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from hybrid.checkpoint.checkpoint_folders import CURRENT_FILE, DELTAS_FOLDER, Manifest, write_errors
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.errors import CheckpointError
from hybrid.primitives.bfloat16_arrays import to_floats
from hybrid.storage import files as storage
from hybrid.storage.file_formats import parse_fields, parse_json
from hybrid.storage.private_files import make_folder, refuse_link
from hybrid.storage.remote_path import StoragePath

PARENT = "parent"  # key of the progress of a delta's manifest: the identity of the model that it changes
_FORMAT = 1
_MAX_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """A run's model after a step, as stored by a checkpoint or a delta. ``sequence`` counts the deltas."""

    sequence: int  # rises by one with each delta; 0 for the first checkpoint
    step: int
    identity: str
    parent: str  # identity of the model that the delta changes; empty for the first checkpoint
    taken_at: float  # when the step had ended, in seconds since 1970


@dataclass(frozen=True, slots=True)
class DeltaChain:
    """The content of ``deltas/current.json``: the list of a run's deltas, and the newest full checkpoint."""

    base: ModelVersion  # the model of the newest full checkpoint
    base_checkpoint: str  # :func:`identity_of` this checkpoint
    deltas: tuple[ModelVersion, ...] = ()  # each delta changes the model of the previous delta
    has_ended: bool = False  # whether the run has ended, and the last version is its result

    @property
    def last(self) -> ModelVersion:
        return self.deltas[-1] if self.deltas else self.base

    def after(self, identity: str) -> Sequence[ModelVersion] | None:
        """Return the deltas after the model with ``identity``; None if the list does not have this model."""
        if identity == self.last.identity:
            return ()
        parents = [delta.parent for delta in self.deltas]
        return self.deltas[parents.index(identity) :] if identity in parents else None

    @classmethod
    def read(cls, run: StoragePath) -> DeltaChain | None:
        """Return the list of a run's deltas, or None if the run has none yet.

        CheckpointError if the list is invalid, StorageError if it cannot be read.
        """
        path = run / DELTAS_FOLDER / CURRENT_FILE
        refuse_link(path.parent)
        try:
            document = parse_json(storage.read_bytes(path, _MAX_BYTES))
            if not isinstance(document, dict) or document.pop("format", None) != _FORMAT:
                raise ValueError(f"its format is not {_FORMAT}")
            chain = parse_fields(cls, document)
            chain._check()
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError) as error:
            raise CheckpointError(f"{path}: is not a list of deltas: {error}") from error
        return chain

    def _check(self) -> None:
        if min(min(each.step, each.sequence) for each in (self.base, *self.deltas)) < 0:
            raise ValueError("a step or a sequence number is negative")
        for before, delta in pairwise(self.deltas):
            if (delta.sequence, delta.parent) != (before.sequence + 1, before.identity):
                raise ValueError(f"delta {delta.sequence} does not follow delta {before.sequence}")
        if self.after(self.base.identity) is None:
            raise ValueError("no delta starts from its base")

    def write(self, run: StoragePath) -> None:
        """Replace the list of deltas in a run folder by this one; CheckpointError if this fails."""
        folder = run / DELTAS_FOLDER
        document = {"format": _FORMAT, **dataclasses.asdict(self)}
        with write_errors(folder / CURRENT_FILE):
            make_folder(folder)
            storage.write_bytes(folder / CURRENT_FILE, json.dumps(document, indent=1).encode())


def delta_folder(run: StoragePath, step: int) -> StoragePath:
    return run / DELTAS_FOLDER / f"step-{step:08d}"


def identity_of(manifest: Manifest) -> str:
    """Return the identity of the model that a checkpoint or a delta with this manifest stores."""
    content: list[Any] = [manifest.step, manifest.files, manifest.progress.get(PARENT, "")]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class ChangedRows(NamedTuple):
    """The changes of a table in one file of a delta; ``rows`` are the keys if the table grows."""

    rows: npt.NDArray[np.int64]  # row numbers, or keys of a growing table, (U,)
    weight: npt.NDArray[Any]  # the new values, (U, D)
    evicted: npt.NDArray[np.int64]  # keys that have lost their rows, (E,); empty unless the table grows


Changes: TypeAlias = dict[str, list[ChangedRows]]  # by table, in the order in which they apply


def open_delta(run: StoragePath, version: ModelVersion) -> Checkpoint:
    """Open and verify the delta of ``version``; CheckpointError if missing, damaged or of another version."""
    folder = delta_folder(run, version.step)
    refuse_link(folder, run)
    delta = Checkpoint.open(folder)
    manifest = delta.manifest
    found = manifest.step, manifest.progress.get(PARENT), identity_of(manifest)
    if found != (version.step, version.parent, version.identity):
        raise CheckpointError(f"{delta.folder}: is not the delta that {CURRENT_FILE} lists")
    manifest.verify(delta.files_folder)
    return delta


def read_changes(delta: Checkpoint, table: str, num_rows: int | None, dim: int) -> list[ChangedRows]:
    """Return the changes of a table, file by file.

    Args:
        num_rows: number of rows; None if the table grows.

    Raises:
        CheckpointError: the table is missing, or a file has invalid changes or another shape.
    """
    changes = []
    for index in range(delta.num_shards(table)):
        arrays = delta.map_shard(table, index)
        rows = arrays.get("rows" if num_rows is not None else "keys")
        evicted = np.empty(0, np.int64) if num_rows is not None else arrays.get("evicted")
        is_valid = (
            rows is not None
            and evicted is not None
            and rows.dtype == evicted.dtype == np.int64
            and rows.ndim == evicted.ndim == 1
            and arrays["weight"].shape == (len(rows), dim)
            and (num_rows is None or not len(rows) or (rows.min() >= 0 and rows.max() < num_rows))
        )
        if not is_valid:
            raise CheckpointError(f"{delta.folder}: table {table} has invalid changes")
        assert rows is not None
        assert evicted is not None
        changes.append(ChangedRows(rows, to_floats(arrays["weight"]), evicted))
    return changes
