"""Vocabularies are the same, whether they are ordered in memory or merged."""

import random
import shutil
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from hybrid.config import DataSection
from hybrid.config.resolved_columns import Column, columns_of
from hybrid.data.parse.sources import RawBlock
from hybrid.data.prepare import spill
from hybrid.data.prepare.vocabulary_order import RankJob, rank_values

ODD = ["", "\0", "a" * 4096, "a" * 4095 + "b", "é", "e\u0301", "\u20ac", "\uffee", "\U0001f600"]
Words = dict[str, int]


def column(min_count: int) -> Column:
    data = DataSection(format="csv", sparse=("c",), vocabulary=f"build({min_count})")
    return columns_of(data, {})[1][0]


def drawn(seed: int, num_pieces: int, num_columns: int) -> list[list[Words]]:
    """Return the counts of the values of each piece and column; some are 0, many are equal."""
    draw = random.Random(seed)
    pool = ODD + [f"{i:x}" for i in range(draw.choice([3, 300]))]
    return [
        [
            {
                word: draw.choice([0, 1, 1, 1, 2, 3, 50])
                for word in draw.sample(pool, draw.randrange(len(pool)))
            }
            for _ in range(num_columns)
        ]
        for _ in range(num_pieces)
    ]


def written(folder: Path, pieces: list[list[Words]]) -> list[Path]:
    """Write pieces as parsing and counting leave them."""
    folders = []
    for i, columns in enumerate(pieces):
        coded = (pa.array([*words], pa.large_string()).dictionary_encode() for words in columns)
        block = RawBlock(np.empty((0, 0)), tuple(each[:0] for each in coded), None, np.empty(0, np.int64))
        spill.write_piece(folder / f"piece-{i}", [block], 0)
        for k, words in enumerate(columns):
            np.save(spill.counts_path(folder / f"piece-{i}", k), np.array([*words.values()], np.int64))
        folders.append(folder / f"piece-{i}")
    return folders


def expected(
    pieces: list[list[Words]], columns: dict[int, Column]
) -> tuple[list[tuple[str, int]], list[list[int]]]:
    """The vocabulary, and the rows of each piece and column, by Python's own sorting."""
    counts: Counter[str] = Counter()
    for piece in pieces:
        for k in columns:
            counts.update(piece[k])
    order = sorted(
        ((word, n) for word, n in counts.items() if n), key=lambda each: (-each[1], each[0].encode())
    )
    rank = {word: 1 + i for i, (word, _) in enumerate(order)}
    rows = [
        [rank.get(word, 0) if counts[word] >= column.min_count else 0 for word in piece[k]]
        for piece in pieces
        for k, column in columns.items()
    ]
    return order, rows


@pytest.mark.parametrize("seed", range(3))
def test_order_does_not_depend_on_memory(tmp_path: Path, seed: int) -> None:
    num_pieces, columns = [(1, 1), (2, 3), (9, 2)][seed % 3]
    pieces = drawn(seed, num_pieces, columns)
    folders = written(tmp_path, pieces)
    shared = {k: column(1 + 2 * k) for k in range(columns)}
    order, rows = expected(pieces, shared)
    for memory_bytes in (1 << 40, 60_000, 1 if num_pieces == 1 else 9_000):
        vocabulary = tmp_path / "vocabulary"
        shutil.rmtree(vocabulary, ignore_errors=True)
        rank_values(RankJob(shared, folders, vocabulary, memory_bytes), lambda rows, share: None)
        found = spill.read_ranked(vocabulary)
        assert [*zip(found.values.to_pylist(), found.counts_V.tolist(), strict=True)] == order
        assert [np.load(spill.rows_path(each, k)).tolist() for each in folders for k in shared] == rows
        assert {path.name for path in tmp_path.iterdir()} == {"vocabulary", *(each.name for each in folders)}


def peak_bytes(job: RankJob) -> int:
    """Return the peak memory of ordering, of Arrow, Python and NumPy."""
    usual = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(usual)
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        rank_values(job, lambda rows, share: None)
        return int(pool.max_memory()) + tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(usual)


def test_ordering_stays_within_its_memory(tmp_path: Path) -> None:
    """The vocabulary has 100,000 distinct values."""
    folders = written(tmp_path, [[{f"{5_000 * i + j:x}": 1 for j in range(5_000)}] for i in range(20)])
    enough, little = (
        RankJob({0: column(1)}, folders, tmp_path / str(memory_bytes), memory_bytes)
        for memory_bytes in (1 << 40, 4 << 20)
    )
    assert peak_bytes(little) < little.memory_bytes < peak_bytes(enough) / 2
    assert spill.read_ranked(little.folder).values.equals(spill.read_ranked(enough.folder).values)
    assert len(spill.read_ranked(little.folder).values) == 100_000
