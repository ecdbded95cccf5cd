"""The order of a vocabulary, out of the words of all pieces, within a limit of memory.

Words that fit are ordered together. Others are sorted by text, piece by piece, and cut at the same texts;
what lies between two cuts fits, is ordered by itself, and is a run. Since runs follow each other by text, the
words that come equally often (a level) are in the order of the runs, and the place of each follows from the
sizes of levels: no words of two runs are compared, as they would have to be had a hash parted them::

    sorted pieces   a b d | e     b c d | f     words, and how often each comes; cut at e
                    3 1 1 | 2     1 1 1 | 1
    runs            a b d c | e f               each in its order
                    3 2 2 1 | 2 1
    vocabulary      a | b d | e | c | f         level by level, and run by run in each
                    3 | 2 2 | 2 | 1 | 1
"""

from __future__ import annotations

import shutil
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hybrid.config.resolved_columns import Column
from hybrid.data.encode.fitting import Ranked, WordCounts, ranked
from hybrid.data.encode.vocabulary import text_bounds
from hybrid.data.prepare import spill
from hybrid.data.prepare.process_pool import Told
from hybrid.data.prepare.spill import RankedWriter, read_ranked

# What ordering takes for each word of a piece, and for each byte of it, if no two are the same.
_A_WORD, _A_BYTE = 140, 4  # bytes


class RankJob(NamedTuple):
    """A vocabulary to order.

    Attributes:
        columns: those that share it, by their places.
        pieces: all of them.
        folder: that it goes to.
        memory_bytes: that it may take.
    """

    columns: dict[int, Column]
    pieces: list[Path]
    folder: Path
    memory_bytes: int


class _Part(NamedTuple):
    """The words of a column in a piece."""

    piece: Path
    column: int
    min_count: int

    def read(self) -> WordCounts:
        words = spill.read_words(self.piece)[self.column]
        return WordCounts(words, np.load(spill.counts_path(self.piece, self.column)))

    def write_rows(self, rank_D: npt.NDArray[np.int64], found: Ranked) -> None:
        """The rows of the table, by the ranks in the vocabulary."""
        known = found.num_known(self.min_count)
        rows_D = np.where(rank_D <= known, rank_D, 0).astype(np.int32)
        np.save(spill.rows_path(self.piece, self.column), rows_D)


def rank_words(job: RankJob, told: Told) -> None:
    """Order the words of a vocabulary, and say for each piece which row each of its words has."""
    pa.default_memory_pool().release_unused()
    parts = [_Part(piece, k, column.min_count) for piece in job.pieces for k, column in job.columns.items()]
    need = sum(int(_costs(spill.read_words(part.piece)[part.column])[-1]) for part in parts)
    if need > job.memory_bytes:
        _merge(job, parts, told)
    else:
        found, ranks = ranked([part.read() for part in parts])
        _write(job.folder, found)
        for part, rank_D in zip(parts, ranks, strict=True):
            part.write_rows(rank_D, found)
    told(0, 1.0)


def _write(folder: Path, found: Ranked) -> None:
    with closing(RankedWriter(folder)) as writer:
        writer.add(found)


def _costs(words: Any) -> npt.NDArray[np.int64]:
    """What ordering the first of some words takes, for none of them, for one, ..., for all."""
    bounds = text_bounds(words)
    costs: npt.NDArray[np.int64] = _A_WORD * np.arange(len(bounds)) + _A_BYTE * (bounds - bounds[0])
    return costs


def _merge(job: RankJob, parts: Sequence[_Part], told: Told) -> None:
    """Order words that do not fit into memory together."""
    scratch = job.folder.with_name(f"{job.folder.name}-runs")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    paths = [scratch / f"sorted-{i}.arrow" for i in range(len(parts))]
    # Between two cuts lie as many samples as there are parts, and of each part less than a step besides.
    step = max(1, job.memory_bytes // (2 * len(parts)))
    samples = []
    for i, (part, path) in enumerate(zip(parts, paths, strict=True)):
        samples.append(_sort(part.read(), path, step))
        told(0, 0.4 * (i + 1) / len(parts))
    together = pa.concat_arrays(samples)
    cuts = together.take(pc.sort_indices(together))[len(parts) - 1 :: len(parts)].unique().to_pylist()
    bounds_IR = np.array([_bounds(path, cuts) for path in paths])
    runs = []
    for r in range(len(cuts) + 1):
        bounds = zip(paths, bounds_IR[:, r], bounds_IR[:, r + 1], strict=True)
        runs.append(_Run.write(scratch / f"run-{r}", [_between(*each) for each in bounds]))
        told(0, 0.4 + 0.4 * (r + 1) / (len(cuts) + 1))
    shifts = _write_levels(job.folder, [run.found for run in runs])
    found, sizes_IR = read_ranked(job.folder), np.diff(bounds_IR)
    ends_IR = sizes_IR.cumsum(axis=0)
    for part, path, sizes_R, ends_R in zip(parts, paths, sizes_IR, ends_IR, strict=True):
        ranks = [
            shift.ranks(run.ranks(end - size, end))
            for run, shift, size, end in zip(runs, shifts, sizes_R.tolist(), ends_R.tolist(), strict=True)
        ]
        rank_D = np.empty(int(sizes_R.sum()), np.int64)
        rank_D[np.asarray(_sorted(path)["place"])] = np.concatenate(ranks)
        part.write_rows(rank_D, found)
    shutil.rmtree(scratch)


def _sort(part: WordCounts, path: Path, step: int) -> Any:
    """Write words sorted by text; some of them, one wherever the cost has grown by ``step``."""
    place = pc.sort_indices(part.words)
    words = part.words.take(place)
    batch = pa.record_batch({"word": words, "count": pa.array(part.counts_D).take(place), "place": place})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)
    costs = _costs(words)
    chosen = np.unique(np.searchsorted(costs, np.arange(step, int(costs[-1]) + 1, step)) - 1)
    return words.take(pa.array(chosen))


