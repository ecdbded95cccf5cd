"""What is done with a part of the input, or a piece of it, by whichever process is free. Free of torch.

::

    parse_part    a part of a file ──> pieces: numbers, and codes into words of their own
    send_part     the same, into a store; parse_part then finds it there
    learn_piece   a piece          ──> how often each word comes in training rows; moments, quantiles
    rank_words    all pieces       ──> a vocabulary; for each piece the row of each word (ranking.py)
    encode_piece  a piece          ──> its samples, at their place in the arrays of the splits

What a stage gives depends on the files and the configuration alone, not on who does it, nor when.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hybrid.config import ColumnSection, DataSection, TaskSection
from hybrid.data.dataset.atomic_directory import sync_all
from hybrid.data.encode.feature_encoder import FeatureEncoder
from hybrid.data.encode.fitting import WordCounts, holds_several, numbers_of
from hybrid.data.encode.unknown_values import UnknownCounter
from hybrid.data.parse.column_layout import Layout
from hybrid.data.parse.segments import PART_BLOCKS, PART_ROWS, Part, read_part
from hybrid.data.parse.sources import RawBlock, parse_of
from hybrid.data.parse.text_lines import BLOCK_BYTES
from hybrid.data.prepare import spill
from hybrid.data.prepare.holdout import Split
from hybrid.data.prepare.process_pool import Told
from hybrid.data.prepare.spill import BlockLog, PartLog, PieceLog
from hybrid.data.prepare.split_writer import LabelSums, SplitPlace, SplitWriter
from hybrid.data.values.column_values import is_list
from hybrid.data.values.scaling import BlockMoments
from hybrid.data.values.targets import TargetSpec
from hybrid.storage.remote_path import Place, RemotePath

TRAIN, TEST = "train", "test"
MAKING = "making-"  # begins the name of the folder of a part that is not there yet


@dataclass(frozen=True)
class Reading:
    """How the files are read: the sections of the configuration that say so.

    Attributes:
        block_bytes: text parsed at a time.
    """

    data: DataSection
    columns: Mapping[str, ColumnSection]
    tasks: Mapping[str, TaskSection]
    block_bytes: int = BLOCK_BYTES

    @property
    def layout(self) -> Layout:
        return Layout.of(self.data, self.columns, self.tasks)


class ParseJob(NamedTuple):
    """A part, and what becomes of it.

    Attributes:
        part: to parse.
        reading: how it is read.
        folder: that its pieces go to; it appears whole.
        sent: where in a store it is if another host has parsed it, which does not see ``folder``.
    """

    part: Part
    reading: Reading
    folder: Path
    sent: RemotePath | None = None


def parse_part(job: ParseJob, told: Told) -> PartLog:
    """Parse a part, unless it is there or can be fetched.

    Raises:
        DataError, ConfigError: it cannot be read.
    """
    if job.folder.exists():
        told(0, 1.0)
        return PartLog.read(job.folder)
    # Of this attempt's own: on another host that was out of reach, somebody may still be at the same part.
    making = job.folder.with_name(f"{MAKING}{job.folder.name}-{uuid.uuid4().hex}")
    making.mkdir(parents=True)
    if job.sent is not None and spill.fetch_part(job.sent, making):
        told(0, 1.0)
    else:
        _parse(job, making, told)
    sync_all(making)  # whoever goes on with it after a power cut finds what it names
    try:
        making.rename(job.folder)
    except OSError:
        if not job.folder.exists():
            raise
        shutil.rmtree(making)  # somebody was quicker, with the same
    return PartLog.read(job.folder)


def send_part(job: ParseJob, told: Told) -> None:
    """Parse a part into the store, unless it is there already; as :func:`parse_part`.

    Pieces go there out of memory, one at a time, so that nothing is left on this host.
    """
    assert job.sent is not None
    if spill.is_sent(job.sent):
        told(0, 1.0)
    else:
        _parse(job, job.sent, told)


def _parse(job: ParseJob, folder: Place, told: Told) -> None:
    """Parse a part into a folder."""
    told(0, 0.0)
    part, layout = job.part, job.reading.layout
    log = PartLog([], [])
    held: list[RawBlock] = []
    row = 0
    for table, share in read_part(part, layout, job.reading.block_bytes):
        block, bad = parse_of(part.path, table, layout, row)
        log.blocks.append(BlockLog(table.num_rows, table.num_lines, len(block.source_rows_B), bad))
        if len(block.source_rows_B):
            held.append(block)
        row += table.num_rows
        if _is_full(held, part):
            _write_piece(folder, log, held)
            held = []
        told(table.num_rows, share)
    if held:
        _write_piece(folder, log, held)
    log.write(folder)


def _is_full(held: Sequence[RawBlock], part: Part) -> bool:
    rows = sum(len(block.source_rows_B) for block in held)
    return rows >= PART_ROWS or (len(held) >= PART_BLOCKS and part.format != "parquet")


def _write_piece(folder: Place, log: PartLog, held: Sequence[RawBlock]) -> None:
    first_row = int(held[0].source_rows_B[0])
    spill.write_piece(spill.piece_folder(folder, len(log.pieces)), held, first_row)
    log.pieces.append(PieceLog(first_row, sum(len(block.source_rows_B) for block in held)))


class Piece(NamedTuple):
    """A piece, and which rows it has.

    Attributes:
        folder: what is in it.
        first_row: of it among all rows of its split's files.
        split: says which are test rows; None where all are.
    """

    folder: Path
    first_row: int
    split: Split | None

    def blocks(self, words: Sequence[Any]) -> list[dict[str, RawBlock]]:
        """The training rows and the test rows of each block (:func:`read_piece`)."""
        return [self._parted(block) for block in spill.read_piece(self.folder, self.first_row, words)]

    def _parted(self, block: RawBlock) -> dict[str, RawBlock]:
        if self.split is None:
            return {TEST: block}
        is_test_B = self.split.is_test(block)
        if not is_test_B.any():
            return {TRAIN: block}
        return {TRAIN: block.select(~is_test_B), TEST: block.select(is_test_B)}


class PieceLearnt(NamedTuple):
    """What is learnt of a piece, beside the counts of its words.

    Attributes:
        moments: of the training rows of each block.
        numbers: of them too, for each column of data.sparse those whose quantiles make buckets.
        several_K: which columns hold several values in a training row.
        places: how much each split gets: rows, and values of each column of data.sparse.
    """

    moments: list[BlockMoments]
    numbers: list[list[npt.NDArray[np.float64]]]
    several_K: npt.NDArray[np.bool_]
    places: dict[str, tuple[int, npt.NDArray[np.int64]]]


def learn_piece(job: tuple[Piece, Reading], told: Told) -> PieceLearnt:
    """Learn from the training rows of a piece; how often each word comes is written beside it."""
    piece, reading = job
    layout = reading.layout
    sizes = [len(words) for words in spill.read_words(piece.folder)]
    counts: list[npt.NDArray[np.int64]] = [np.zeros(size, np.int64) for size in sizes]
    learnt = PieceLearnt([], [], np.zeros(len(sizes), np.bool_), {})
    for block in piece.blocks([pa.array(np.arange(size, dtype=np.int32)) for size in sizes]):
        for split, rows in block.items():
            num_rows, values_K = learnt.places.get(split, (0, np.zeros(len(sizes), np.int64)))
            more_K = np.array([*map(_num_values, rows.sparse)], np.int64)
            learnt.places[split] = num_rows + len(rows.source_rows_B), values_K + more_K
        if (training := block.get(TRAIN)) is None:
            continue
        learnt.moments.append(BlockMoments.of(training.dense_BF, layout.transforms))
        pairs = zip(layout.sparse, training.sparse, strict=True)
        learnt.numbers.append([numbers_of(column, given) for column, given in pairs])
        for k, column in enumerate(training.sparse):
            learnt.several_K[k] |= holds_several(column)
            if sizes[k]:
                counts[k] += WordCounts.of(column).counts_D
    for k, counts_D in enumerate(counts):
        np.save(spill.counts_path(piece.folder, k), counts_D)
    told(0, 1.0)
    return learnt


def _num_values(column: Any) -> int:
    return len(column.flatten()) if is_list(column) else len(column) - int(column.null_count)


class EncodeJob(NamedTuple):
    """A piece, and where its samples go.

    Attributes:
        encoder: without the values of vocabularies.
        places: where the samples of each split begin.
        folder: of the splits.
    """

    piece: Piece
    encoder: FeatureEncoder
    targets: TargetSpec
    places: dict[str, SplitPlace]
    folder: Path


class PieceWritten(NamedTuple):
    """What is summed up of the samples of a split in a piece: labels by block, unknown values by column."""

    label_sums: list[LabelSums]
    unknown_K: npt.NDArray[np.int64]
    values_K: npt.NDArray[np.int64]


def encode_piece(job: EncodeJob, told: Told) -> dict[str, PieceWritten]:
    """Write the samples of a piece."""
    piece, encoder = job.piece, job.encoder
    unknown = {split: UnknownCounter(encoder) for split in job.places}
    spec = encoder.input_spec
    with ExitStack() as files:
        writers = {
            split: files.enter_context(
                closing(SplitWriter(job.folder / split, spec, job.targets, place, is_end=False))
            )
            for split, place in job.places.items()
        }
        for block in piece.blocks(_rows_of_words(piece.folder, encoder)):
            for split, rows in block.items():
                encoded = encoder.encode(rows)
                unknown[split].add(rows, encoded)
                writers[split].append(encoded, rows.targets, rows.source_rows_B)
    told(0, 1.0)
    return {
        split: PieceWritten(writer.label_sums, *unknown[split].counted) for split, writer in writers.items()
    }


def _rows_of_words(folder: Path, encoder: FeatureEncoder) -> list[Any]:
    """The rows of the table of each word of each column."""
    return [
        _rows(folder, k, encoding, words)
        for k, (encoding, words) in enumerate(zip(encoder.sparse, spill.read_words(folder), strict=True))
    ]


def _rows(folder: Path, k: int, encoding: Any, words: Any) -> Any:
    if encoding.vocabulary == "build":
        return pa.array(np.load(spill.rows_path(folder, k)))
    return pa.array(encoding.rows(words))
