"""Intermediate files of parsed rows: a folder for each segment, with pieces of a few blocks.

A piece is an Arrow file, such as ``train-3/piece-0/rows.arrow``, with a record batch for each block. Blocks
share the dictionary of a categorical column, so each distinct value of the piece is processed once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hybrid.config import RunConfig
from hybrid.config.data_sections import TEST, TRAIN, Holdout
from hybrid.data.parse.sources import RawBlock, SplitValues
from hybrid.data.values.column_values import is_list
from hybrid.data.values.model_columns import Targets
from hybrid.primitives.key_hashes import next_random

MAX_SAMPLED = 1 << 20  # number of times in memory, to find the last training row
_ROWS = "rows.arrow"
_ARRAYS = ("row", "dense", "labels", "weights", "groups")  # columns of the rows
_SPARSE, _HELD_OUT_BY = "sparse_", "held_out_by_"  # prefixes of columns of the rows


@dataclass(frozen=True)
class HoldoutRule:
    """The rule that selects the rows of a held-out split (test or validation) from the training files."""

    held: Holdout  # the split, and its keys in the configuration
    seed: int  # the seed of random rows, and of sampled times
    # For ``held.by = "time"``, the time of the last row that is not held out. If there are more than
    # ``MAX_SAMPLED`` rows, this is an estimate from a random sample.
    latest: float = 0.0

    def find_latest(self, blocks: Iterable[RawBlock]) -> float:
        """Return the time of the last row in ``blocks`` that this rule does not hold out; 0 without rows."""
        times, hashes, limit = np.empty(0), np.empty(0, np.uint64), 2**64 - 1
        for block in blocks:
            times = np.append(times, block.held_out_by[self.held.split])
            hashes = np.append(hashes, self._hash(block.source_rows_B))
            keep = hashes <= np.uint64(limit)
            while keep.sum() > MAX_SAMPLED:
                limit //= 2
                keep = hashes <= np.uint64(limit)
            times, hashes = times[keep], hashes[keep]
        fraction = 1 - self.held.fraction
        return float(np.quantile(times, fraction, method="inverted_cdf")) if len(times) else 0.0

    def selects(self, block: RawBlock) -> npt.NDArray[np.bool_]:
        """Return a mask of the rows of a block that belong to the split."""
        if self.held.by == "time":
            is_later: npt.NDArray[np.bool_] = block.held_out_by[self.held.split] > self.latest
            return is_later
        is_random = self.held.by == "random"
        hashed_B = self._hash(block.source_rows_B if is_random else block.held_out_by[self.held.split])
        is_below: npt.NDArray[np.bool_] = hashed_B < np.uint64(self.held.fraction * 2**64)
        return is_below

    def _hash(self, values_B: SplitValues) -> npt.NDArray[np.uint64]:
        key = next_random(np.array([self.seed % 2**64], np.uint64))
        return next_random(values_B.astype(np.int64).view(np.uint64) ^ key)


class Piece(NamedTuple):
    """A folder with consecutive parsed blocks of a segment."""

    folder: Path
    first_row: int  # index of the first valid row over all files of the split (at first: of the segment)
    split: str
    held_out: tuple[HoldoutRule, ...] = ()  # the rules that select the rows of other splits

    @classmethod
    def write(cls, folder: Path, blocks: Sequence[RawBlock], split: str) -> Piece:
        """Write one or more blocks into the new folder ``folder``, and return the piece."""
        folder.mkdir()
        first_row = int(blocks[0].source_rows_B[0])
        matrices = [block.dense_BF for block in blocks]
        is_float32 = all(np.array_equal(each.astype(np.float32), each, equal_nan=True) for each in matrices)
        batches = []
        for block in blocks:
            rows_B = (block.source_rows_B - first_row).astype(np.int32)
            content: dict[str, pa.Array] = {"row": pa.array(rows_B)}
            if block.dense_BF.shape[1]:
                content["dense"] = _to_arrow(block.dense_BF.astype(np.float32 if is_float32 else np.float64))
            content |= {f"{_SPARSE}{k}": column for k, column in enumerate(block.sparse)}
            content |= {f"weights_{k}": lists for k, lists in enumerate(block.weights)}
            assert block.targets is not None
            content["labels"] = _to_arrow(block.targets.labels_BT)
            if block.targets.weights_BT is not None:
                content["weights"] = _to_arrow(block.targets.weights_BT)
            if block.targets.groups_B is not None:
                content["groups"] = pa.array(block.targets.groups_B)
            content |= {f"{_HELD_OUT_BY}{split}": pa.array(each) for split, each in block.held_out_by.items()}
            batches.append(pa.record_batch(content))
        table = pa.Table.from_batches(batches).unify_dictionaries()
        narrow = [
            pa.record_batch([_narrow(column) for column in batch.columns], batch.schema.names)
            for batch in table.to_batches()
        ]
        with pa.OSFile(str(folder / _ROWS), "wb") as file, pa.ipc.new_file(file, narrow[0].schema) as writer:
            for batch in narrow:
                writer.write_batch(batch)
        return cls(folder, first_row, split)

    def dictionaries(self) -> list[pa.Array]:
        """Return the dictionary of each column of data.sparse; an empty array for a numeric column."""
        first = next(self._batches())
        columns = [first.column(name) for name in first.schema.names if name.startswith(_SPARSE)]
        flat = [each.flatten() if is_list(each) else each for each in columns]
        nothing = pa.array([], pa.string())
        return [each.dictionary if pa.types.is_dictionary(each.type) else nothing for each in flat]

    def counts_path(self, k: int) -> Path:
        """Return the file of value counts (int64) of column ``k``: no counts if ``k`` has no vocabulary."""
        return self.folder / f"counts_{k}"

    def blocks(self, dictionaries: Sequence[pa.Array] | None = None) -> Iterator[tuple[str, RawBlock]]:
        """Divide each block by split, and yield pairs: the name of a split, and its rows in the block.

        ``dictionaries`` replace the stored dictionaries of the columns of data.sparse. If ``dictionaries``
        is empty, the yielded blocks have no sparse columns.
        """
        for batch in self._batches():
            columns = dict(zip(batch.schema.names, batch.columns, strict=True))
            arrays = {name: _to_numpy(columns[name]) for name in _ARRAYS if name in columns}
            sparse = [column for name, column in columns.items() if name.startswith(_SPARSE)]
            if dictionaries is not None:
                sparse = [_replace_values(*pair) for pair in zip(sparse, dictionaries, strict=False)]
            block = RawBlock(
                arrays.get("dense", np.empty((len(batch), 0))).astype(np.float64),
                tuple(sparse),
                Targets(arrays["labels"], arrays.get("weights"), arrays.get("groups")),
                self.first_row + arrays["row"].astype(np.int64),
                tuple(column for name, column in columns.items() if name.startswith("weights_")),
                {
                    name.removeprefix(_HELD_OUT_BY): np.asarray(column)
                    for name, column in columns.items()
                    if name.startswith(_HELD_OUT_BY)
                },
            )
            for rule in self.held_out:
                is_held_B = rule.selects(block)
                if is_held_B.any():
                    yield rule.held.split, block.select(is_held_B)
                    block = block.select(~is_held_B)
            yield self.split, block

    def _batches(self) -> Iterator[pa.RecordBatch]:
        with pa.memory_map(str(self.folder / _ROWS)) as file:
            reader = pa.ipc.open_file(file)
            yield from map(reader.get_batch, range(reader.num_record_batches))


def hold_out(config: RunConfig, pieces: Sequence[Piece]) -> list[Piece]:
    """Return the training pieces, each with the rules that select its test and validation rows."""
    divided = [*pieces]
    for held in config.data.holdouts:
        rule = HoldoutRule(held, config.run.seed if held.split == TEST else config.run.seed + 2**63)
        if held.by == "time":
            blocks = chain.from_iterable(piece.blocks(()) for piece in divided)
            latest = rule.find_latest(rows for name, rows in blocks if name == TRAIN)
            rule = replace(rule, latest=latest)
        divided = [piece._replace(held_out=(*piece.held_out, rule)) for piece in divided]
    return divided


def _narrow(column: pa.Array) -> pa.Array:
    if pa.types.is_list(column.type):
        return pa.ListArray.from_arrays(column.offsets, _narrow(column.flatten()))
    if not pa.types.is_dictionary(column.type):
        return column
    kinds = (pa.int8(), pa.int16(), pa.int32())  # take_or_default needs one more for null
    index = next(kind for kind in kinds if len(column.dictionary) < 1 << kind.bit_width - 1)
    return pa.DictionaryArray.from_arrays(column.indices.cast(index), column.dictionary)


def _to_arrow(matrix: npt.NDArray[Any]) -> pa.Array:
    flat = pa.array(np.ascontiguousarray(matrix).reshape(-1))
    return pa.FixedSizeListArray.from_arrays(flat, matrix.shape[1])


def _replace_values(column: pa.Array, values: pa.Array) -> pa.Array:
    if is_list(column):
        return pa.ListArray.from_arrays(column.offsets, _replace_values(column.flatten(), values))
    if not pa.types.is_dictionary(column.type):
        return column
    return pa.DictionaryArray.from_arrays(column.indices, values, safe=False)


def _to_numpy(column: pa.Array) -> npt.NDArray[Any]:
    if pa.types.is_fixed_size_list(column.type):
        return np.asarray(column.flatten()).reshape(len(column), column.type.list_size)
    return np.asarray(column)