def _sorted(path: Path) -> Any:
    """What :func:`_sort` wrote, mapped into memory: ``word``, ``count`` and ``place`` before the sorting."""
    with pa.memory_map(str(path)) as file:
        return pa.ipc.open_file(file).get_batch(0)


def _bounds(path: Path, cuts: Sequence[str]) -> list[int]:
    """Where sorted words are cut: those before a cut are less than it."""
    words = _sorted(path)["word"]
    return [0, *(bisect_left(words, cut, key=lambda word: word.as_py()) for cut in cuts), len(words)]


def _between(path: Path, start: int, stop: int) -> WordCounts:
    """The words of a part between two cuts."""
    batch = _sorted(path).slice(start, stop - start)
    return WordCounts(batch["word"], np.asarray(batch["count"]))


class _Run(NamedTuple):
    """What lies between two cuts, in its order; mapped into memory.

    Attributes:
        folder: of the words, and of their ranks, part after part.
        found: the words.
    """

    folder: Path
    found: Ranked

    @classmethod
    def write(cls, folder: Path, parts: Sequence[WordCounts]) -> _Run:
        found, ranks = ranked(parts)
        _write(folder, found)
        np.concatenate(ranks).astype(np.int32).tofile(folder / "ranks.bin")
        return cls(folder, read_ranked(folder))

    def ranks(self, start: int, stop: int) -> npt.NDArray[np.int32]:
        """Those of some of the words of the parts, in their order."""
        return np.fromfile(self.folder / "ranks.bin", np.int32, stop - start, offset=4 * start)


class _Shift(NamedTuple):
    """By how much ranks in a run differ from those in the vocabulary.

    Attributes:
        first_L: the first rank in the run of each level, rising; before them 0, of words that never come.
        shift_L: of all ranks of the level.
    """

    first_L: npt.NDArray[np.int64]
    shift_L: npt.NDArray[np.int64]

    def ranks(self, rank_D: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """Ranks in the vocabulary."""
        return rank_D + self.shift_L[np.searchsorted(self.first_L, rank_D, side="right") - 1]


def _write_levels(folder: Path, runs: Sequence[Ranked]) -> list[_Shift]:
    """Write the vocabulary that some runs make, which follow each other by text."""
    firsts = [np.flatnonzero(np.diff(run.counts_V, prepend=0)) for run in runs]
    first_S = np.concatenate(firsts)
    stop_S = np.concatenate([np.append(f, len(run.words))[1:] for f, run in zip(firsts, runs, strict=True)])
    run_S = np.repeat(np.arange(len(runs)), [*map(len, firsts)])
    count_S = np.concatenate([run.counts_V[f] for f, run in zip(firsts, runs, strict=True)])
    order = np.lexsort((run_S, -count_S))
    with closing(RankedWriter(folder)) as writer:
        for r, first, stop in zip(*(each[order].tolist() for each in (run_S, first_S, stop_S)), strict=True):
            writer.add(Ranked(runs[r].words[first:stop], runs[r].counts_V[first:stop]))
    size_S = (stop_S - first_S)[order]
    place_S = np.empty_like(first_S)
    place_S[order] = size_S.cumsum() - size_S
    return [*_shifts(firsts, place_S)]


def _shifts(firsts: Sequence[npt.NDArray[np.int64]], place_S: npt.NDArray[np.int64]) -> Iterator[_Shift]:
    """Those of each run, by where each of its levels begins in it, and in the vocabulary."""
    ends = np.cumsum([*map(len, firsts)])
    for first, place in zip(firsts, np.split(place_S, ends[:-1]), strict=True):
        yield _Shift(np.append(0, first + 1), np.append(0, place - first))
