"""The order of a vocabulary, from the values of all pieces, within a memory limit.

Values that fit into memory are ordered at once. Otherwise, the order is an external sort. The values of each
piece are sorted by text on disk, and cut at the same texts. The values between two cuts form a run, which
fits into memory and is ordered by itself. A level consists of the values of a run that have the same count.
The vocabulary has the levels in descending order of counts, and levels with the same count in the order of
runs. So the position of each level follows from the sizes of levels, without comparing values of two runs::

    sorted pieces   a b d | e     b c d | f     values, and the count of each; cut at e
                    3 1 1 | 2     1 1 1 | 1
    runs            a b d c | e f               each run in its order
                    3 2 2 1 | 2 1
    vocabulary      a | b d | e | c | f         level by level, and run by run in each level
                    3 | 2 2 | 2 | 1 | 1
"""

from __future__ import annotations

import shutil
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hybrid.config.data_sections import Column
from hybrid.data.encode.fitting import ValueCounts, rank
from hybrid.data.encode.vocabulary import text_bounds
from hybrid.data.prepare import spill

# Bytes of memory for ordering, per value of a piece and per byte of text, if all values differ.
_BYTES_PER_VALUE, _BYTES_PER_BYTE = 140, 4
_RANKED = ("texts.bin", "ends.bin", "counts.bin")  # files of a vocabulary


class _PieceColumn(NamedTuple):
    piece: Path
    column: int
    min_count: int

    def read(self) -> ValueCounts:
        values = spill.read_values(self.piece)[self.column]
        return ValueCounts(values, np.load(spill.counts_path(self.piece, self.column)))

    def write_rows(self, rank_D: npt.NDArray[np.int64], ranked: ValueCounts) -> None:
        """Write the table row of each value; ``rank_D`` has the ranks of the values in the vocabulary."""
        known = ranked.count_known(self.min_count)
        rows_D = np.where(rank_D <= known, rank_D, 0).astype(np.int32)
        np.save(spill.rows_path(self.piece, self.column), rows_D)


def rank_values(
    columns: Mapping[int, Column],
    pieces: Sequence[Path],
    folder: Path,
    memory_bytes: int,
    check: Callable[[], None],
) -> ValueCounts:
    """Write the table row of each value of each piece; return the vocabulary, mapped into memory.

    Args:
        columns: the columns that share the vocabulary, by their index in data.sparse.
        folder: a new folder for the vocabulary.
        check: called repeatedly; an exception from it ends the work.
    """
    pa.default_memory_pool().release_unused()
    sources = [_PieceColumn(piece, k, column.min_count) for piece in pieces for k, column in columns.items()]
    need = sum(int(_memory_costs(spill.read_values(each.piece)[each.column])[-1]) for each in sources)
    if need > memory_bytes:
        _merge(folder, sources, memory_bytes, check)
    else:
        ranked, ranks = rank([source.read() for source in sources])
        _write_ranked(folder, [ranked])
        for source, rank_D in zip(sources, ranks, strict=True):
            source.write_rows(rank_D, ranked)
    return _read_ranked(folder)


def _memory_costs(values: pa.Array) -> npt.NDArray[np.int64]:
    """Return the memory, in bytes, for ordering the first 0, 1, ..., N of N values."""
    bounds = text_bounds(values)
    costs: npt.NDArray[np.int64] = _BYTES_PER_VALUE * np.arange(len(bounds)) + _BYTES_PER_BYTE * (
        bounds - bounds[0]
    )
    return costs


