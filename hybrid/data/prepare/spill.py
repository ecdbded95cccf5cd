"""Intermediate files of parsed rows: a folder for each segment, with pieces of a few blocks.

A piece stores categorical columns as codes into the distinct values of the piece, so each distinct value is
processed once::

    train-3/piece-0/rows.arrow     numbers, codes, targets: a record batch for each block
    train-3/piece-0/words.arrow    the distinct values of each categorical column, as texts
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hybrid.data.parse.sources import RawBlock
from hybrid.data.values.column_values import is_list
from hybrid.data.values.invalid_rows import InvalidRow
from hybrid.data.values.model_columns import Targets

_ROWS, _VALUES = "rows.arrow", "words.arrow"
_ARRAYS = ("row", "dense", "labels", "weights", "groups")  # columns of the rows
_HELD_OUT_BY = "held_out_by_"  # prefix of columns of the rows


class BlockLog(NamedTuple):
    """The rows of a block."""

    num_rows: int  # number of rows, invalid ones included
    num_lines: int  # lines of these rows in the file
    num_valid: int
    invalid: list[InvalidRow]  # the invalid rows, with their lines in the segment


@dataclass(frozen=True)
class SegmentLog:
    """The blocks of a parsed segment, and the first row of each piece."""

    blocks: list[BlockLog]
    pieces: list[int]


def piece_folder(segment: Path, piece: int) -> Path:
    return segment / f"piece-{piece}"


def write_piece(folder: Path, blocks: Sequence[RawBlock], first_row: int) -> None:
    """Write consecutive blocks as a piece; ``first_row`` is the first of its ``source_rows_B``."""
    folder.mkdir()
    columns = [_encode_column(column) for column in zip(*(block.sparse for block in blocks), strict=True)]
    is_float32 = all(
        np.array_equal(block.dense_BF.astype(np.float32), block.dense_BF, equal_nan=True) for block in blocks
    )
    batches = []
    for i, block in enumerate(blocks):
        content: dict[str, pa.Array] = {"row": pa.array((block.source_rows_B - first_row).astype(np.int32))}
        if block.dense_BF.shape[1]:
            content["dense"] = _to_arrow(block.dense_BF.astype(np.float32 if is_float32 else np.float64))
        content |= {f"sparse_{k}": codes[i] for k, (codes, _) in enumerate(columns)}
        content |= {f"weights_{k}": lists for k, lists in enumerate(block.weights)}
        assert block.targets is not None
        content["labels"] = _to_arrow(block.targets.labels_BT)
        if block.targets.weights_BT is not None:
            content["weights"] = _to_arrow(block.targets.weights_BT)
        if block.targets.groups_B is not None:
            content["groups"] = pa.array(block.targets.groups_B)
        content |= {f"{_HELD_OUT_BY}{split}": pa.array(each) for split, each in block.held_out_by.items()}
        batches.append(pa.record_batch(content))
    write_batches(folder / _ROWS, batches)
    values = [each for _, each in columns]
    lists = [pa.LargeListArray.from_arrays(pa.array([0, len(each)], pa.int64()), each) for each in values]
    write_batches(folder / _VALUES, [pa.record_batch(lists, [f"words_{k}" for k in range(len(lists))])])


def write_batches(path: Path, batches: Sequence[pa.RecordBatch]) -> None:
    """Write record batches of one schema as a file."""
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)


def read_batches(path: Path) -> Iterator[pa.RecordBatch]:
    """Yield the record batches that :func:`write_batches` wrote, mapped into memory."""
    with pa.memory_map(str(path)) as file:
        reader = pa.ipc.open_file(file)
        yield from map(reader.get_batch, range(reader.num_record_batches))


def _to_arrow(matrix: npt.NDArray[Any]) -> pa.Array:
    flat = pa.array(np.ascontiguousarray(matrix).reshape(-1))
    return pa.FixedSizeListArray.from_arrays(flat, matrix.shape[1])


def _encode_column(column: Sequence[pa.Array]) -> tuple[list[pa.Array], pa.Array]:
    """Return a column as codes (integers or lists of integers), and the values of the codes.

    A column of numbers is returned unchanged, without values.
    """
    flat = [each.flatten() if is_list(each) else each for each in column]
    if not pa.types.is_dictionary(flat[0].type):
        return list(column), pa.array([], pa.large_string())
    dictionaries = [each.dictionary.cast(pa.large_string()) for each in flat]
    together = pa.concat_arrays(dictionaries).dictionary_encode()
    code_D = np.asarray(together.indices.fill_null(0))
    starts = np.cumsum([0, *map(len, dictionaries)])
    # The narrowest type for all codes and null: most columns take one or two bytes per row.
    dtype = next(d for d in (np.int8, np.int16, np.int32) if len(together.dictionary) <= np.iinfo(d).max)
    code_D = code_D.astype(dtype)
    encoded = []
    for each, start, block in zip(column, starts, flat, strict=False):
        mask_L = np.asarray(block.indices.is_null())
        indices_L = np.asarray(block.indices.fill_null(0)) + start
        codes_L = code_D[indices_L] if len(code_D) else np.zeros(len(indices_L), dtype)
        codes = pa.array(codes_L, mask=mask_L)
        encoded.append(pa.ListArray.from_arrays(each.offsets, codes) if is_list(each) else codes)
    return encoded, together.dictionary


def read_values(folder: Path) -> list[pa.Array]:
    """Return a piece's distinct values of each column of data.sparse; none for columns of numbers."""
    (batch,) = read_batches(folder / _VALUES)
    return [column.flatten() for column in batch.columns]


def read_piece(folder: Path, first_row: int, values: Sequence[pa.Array]) -> Iterator[RawBlock]:
    """Yield the blocks of a piece.

    Args:
        first_row: the first row of the piece among all rows.
        values: for each column of data.sparse, the values that replace its codes; none to skip these columns.
    """
    for batch in read_batches(folder / _ROWS):
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        arrays = {name: _to_numpy(columns[name]) for name in _ARRAYS if name in columns}
        yield RawBlock(
            arrays.get("dense", np.empty((len(batch), 0))).astype(np.float64),
            tuple(_decode(columns[f"sparse_{k}"], each) for k, each in enumerate(values)),
            Targets(arrays["labels"], arrays.get("weights"), arrays.get("groups")),
            first_row + arrays["row"].astype(np.int64),
            tuple(column for name, column in columns.items() if name.startswith("weights_")),
            {
                name.removeprefix(_HELD_OUT_BY): np.asarray(column)
                for name, column in columns.items()
                if name.startswith(_HELD_OUT_BY)
            },
        )


def _decode(column: pa.Array, values: pa.Array) -> pa.Array:
    """Convert codes to a dictionary array, or to lists of such; return numbers unchanged."""
    if is_list(column):
        return pa.ListArray.from_arrays(column.offsets, _decode(column.flatten(), values))
    if pa.types.is_floating(column.type):
        return column
    return pa.DictionaryArray.from_arrays(column, values, safe=False)


def _to_numpy(column: pa.Array) -> npt.NDArray[Any]:
    if pa.types.is_fixed_size_list(column.type):
        return np.asarray(column.flatten()).reshape(len(column), column.type.list_size)
    return np.asarray(column)


def counts_path(folder: Path, k: int) -> Path:
    """Return the file with the count (int64) of each value of a piece's column in training rows."""
    return folder / f"counts_{k}.npy"
