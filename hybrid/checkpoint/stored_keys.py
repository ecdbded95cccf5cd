"""The keys of growing tables in checkpoints: packing, and reading by any number of workers.

A shard's file has, in the order of keys as unsigned numbers, ``keys``, ``weight`` and the optimizer state of
the keys with rows; ``counts`` and ``last_steps``, the records of ``hybrid/embedding/worker/key_maps.py``; and
the same of pending keys, as ``pending_keys``, ``pending_counts`` and ``pending_last_steps``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.errors import CheckpointError

KINDS_OF_KEYS = "keys", "counts", "last_steps"
PENDING = "pending_"
_KEYS, _COUNTS, _LAST_STEPS = KINDS_OF_KEYS
_MAX_COUNT = 2**31 - 1


class StoredKeys(NamedTuple):
    """Keys of one file.

    Attributes:
        records_R2: key and record of each row.
        rows: the rows ("weight") and their optimizer state, (R, ...).
        pending_P2: key and record of each pending key.
    """

    records_R2: npt.NDArray[np.int64]
    rows: Mapping[str, npt.NDArray[Any]]
    pending_P2: npt.NDArray[np.int64]


def pack_keys(
    records_R2: npt.NDArray[np.int64], pending_P2: npt.NDArray[np.int64], tensors: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return the tensors of a shard's file, in the order of keys.

    Args:
        records_R2: key and record by row; the record of an unused row is negative.
        tensors: rows and optimizer state; each is removed once it is copied, to free its memory.
    """
    used = np.flatnonzero(records_R2[:, 1] >= 0)
    rows = used[_order(records_R2[used])]
    packed = _split("", records_R2[rows]) | _split(PENDING, pending_P2[_order(pending_P2)])
    index_R = torch.from_numpy(rows)
    return packed | {name: tensors.pop(name).index_select(0, index_R) for name in [*tensors]}


def read_keys(
    checkpoint: Checkpoint, table: str, buckets: range, key_bits: int, tensors: Mapping[str, Tensor]
) -> Iterator[StoredKeys]:
    """Yield the keys of some buckets of a growing table, file by file.

    Args:
        key_bits: number of the bits of a key below the number of its bucket.
        tensors: the rows ("weight") and the optimizer state of the model, of any number of rows.

    Raises:
        CheckpointError: the table is missing, or its shape or optimizer differs, or a file is invalid.
    """
    for arrays in checkpoint.map_shards(table):
        _check(checkpoint, table, arrays, {name: tensor.shape[1:] for name, tensor in tensors.items()})
        records, rows = _join("", arrays, buckets, key_bits)
        pending, _ = _join(PENDING, arrays, buckets, key_bits)
        yield StoredKeys(records, {name: arrays[name][rows] for name in tensors}, pending)


def map_keys(checkpoint: Checkpoint, table: str, dim: int) -> Iterator[dict[str, npt.NDArray[Any]]]:
    """Map the arrays of each file of a growing table into memory; CheckpointError if one is invalid."""
    for arrays in checkpoint.map_shards(table):
        _check(checkpoint, table, arrays, {"weight": (dim,)})
        yield arrays


def _order(records_R2: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return records_R2[:, 0].view(np.uint64).argsort()


def _split(prefix: str, records_R2: npt.NDArray[np.int64]) -> dict[str, Tensor]:
    counts, last_steps = records_R2[:, 1] >> 32, records_R2[:, 1] & 0xFFFFFFFF
    columns = {_KEYS: records_R2[:, 0], _COUNTS: counts, _LAST_STEPS: last_steps}
    return {prefix + name: torch.tensor(column) for name, column in columns.items()}


def _join(
    prefix: str, arrays: Mapping[str, npt.NDArray[Any]], buckets: range, key_bits: int
) -> tuple[npt.NDArray[np.int64], slice]:
    """Return the keys of some buckets with their records, and their positions."""
    keys = arrays[prefix + _KEYS]
    ends = [each << key_bits for each in (buckets.start, buckets.stop)]
    first, last = (
        len(keys) if end >> 64 else keys.view(np.uint64).searchsorted(np.uint64(end)) for end in ends
    )
    part = slice(first, last)
    records = arrays[prefix + _COUNTS][part] << 32 | arrays[prefix + _LAST_STEPS][part]
    return np.stack([keys[part], records], axis=1), part


def _check(
    checkpoint: Checkpoint,
    table: str,
    arrays: Mapping[str, npt.NDArray[Any]],
    widths: Mapping[str, tuple[int, ...]],
) -> None:
    """Raise CheckpointError if the arrays of a file are invalid.

    Args:
        widths: the shapes of the rows and the optimizer state of a key; without state, any state is valid.
    """
    problem = _find_problem(arrays, widths, checkpoint.manifest.step)
    if problem:
        raise CheckpointError(f"{checkpoint.folder}: table {table} {problem}")


def _find_problem(
    arrays: Mapping[str, npt.NDArray[Any]], widths: Mapping[str, tuple[int, ...]], step: int
) -> str | None:
    """Return what is wrong with the arrays of a file, or None."""
    kinds = {name: np.dtype(np.int64) for name in KINDS_OF_KEYS}
    of_records = {prefix + name: kind for prefix in ("", PENDING) for name, kind in kinds.items()}
    if not arrays.keys() >= of_records.keys() or any(arrays[n].dtype != np.int64 for n in of_records):
        return "has rows without keys: it does not grow in the checkpoint"
    of_rows = {name: array.shape[1:] for name, array in arrays.items() if name not in of_records}
    if of_rows != widths and (len(widths) > 1 or of_rows.get("weight") != widths["weight"]):
        return "has another shape or optimizer"
    for prefix, names in (("", of_rows), (PENDING, ())):
        keys, counts, last_steps = (arrays[prefix + name] for name in kinds)
        lengths = {len(each) for each in (keys, counts, last_steps, *(arrays[name] for name in names))}
        unsigned = keys.view(np.uint64)
        is_valid = len(lengths) == 1 and keys.ndim == 1 and bool((unsigned[1:] > unsigned[:-1]).all())
        if is_valid and len(keys):
            bounds = (
                counts.min() - 1,
                _MAX_COUNT - counts.max(),
                last_steps.min(),
                step - last_steps.max(),
            )
            is_valid = min(bounds) >= 0
        if not is_valid:
            return f"has invalid {prefix}{_KEYS}"
    return None