def _merge(
    folder: Path, sources: Sequence[_PieceColumn], memory_bytes: int, check: Callable[[], None]
) -> None:
    """Order values that do not fit into memory together."""
    scratch = folder.with_name(f"{folder.name}-runs")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    paths = [scratch / f"sorted-{i}.arrow" for i in range(len(sources))]
    # Between two cuts, there are as many samples as sources; after its last sample, a source has less than
    # one step. So a run takes at most ``memory_bytes``.
    step = max(1, memory_bytes // (2 * len(sources)))
    samples = []
    for source, path in zip(sources, paths, strict=True):
        check()
        samples.append(_sort(source.read(), path, step))
    together = pa.concat_arrays(samples)
    cuts = together.take(pc.sort_indices(together))[len(sources) - 1 :: len(sources)].unique().to_pylist()
    # The bounds of the runs in each source. A run has the values below its upper cut.
    bounds = []
    for path in paths:
        values = _read_sorted(path)["value"]
        ends = (bisect_left(values, cut, key=lambda value: value.as_py()) for cut in cuts)
        bounds.append([0, *ends, len(values)])
    bounds_IR = np.array(bounds)
    folders = [scratch / f"run-{r}" for r in range(len(cuts) + 1)]
    for r, run in enumerate(folders):
        check()
        counts = []
        for path, start, stop in zip(paths, bounds_IR[:, r], bounds_IR[:, r + 1], strict=True):
            batch = _read_sorted(path).slice(start, stop - start)
            counts.append(ValueCounts(batch["value"], np.asarray(batch["count"])))
        of_run, ranks = rank(counts)
        _write_ranked(run, [of_run])
        np.concatenate(ranks).astype(np.int32).tofile(run / "ranks.bin")
    shifts = _write_levels(folder, [_read_ranked(run) for run in folders])
    ranked, sizes_IR = _read_ranked(folder), np.diff(bounds_IR)
    ends_IR = sizes_IR.cumsum(axis=0)
    for source, path, sizes_R, ends_R in zip(sources, paths, sizes_IR, ends_IR, strict=True):
        ranks = []
        for run, (first_L, shift_L), size, end in zip(
            folders, shifts, sizes_R.tolist(), ends_R.tolist(), strict=True
        ):
            in_run_D = np.fromfile(run / "ranks.bin", np.int32, size, offset=4 * (end - size))
            ranks.append(in_run_D + shift_L[np.searchsorted(first_L, in_run_D, side="right") - 1])
        rank_D = np.empty(int(sizes_R.sum()), np.int64)
        rank_D[np.asarray(_read_sorted(path)["index"])] = np.concatenate(ranks)
        source.write_rows(rank_D, ranked)
    shutil.rmtree(scratch)


def _sort(counts: ValueCounts, path: Path, step: int) -> pa.Array:
    """Write values sorted by text; return a sample of one value per ``step`` bytes of memory cost."""
    index = pc.sort_indices(counts.values)
    values = counts.values.take(index)
    batch = pa.record_batch({"value": values, "count": pa.array(counts.counts_D).take(index), "index": index})
    spill.write_batches(path, [batch])
    costs = _memory_costs(values)
    chosen = np.unique(np.searchsorted(costs, np.arange(step, int(costs[-1]) + 1, step)) - 1)
    return values.take(pa.array(chosen))


def _read_sorted(path: Path) -> pa.RecordBatch:
    """Return what :func:`_sort` wrote, memory-mapped: ``value``, ``count``, and ``index`` before sorting."""
    (batch,) = spill.read_batches(path)
    return batch


def _write_levels(
    folder: Path, runs: Sequence[ValueCounts]
) -> list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Write the vocabulary of ``runs``, which are in the order of their texts.

    Returns:
        Two arrays for each run. The first has the ascending start ranks of the levels in the run. The second
        has the difference between a level's rank in the vocabulary and in the run. Both begin with 0, for
        values that never occur.
    """
    firsts = [np.flatnonzero(np.diff(run.counts_D, prepend=0)) for run in runs]
    first_S = np.concatenate(firsts)
    stop_S = np.concatenate([np.append(f, len(run.values))[1:] for f, run in zip(firsts, runs, strict=True)])
    run_S = np.repeat(np.arange(len(runs)), [*map(len, firsts)])
    count_S = np.concatenate([run.counts_D[f] for f, run in zip(firsts, runs, strict=True)])
    order = np.lexsort((run_S, -count_S))
    segments = zip(*(each[order].tolist() for each in (run_S, first_S, stop_S)), strict=True)
    _write_ranked(
        folder,
        (
            ValueCounts(runs[r].values[first:stop], runs[r].counts_D[first:stop])
            for r, first, stop in segments
        ),
    )
    size_S = (stop_S - first_S)[order]
    position_S = np.empty_like(first_S)
    position_S[order] = size_S.cumsum() - size_S
    ends = np.cumsum([*map(len, firsts)])[:-1]
    return [
        (np.append(0, first + 1), np.append(0, position - first))
        for first, position in zip(firsts, np.split(position_S, ends), strict=True)
    ]


def _write_ranked(folder: Path, blocks: Iterable[ValueCounts]) -> None:
    """Write a vocabulary into a new folder, block by block.

    The files have pyarrow's memory layout, so that they can be mapped: the texts end to end, the end of each
    text, and the count of each value.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    with ExitStack() as files:
        texts, ends, counts = (files.enter_context((folder / name).open("wb")) for name in _RANKED)
        end = 0
        ends.write(bytes(8))
        for values, counts_D in blocks:
            bounds = text_bounds(values)
            data = values.buffers()[2]
            if data is not None:
                texts.write(memoryview(data)[bounds[0] : bounds[-1]])
            ends.write((bounds[1:] + (end - bounds[0])).tobytes())
            counts.write(counts_D.tobytes())
            end += int(bounds[-1] - bounds[0])


def _read_ranked(folder: Path) -> ValueCounts:
    """Return the vocabulary that :func:`_write_ranked` wrote, mapped into memory."""
    buffers = []
    for name in _RANKED:
        if not (folder / name).stat().st_size:  # an empty file cannot be mapped
            buffers.append(pa.py_buffer(b""))
            continue
        with pa.memory_map(str(folder / name)) as file:
            buffers.append(file.read_buffer())
    texts, ends, counts = buffers
    values = pa.LargeStringArray.from_buffers(len(ends) // 8 - 1, ends, texts)
    return ValueCounts(values, np.frombuffer(counts, np.int64))
