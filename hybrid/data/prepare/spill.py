"""Rows that are parsed and not yet encoded, on the disk: a folder a part, in pieces of a few blocks.

A piece holds its categorical columns as codes into words of its own, so that what is done to a value is done
once for each distinct one::

    part-3/piece-0/rows.arrow     numbers, codes, targets: a record batch a block
    part-3/piece-0/words.arrow    the distinct texts of each categorical column
    part-3/part.json              the rows, lines and bad rows of each block; written last
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hybrid.data.encode.fitting import Ranked
from hybrid.data.encode.vocabulary import text_bounds
from hybrid.data.parse.sources import RawBlock
from hybrid.data.values.column_values import is_list
from hybrid.data.values.invalid_rows import BadRow, Reason
from hybrid.data.values.targets import Targets
from hybrid.storage import files as storage
from hybrid.storage.remote_path import Place, PlaceT, RemotePath

_ROWS, _WORDS, _PART = "rows.arrow", "words.arrow", "part.json"
_RANKED = ("texts.bin", "ends.bin", "counts.bin")


class BlockLog(NamedTuple):
    """What is known of the rows of a block.

    Attributes:
        num_rows: bad ones included.
        num_lines: lines that they take.
        num_good: rows without the bad ones.
        bad: the bad ones, with their lines in the part.
    """

    num_rows: int
    num_lines: int
    num_good: int
    bad: list[BadRow]


@dataclass(frozen=True)
class PieceLog:
    """What is known of a piece of a part.

    Attributes:
        first_row: of its rows in the part.
        num_rows: good ones.
    """

    first_row: int
    num_rows: int


@dataclass(frozen=True)
class PartLog:
    """What is known of a part that is parsed."""

    blocks: list[BlockLog]
    pieces: list[PieceLog]

    @property
    def num_rows(self) -> int:
        """Bad ones included."""
        return sum(block.num_rows for block in self.blocks)

    @property
    def num_lines(self) -> int:
        return sum(block.num_lines for block in self.blocks)

    def write(self, folder: Place) -> None:
        """Beside its pieces."""
        storage.write_bytes(folder / _PART, json.dumps(asdict(self)).encode())

    @classmethod
    def read(cls, folder: Place) -> PartLog:
        """What ``write`` wrote; FileNotFoundError where it has not."""
        content = json.loads(storage.read_text(folder / _PART))
        blocks = [
            BlockLog(rows, lines, good, [BadRow(line, Reason(why), *more) for line, why, *more in bad])
            for rows, lines, good, bad in content["blocks"]
        ]
        return cls(blocks, [PieceLog(**piece) for piece in content["pieces"]])


def piece_folder(part: PlaceT, piece: int) -> PlaceT:
    """Where a piece of a part is."""
    return cast(PlaceT, part / f"piece-{piece}")


def is_sent(part: RemotePath) -> bool:
    """Whether a part is in a store, all of it."""
    return storage.exists(part / _PART)


def fetch_part(part: RemotePath, folder: Path) -> bool:
    """Copy a part out of a store into an empty folder; whether it is in the store, all of it."""
    try:
        for piece in range(len(PartLog.read(part).pieces)):
            here, there = piece_folder(folder, piece), piece_folder(part, piece)
            here.mkdir()
            for name in (_ROWS, _WORDS):
                storage.copy(there / name, here / name)
        storage.copy(part / _PART, folder / _PART)
    except FileNotFoundError:  # or not any more: somebody else has prepared the same data
        for piece_here in folder.iterdir():
            shutil.rmtree(piece_here)
        return False
    return True


def write_piece(folder: Place, blocks: Sequence[RawBlock], first_row: int) -> None:
    """Write some blocks.

    Args:
        first_row: of them, among those that ``source_rows_B`` counts.
    """
    storage.make_folder(folder)
    words: list[Any] = []
    columns = []
    for column in zip(*(block.sparse for block in blocks), strict=True):
        coded, found = _coded(column)
        columns.append(coded)
        words.append(found)
    dtype = np.float32 if all(_is_narrow(block.dense_BF) for block in blocks) else np.float64
    batches = [
        _batch(block, [column[i] for column in columns], dtype, first_row) for i, block in enumerate(blocks)
    ]
    _write(folder / _ROWS, batches)
    lists = [pa.LargeListArray.from_arrays(pa.array([0, len(each)], pa.int64()), each) for each in words]
    _write(folder / _WORDS, [pa.record_batch(lists, [f"words_{k}" for k in range(len(lists))])])


def _write(place: Place, batches: Sequence[Any]) -> None:
    with (
        storage.writing(place) as file,
        pa.ipc.new_file(pa.PythonFile(file, "w"), batches[0].schema) as writer,
    ):
        for batch in batches:
            writer.write_batch(batch)


def _is_narrow(dense_BF: npt.NDArray[np.float64]) -> bool:
    """Whether float32 holds the same numbers."""
    return bool(np.array_equal(dense_BF.astype(np.float32), dense_BF, equal_nan=True))


def _coded(column: Sequence[Any]) -> tuple[list[Any], Any]:
    """A column of some blocks as codes, integers or lists of these, and the words that these are of.

    One of numbers stays as it is and has no words.
    """
    flat = [each.flatten() if is_list(each) else each for each in column]
    if not pa.types.is_dictionary(flat[0].type):
        return list(column), pa.array([], pa.large_string())
    dictionaries = [each.dictionary.cast(pa.large_string()) for each in flat]
    together = pa.concat_arrays(dictionaries).dictionary_encode()
    place_D = np.asarray(together.indices.fill_null(0))
    starts = np.cumsum([0, *map(len, dictionaries)])
    # As narrow as can be, with room for one that stands for none: most columns take a byte or two of a row.
    dtype = next(d for d in (np.int8, np.int16, np.int32) if len(together.dictionary) <= np.iinfo(d).max)
    place_D = place_D.astype(dtype)
    coded = []
    for each, start, given in zip(column, starts, flat, strict=False):
        mask_L = np.asarray(given.indices.is_null())
        at_L = np.asarray(given.indices.fill_null(0)) + start
        codes_L = place_D[at_L] if len(place_D) else np.zeros(len(at_L), dtype)
        codes = pa.array(codes_L, mask=mask_L)
        coded.append(pa.ListArray.from_arrays(each.offsets, codes) if is_list(each) else codes)
    return coded, together.dictionary


def _batch(block: RawBlock, sparse: Sequence[Any], dtype: Any, first_row: int) -> Any:
    columns: dict[str, Any] = {"row": pa.array((block.source_rows_B - first_row).astype(np.int32))}
    if num_dense := block.dense_BF.shape[1]:
        columns["dense"] = _matrix(block.dense_BF.astype(dtype), num_dense)
    columns |= {f"sparse_{k}": column for k, column in enumerate(sparse)}
    columns |= {f"weights_{k}": lists for k, lists in enumerate(block.weights)}
    if block.targets is not None:
        labels_BT, weights_BT, groups_B = block.targets
        columns["labels"] = _matrix(labels_BT, labels_BT.shape[1])
        if weights_BT is not None:
            columns["weights"] = _matrix(weights_BT, weights_BT.shape[1])
        if groups_B is not None:
            columns["groups"] = pa.array(groups_B)
    if block.split_B is not None:
        columns["split"] = pa.array(block.split_B)
    return pa.record_batch(columns)


def _matrix(matrix: npt.NDArray[Any], width: int) -> Any:
    return pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(matrix).reshape(-1)), width)


def read_words(folder: Path) -> list[Any]:
    """The distinct texts of each column of data.sparse in a piece; none of columns of numbers."""
    with pa.memory_map(str(folder / _WORDS)) as file:
        batch = pa.ipc.open_file(file).get_batch(0)
    return [column.flatten() for column in batch.columns]


def read_piece(folder: Path, first_row: int, words: Sequence[Any]) -> Iterator[RawBlock]:
    """The blocks of a piece.

    Args:
        first_row: of the piece among all rows.
        words: for each column of data.sparse what its codes stand for, an array as long as its words.
    """
    with pa.memory_map(str(folder / _ROWS)) as file:
        reader = pa.ipc.open_file(file)
        for i in range(reader.num_record_batches):
            yield _block(reader.get_batch(i), first_row, words)


def _block(batch: Any, first_row: int, words: Sequence[Any]) -> RawBlock:
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    sparse = (_with_words(columns[f"sparse_{k}"], each) for k, each in enumerate(words))
    weights = (column for name, column in columns.items() if name.startswith("weights_"))
    dense_BF = np.empty((batch.num_rows, 0))
    if "dense" in columns:
        dense_BF = _array(columns["dense"]).astype(np.float64)
    targets = None
    if "labels" in columns:
        parts = (columns.get("weights"), columns.get("groups"))
        targets = Targets(
            _array(columns["labels"]), *(None if each is None else _array(each) for each in parts)
        )
    split_B = _array(columns["split"]) if "split" in columns else None
    rows_B = first_row + np.asarray(columns["row"]).astype(np.int64)
    return RawBlock(dense_BF, tuple(sparse), targets, rows_B, tuple(weights), split_B)


def _with_words(column: Any, words: Any) -> Any:
    """Codes as a dictionary array, or lists of these; numbers as they are."""
    if is_list(column):
        return pa.ListArray.from_arrays(column.offsets, _with_words(column.flatten(), words))
    if pa.types.is_floating(column.type):
        return column
    return pa.DictionaryArray.from_arrays(column, words, safe=False)


def _array(column: Any) -> Any:
    if pa.types.is_fixed_size_list(column.type):
        return np.asarray(column.flatten()).reshape(len(column), column.type.list_size)
    return np.asarray(column)


class RankedWriter:
    """Writes a vocabulary into a folder, some words at a time; to be closed.

    It is what pyarrow has in memory, so that it can be mapped: the texts end to end, where each ends, and
    beside them how often each comes.
    """

    def __init__(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        self._files = [(folder / name).open("wb") for name in _RANKED]
        self._end = 0
        self._files[1].write(bytes(8))

    def close(self) -> None:
        for file in self._files:
            file.close()

    def add(self, found: Ranked) -> None:
        """Write further words."""
        bounds = text_bounds(found.words)
        data = found.words.buffers()[2]
        texts, ends, counts = self._files
        if data is not None:
            texts.write(memoryview(data)[bounds[0] : bounds[-1]])
        ends.write((bounds[1:] + (self._end - bounds[0])).tobytes())
        counts.write(found.counts_V.tobytes())
        self._end += int(bounds[-1] - bounds[0])


def read_ranked(folder: Path) -> Ranked:
    """What a :class:`RankedWriter` wrote, mapped into memory."""
    texts, ends, counts = (_mapped(folder / name) for name in _RANKED)
    words = pa.LargeStringArray.from_buffers(len(ends) // 8 - 1, ends, texts)
    return Ranked(words, np.frombuffer(counts, np.int64))


def _mapped(path: Path) -> Any:
    if not path.stat().st_size:  # there is nothing to map
        return pa.py_buffer(b"")
    with pa.memory_map(str(path)) as file:
        return file.read_buffer()


def counts_path(folder: Path, k: int) -> Path:
    """How often each word of a column of a piece comes in training rows: int64."""
    return folder / f"counts_{k}.npy"


def rows_path(folder: Path, k: int) -> Path:
    """The row of the table of each word of a column of a piece: int32."""
    return folder / f"rows_{k}.npy"
