"""Files of growing tables in checkpoints. A key is the hash of an id; its highest bits are its bucket.

A key is pending until it has a row. The record of a key has the number of steps that read it, and the last
of these steps (``key_maps.py``). A file has the keys of some buckets, ascending as unsigned numbers:

- keys with rows: ``keys``, ``weight``, optimizer state, and the records, ``counts`` and ``last_steps``;
- pending keys: ``pending_keys``, ``pending_counts`` and ``pending_last_steps``;
- ``steps_before``: the number of steps in which earlier runs trained this table, if the run continues their
  model (``train.initial``). The numbers in ``last_steps`` count these steps, too.

An export has only ``keys`` and ``weight``.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.checkpoint.tensor_file import release_pages
from hybrid.errors import CheckpointError
from hybrid.primitives.key_hashes import KEY_BITS, NUM_BUCKETS, bucket_of, buckets_of_shard

KINDS_OF_KEYS = "keys", "counts", "last_steps"
PENDING = "pending_"
STEPS_BEFORE = "steps_before"
OTHER_SHAPE = "has another shape or optimizer"
# The arrays of a file besides rows and optimizer state.
_OF_KEYS = {STEPS_BEFORE, *(prefix + kind for prefix in ("", PENDING) for kind in KINDS_OF_KEYS)}
_MAX_COUNT, _MAX_STEP = 2**31 - 1, 2**32 - 1

Arrays: TypeAlias = Mapping[str, npt.NDArray[Any]]  # arrays of a file by name
Widths: TypeAlias = Mapping[str, tuple[int, ...]]  # shapes of the row ("weight") and the state of a key


class StoredKeys(NamedTuple):
    """Keys of one file, with their rows and records. ``num_steps`` counts the steps of earlier runs, too."""

    records_R2: npt.NDArray[np.int64]  # key and record of each row
    rows: Arrays  # the rows ("weight") and their optimizer state
    pending_P2: npt.NDArray[np.int64]  # key and record of each pending key
    num_steps: int  # number of steps of earlier runs and of this run, to which the records refer


def pack_keys(
    records_R2: npt.NDArray[np.int64],
    pending_P2: npt.NDArray[np.int64],
    steps_before: int,
    tensors: dict[str, Tensor],
) -> dict[str, Tensor]:
    """Return the tensors for the file of a shard, sorted by key (as an unsigned number).

    Args:
        records_R2: key and record of each row; a row with a negative record has no key, and is left out.
        pending_P2: key and record of each pending key.
        steps_before: number of steps of earlier runs, as in the module docstring.
        tensors: rows ("weight") and optimizer state. The dict is emptied, to free memory early.
    """
    used = np.flatnonzero(records_R2[:, 1] >= 0)
    rows = used[_order(records_R2[used])]
    packed = _split("", records_R2[rows]) | _split(PENDING, pending_P2[_order(pending_P2)])
    packed[STEPS_BEFORE] = torch.tensor([steps_before])
    index_R = torch.from_numpy(rows)
    return packed | {name: tensors.pop(name).index_select(0, index_R) for name in [*tensors]}


def map_keys(
    checkpoint: Checkpoint, table: str, widths: Widths, buckets: range = range(NUM_BUCKETS)
) -> Iterator[Arrays]:
    """Map the files with keys in ``buckets``, in order of the keys; yield the arrays of each file.

    A file may also have keys of other buckets, and optimizer state that is not in ``widths``. An export has
    no records. Each of its keys gets the record of one read, in step 1 of an earlier run.
    Raise CheckpointError if the table is missing, a file is invalid, or a shape is not as in ``widths``.
    """
    count = checkpoint.num_shards(table)
    for index in range(count):
        of_file = buckets_of_shard(index, count)
        if of_file.stop <= buckets.start or buckets.stop <= of_file.start:
            continue
        arrays = checkpoint.map_shard(table, index)
        if checkpoint.is_exported and "keys" in arrays:
            made_up = dict.fromkeys(_OF_KEYS, np.zeros(0, np.int64)) | {STEPS_BEFORE: np.ones(1, np.int64)}
            of_rows = dict.fromkeys(KINDS_OF_KEYS, np.broadcast_to(np.int64(1), arrays["keys"].shape))
            arrays = made_up | of_rows | arrays
        if problem := _find_problem(arrays, widths, of_file, checkpoint.manifest.step):
            raise CheckpointError(f"{checkpoint.folder}: table {table} {problem}")
        release_pages(arrays["keys"])  # the check has read all keys
        yield arrays


def read_keys(checkpoint: Checkpoint, table: str, buckets: range, widths: Widths) -> Iterator[StoredKeys]:
    """Yield the keys in ``buckets``, their rows and records, file by file; errors as in :func:`map_keys`."""
    for arrays in map_keys(checkpoint, table, widths, buckets):
        records, part = _join("", arrays, buckets)
        pending, _ = _join(PENDING, arrays, buckets)
        rows = {name: arrays[name][part] for name in arrays.keys() - _OF_KEYS}
        num_steps = checkpoint.manifest.step + int(arrays[STEPS_BEFORE][0])
        yield StoredKeys(records, rows, pending, num_steps)


def _order(records_R2: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return records_R2[:, 0].view(np.uint64).argsort()


def _split(prefix: str, records_R2: npt.NDArray[np.int64]) -> dict[str, Tensor]:
    columns = records_R2[:, 0], records_R2[:, 1] >> 32, records_R2[:, 1] & 0xFFFFFFFF
    return {prefix + kind: torch.tensor(column) for kind, column in zip(KINDS_OF_KEYS, columns, strict=True)}


def find_buckets(keys: npt.NDArray[np.int64], buckets: range) -> slice:
    """Return the slice of ``keys`` that is in ``buckets``; ``keys`` ascend as unsigned numbers."""
    unsigned = keys.view(np.uint64)
    first = unsigned.searchsorted(np.uint64(buckets.start << KEY_BITS))
    last = unsigned.searchsorted(np.uint64((buckets.stop << KEY_BITS) - 1), side="right")
    return slice(first, last)


def _join(prefix: str, arrays: Arrays, buckets: range) -> tuple[npt.NDArray[np.int64], slice]:
    keys, counts, last_steps = (arrays[prefix + kind] for kind in KINDS_OF_KEYS)
    part = find_buckets(keys, buckets)
    return np.stack([keys[part], counts[part] << 32 | last_steps[part]], axis=1), part


def _find_problem(arrays: Arrays, widths: Widths, buckets: range, step: int) -> str | None:
    if not arrays.keys() >= _OF_KEYS or any(arrays[name].dtype != np.int64 for name in _OF_KEYS):
        return "has rows without keys: it does not grow in the checkpoint"
    of_rows = {name: array.shape[1:] for name, array in arrays.items() if name not in _OF_KEYS}
    if not of_rows.items() >= widths.items():
        return OTHER_SHAPE
    steps_before = arrays[STEPS_BEFORE]
    if steps_before.shape != (1,) or not 0 <= step + steps_before[0] <= _MAX_STEP:
        return f"has invalid {STEPS_BEFORE}"
    step += int(steps_before[0])
    for prefix, names in (("", of_rows), (PENDING, ())):
        keys, counts, last_steps = (arrays[prefix + kind] for kind in KINDS_OF_KEYS)
        lengths = {len(each) for each in (keys, counts, last_steps, *(arrays[name] for name in names))}
        is_valid = len(lengths) == 1 and keys.ndim == 1
        if is_valid and len(keys):
            unsigned, of_key = keys.view(np.uint64), bucket_of(keys[[0, -1]])
            is_valid = (
                bool((unsigned[1:] > unsigned[:-1]).all())
                and {*of_key.tolist()} <= {*buckets}
                and 1 <= counts.min() <= counts.max() <= _MAX_COUNT
                and 0 <= last_steps.min() <= last_steps.max() <= step
            )
        if not is_valid:
            return f"has invalid {prefix}keys"
    return None
