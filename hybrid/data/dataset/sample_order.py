"""The orders of samples in an epoch: exact shuffles with random access.

A permutation of billions of rows in every trainer would be wasteful, so the shuffle has two levels::

    chunks of 4096 rows     | c0 | c1 | c2 | c3 | c4 | ...
    chunks permuted         | c3 | c0 | c4 | c2 | c1 | ...
    rows permuted           |<- window of 256 ->|<- window

Every row occurs exactly once per epoch, the order depends only on (seed, epoch), and only the current window
is in memory. Up to 2**20 rows are one window, and are shuffled completely.

A trainer's slice of a step may have any rows of a window, so all trainers read nearly all chunks. With lanes,
the rows of a window are divided among a number of lanes, and each lane is shuffled::

    chunks permuted         | c3 | c0 | c4 | c2 | ...
    lanes                   |  lane 0 |  lane 1 | ...    the same rows for any number of trainers
    a step                  rows of lane 0, as many of lane 1, ...

A slice of a step is contiguous, so it has rows of few lanes, and a trainer reads only the chunks of these
lanes.
"""

import numpy as np
import numpy.typing as npt

CHUNK_ROWS = 4096
WINDOW_CHUNKS = 256

_CHUNK_STREAM, _WINDOW_STREAM, _LANE_STREAM = range(3)
_GOLDEN = 0.6180339887498949  # multiples of it, modulo 1, are evenly spread


class RowOrder:
    """The rows of the steps of an epoch; here in file order."""

    def indices(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the rows of a step that begins after ``start`` rows of the epoch and ends after ``stop``."""
        return np.arange(start, stop)


class ShuffledOrder(RowOrder):
    """The rows 0 .. ``num_rows`` - 1, shuffled within windows or their lanes; see the module.

    Lane ``l`` of ``L`` has ``(p + turn[l]) // L`` of the first ``p`` positions of an epoch. The lanes add up
    to ``p``, and differ by at most one. The turns of adjacent lanes are far apart. So a range of lanes has a
    proportional number of rows, even if a step has fewer rows than lanes.

    Args:
        num_lanes: fixed for a run, so that its steps are the same for any number of trainers; 0 for none.
    """

    def __init__(self, num_rows: int, seed: int, epoch: int, num_lanes: int = 0) -> None:
        self._num_rows = num_rows
        self._key = (seed, epoch)
        self._has_lanes = num_lanes > 0
        self._turns_L = np.argsort(np.argsort(np.arange(max(1, num_lanes)) * _GOLDEN % 1.0))
        num_chunks = -(-num_rows // CHUNK_ROWS)
        self._chunks = np.random.default_rng((*self._key, _CHUNK_STREAM)).permutation(num_chunks)
        sizes = np.minimum(num_rows - self._chunks * CHUNK_ROWS, CHUNK_ROWS)
        edges = np.concatenate([[0], np.cumsum(sizes)])
        self._window_starts = np.append(edges[:-1:WINDOW_CHUNKS], num_rows)
        self._window = -1, list[npt.NDArray[np.int64]]()  # index and lanes of the last window

    def indices(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """See :class:`RowOrder`: the rows of lane 0, then of lane 1, and so on."""
        chosen: list[list[npt.NDArray[np.int64]]] = [[np.empty(0, np.int64)] for _ in self._turns_L]
        while start < stop:
            window = int(np.searchsorted(self._window_starts, start, side="right")) - 1
            first, last = self._window_starts[window : window + 2].tolist()
            end = min(stop, last)
            if self._window[0] != window:
                self._window = window, self._shuffled_lanes(window, first, last)
            before_L, starts_L, stops_L = (self._count_rows_L(each) for each in (first, start, end))
            bounds = zip((starts_L - before_L).tolist(), (stops_L - before_L).tolist(), strict=True)
            for of_lane, rows, (lane_start, lane_stop) in zip(chosen, self._window[1], bounds, strict=True):
                of_lane.append(rows[lane_start:lane_stop])
            start = end
        return np.concatenate([rows for of_lane in chosen for rows in of_lane])

    def _shuffled_lanes(self, window: int, first: int, last: int) -> list[npt.NDArray[np.int64]]:
        """Return the rows of each lane of a window, which has the positions from ``first`` to ``last``."""
        chunks = self._chunks[window * WINDOW_CHUNKS : (window + 1) * WINDOW_CHUNKS]
        rows = (chunks[:, None] * CHUNK_ROWS + np.arange(CHUNK_ROWS)).reshape(-1)
        rows = rows[rows < self._num_rows]
        ends_L = (self._count_rows_L(last) - self._count_rows_L(first)).cumsum()
        lanes = np.split(rows, ends_L[:-1])
        for lane, of_lane in enumerate(lanes):
            stream = (_LANE_STREAM, window, lane) if self._has_lanes else (_WINDOW_STREAM, window)
            np.random.default_rng((*self._key, *stream)).shuffle(of_lane)
        return lanes

    def _count_rows_L(self, position: int) -> npt.NDArray[np.int64]:
        """Return how many of the first ``position`` rows of the epoch each lane has."""
        return (position + self._turns_L) // len(self._turns_L)


def positions(
    offsets: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the positions of the items of the bags ``rows``, one bag after the other, and their lengths.

    Args:
        offsets: the start of each bag, and the end of the last.
    """
    starts_B = offsets[rows]
    lengths_B = offsets[rows + 1] - starts_B
    before_B = np.cumsum(lengths_B) - lengths_B
    return np.repeat(starts_B - before_B, lengths_B) + np.arange(lengths_B.sum()), lengths_B
