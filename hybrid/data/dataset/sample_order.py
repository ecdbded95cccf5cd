"""The orders of samples in an epoch: exact shuffles with random access.

A permutation of billions of rows in every trainer would be wasteful, so the shuffle has two levels::

    chunks of 4096 rows     | c0 | c1 | c2 | c3 | c4 | ...
    chunks permuted         | c3 | c0 | c4 | c2 | c1 | ...
    rows permuted           |<- window of 256 ->|<- window

Every row occurs exactly once an epoch, the order depends on (seed, epoch) alone, and only the window that is
read is in memory. Up to 2**20 rows are one window, and are shuffled completely.

A trainer's slice of a step may have any rows of a window, so all trainers read nearly all chunks. With lanes,
the rows of a window are dealt to a number of lanes, and each lane is shuffled::

    chunks permuted         | c3 | c0 | c4 | c2 | ...
    lanes                   |  lane 0 |  lane 1 | ...    the same rows for any number of trainers
    a step                  rows of lane 0, as many of lane 1, ...

A slice of a step is contiguous, so it has rows of some lanes: a trainer reads their chunks, and few others.
"""

from typing import Protocol

import numpy as np
import numpy.typing as npt

CHUNK_ROWS = 4096
WINDOW_CHUNKS = 256

_CHUNK_STREAM = 0
_WINDOW_STREAM = 1
_LANE_STREAM = 2
_GOLDEN = 0.6180339887498949  # its multiples are spread most evenly over 0 .. 1


class Order(Protocol):
    """The rows of the steps of an epoch."""

    def indices(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the rows of a step that begins after ``start`` rows of the epoch and ends after ``stop``."""
        ...

    def chunks_at_once(self, batch_size: int, num_slices: int) -> int:
        """Return the most chunks that the rows of a slice come from, in this window and the next."""
        ...


class FileOrder:
    """The rows in file order."""

    def indices(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """See :class:`Order`."""
        return np.arange(start, stop)

    def chunks_at_once(self, batch_size: int, num_slices: int) -> int:
        """See :class:`Order`; a step is a window."""
        return 2 * (-(-batch_size // num_slices // CHUNK_ROWS) + 1)


class _Windows:
    """Windows of chunks of rows, in an order drawn from (seed, epoch).

    Args:
        chunk_rows, window_chunks: see the module.
    """

    def __init__(
        self,
        num_rows: int,
        seed: int,
        epoch: int,
        *,
        chunk_rows: int = CHUNK_ROWS,
        window_chunks: int = WINDOW_CHUNKS,
    ) -> None:
        self._num_rows = num_rows
        self._key = (seed, epoch)
        self._chunk_rows = chunk_rows
        self._window_chunks = window_chunks
        num_chunks = -(-num_rows // chunk_rows)
        self._chunks = np.random.default_rng((*self._key, _CHUNK_STREAM)).permutation(num_chunks)
        sizes = np.minimum(num_rows - self._chunks * chunk_rows, chunk_rows)
        edges = np.concatenate([[0], np.cumsum(sizes)])
        self._window_starts = np.append(edges[:-1:window_chunks], num_rows)

    def _window_of(self, position: int) -> tuple[int, int, int]:
        """Return the number of the window of a position, its start and its end."""
        window = int(np.searchsorted(self._window_starts, position, side="right")) - 1
        first, last = self._window_starts[window : window + 2].tolist()
        return window, first, last

    def _rows(self, window: int) -> npt.NDArray[np.int64]:
        """Return the rows of a window, chunk after chunk."""
        chunks = self._chunks[window * self._window_chunks : (window + 1) * self._window_chunks]
        rows = (chunks[:, None] * self._chunk_rows + np.arange(self._chunk_rows)).reshape(-1)
        return rows[rows < self._num_rows]


class ShuffledOrder(_Windows):
    """The rows 0 .. ``num_rows`` - 1, shuffled within windows."""

    _held: tuple[int, npt.NDArray[np.int64]] | None = None

    def indices(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """See :class:`Order`."""
        chosen = [np.empty(0, np.int64)]
        while start < stop:
            window, first, last = self._window_of(start)
            end = min(stop, last)
            if self._held is None or self._held[0] != window:
                rows = self._rows(window)
                np.random.default_rng((*self._key, _WINDOW_STREAM, window)).shuffle(rows)
                self._held = (window, rows)
            chosen.append(self._held[1][start - first : end - first])
            start = end
        return np.concatenate(chosen)

    def chunks_at_once(self, batch_size: int, num_slices: int) -> int:
        """See :class:`Order`: a slice may have rows of all chunks of a window."""
        return min(2 * self._window_chunks, len(self._chunks))


class LaneOrder(_Windows):
    """The rows 0 .. ``num_rows`` - 1, shuffled within the lanes of windows; see the module.

    Of the first ``p`` positions of an epoch, lane ``l`` of ``L`` has ``(p + turn[l]) // L``: these add up to
    ``p``, and two lanes differ by at most one. Adjacent lanes have turns far apart, so the rows of several
    lanes are proportional to their number, even in steps of fewer rows than lanes.

    Args:
        num_lanes: fixed for a run, so that its steps are the same for any number of trainers.
        windows: further arguments of :class:`_Windows`.
    """

    def __init__(self, num_lanes: int, num_rows: int, seed: int, epoch: int, **windows: int) -> None:
        super().__init__(num_rows, seed, epoch, **windows)
        self._turns_L = np.argsort(np.argsort(np.arange(num_lanes) * _GOLDEN % 1.0))
        self._held: tuple[int, list[npt.NDArray[np.int64]]] | None = None

    def indices(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """See :class:`Order`: the rows of lane 0, then those of lane 1, and so on."""
        chosen: list[list[npt.NDArray[np.int64]]] = [[np.empty(0, np.int64)] for _ in self._turns_L]
        while start < stop:
            window, first, last = self._window_of(start)
            end = min(stop, last)
            before_L, *cuts_L = (self._given_L(position) for position in (first, start, end))
            starts_L, stops_L = ((cut_L - before_L).tolist() for cut_L in cuts_L)
            if self._held is None or self._held[0] != window:
                lanes = np.split(self._rows(window), (self._given_L(last) - before_L).cumsum()[:-1])
                for lane, rows in enumerate(lanes):
                    np.random.default_rng((*self._key, _LANE_STREAM, window, lane)).shuffle(rows)
                self._held = (window, lanes)
            for lane, rows in enumerate(self._held[1]):
                chosen[lane].append(rows[starts_L[lane] : stops_L[lane]])
            start = end
        return np.concatenate([rows for lane in chosen for rows in lane])

    def chunks_at_once(self, batch_size: int, num_slices: int) -> int:
        """See :class:`Order`: those of a slice's lanes, of one more on either side, and of their edges."""
        num_lanes = len(self._turns_L)
        lanes = min(-(-num_lanes // num_slices) + 2, num_lanes)
        chunks = min(2 * self._window_chunks, len(self._chunks))
        return min(-(-chunks * lanes // num_lanes) + 2, chunks)

    def _given_L(self, position: int) -> npt.NDArray[np.int64]:
        """Return how many of the first ``position`` rows of the epoch each lane has."""
        return (position + self._turns_L) // len(self._turns_L)
