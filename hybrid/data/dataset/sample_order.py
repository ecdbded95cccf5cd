"""The orders of samples in an epoch: exact shuffles with random access.

A permutation of billions of rows held by every trainer would be wasteful, so the shuffle has two levels::

    chunks of 4096 rows     | c0 | c1 | c2 | c3 | c4 | ...
    chunks permuted         | c3 | c0 | c4 | c2 | c1 | ...
    rows permuted           |<- window of 256 ->|<- window

Every row comes exactly once an epoch, the order depends on (seed, epoch) alone, and only the window that is
being read is held. Up to 2**20 rows are one window, and so are shuffled fully.

A trainer's share of a step is any rows of a window, so that all trainers read nearly all chunks. By lanes,
the rows of a window are dealt to so many lanes, and each lane shuffles its own::

    chunks permuted         | c3 | c0 | c4 | c2 | ...
    lanes                   |  lane 0 |  lane 1 | ...    the same rows for any number of trainers
    a step                  rows of lane 0, as many of lane 1, ...

A share of a step is contiguous, so it is of some lanes: a trainer reads their chunks, and hardly any others.
"""

from typing import Protocol

import numpy as np
import numpy.typing as npt

CHUNK_ROWS = 4096
WINDOW_CHUNKS = 256

_CHUNK_STREAM = 0
_WINDOW_STREAM = 1
_LANE_STREAM = 2
_GOLDEN = 0.6180339887498949  # its multiples are spread over 0 .. 1 more evenly than any others


class Order(Protocol):
    """Which rows the steps of an epoch have."""

    def indices(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """The rows of a step that begins after ``start`` rows of the epoch and ends after ``stop``."""
        ...

    def chunks_at_once(self, batch_size: int, num_shares: int) -> int:
        """How many chunks a share's rows come from at most, of this window and the next."""
        ...


class FileOrder:
    """The rows as they lie in the file."""

    def indices(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """See :class:`Order`."""
        return np.arange(start, stop)

    def chunks_at_once(self, batch_size: int, num_shares: int) -> int:
        """See :class:`Order`; a step is all the window that there is."""
        return 2 * (-(-batch_size // num_shares // CHUNK_ROWS) + 1)


class _Windows:
    """Chunks of rows in an order drawn from (seed, epoch), and the windows of them.

    Args:
        chunk_rows, window_chunks: see the module; smaller ones shuffle less and hold less.
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
        """The number of the window of a position, and where it begins and ends."""
        window = int(np.searchsorted(self._window_starts, position, side="right")) - 1
        first, last = self._window_starts[window : window + 2].tolist()
        return window, first, last

    def _rows(self, window: int) -> npt.NDArray[np.int64]:
        """The rows of a window, chunk after chunk."""
        chunks = self._chunks[window * self._window_chunks : (window + 1) * self._window_chunks]
        rows = (chunks[:, None] * self._chunk_rows + np.arange(self._chunk_rows)).reshape(-1)
        return rows[rows < self._num_rows]


class ShuffledOrder(_Windows):
    """The rows 0 .. ``num_rows`` - 1, shuffled within windows; takes what :class:`_Windows` does."""

    _held: tuple[int, npt.NDArray[np.int64]] | None = None

    def indices(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """The rows at positions ``start`` .. ``stop`` - 1."""
        parts = [np.empty(0, np.int64)]
        while start < stop:
            window, first, last = self._window_of(start)
            end = min(stop, last)
            parts.append(self._shuffled(window)[start - first : end - first])
            start = end
        return np.concatenate(parts)

    def chunks_at_once(self, batch_size: int, num_shares: int) -> int:
        """See :class:`Order`: any share may have rows of all chunks of a window."""
        return min(2 * self._window_chunks, len(self._chunks))

    def _shuffled(self, window: int) -> npt.NDArray[np.int64]:
        if self._held is None or self._held[0] != window:
            rows = self._rows(window)
            np.random.default_rng((*self._key, _WINDOW_STREAM, window)).shuffle(rows)
            self._held = (window, rows)
        return self._held[1]


class LaneOrder(_Windows):
    """The rows 0 .. ``num_rows`` - 1, shuffled within the lanes of windows; see the module.

    Of the first ``p`` positions of an epoch, lane ``l`` of ``L`` has ``(p + turn[l]) // L``: these add up to
    ``p``, and no two lanes differ by more than one. Lanes next to each other have turns far apart, so that
    what several of them have is proportional to their number, even in steps of fewer rows than lanes.

    Args:
        num_lanes: fixed for a run, so that its steps are the same for any number of trainers.
        windows: what :class:`_Windows` takes besides.
    """

    def __init__(self, num_lanes: int, num_rows: int, seed: int, epoch: int, **windows: int) -> None:
        super().__init__(num_rows, seed, epoch, **windows)
        self._turns_L = np.argsort(np.argsort(np.arange(num_lanes) * _GOLDEN % 1.0))
        self._held: tuple[int, list[npt.NDArray[np.int64]]] | None = None

    def indices(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """See :class:`Order`: the rows of lane 0, then those of lane 1, and so on.

        Where an epoch is cut into other steps, each lane has its rows in the same order.
        """
        parts: list[list[npt.NDArray[np.int64]]] = [[np.empty(0, np.int64)] for _ in self._turns_L]
        while start < stop:
            window, first, last = self._window_of(start)
            end = min(stop, last)
            before_L, *cuts_L = (self._given_L(position) for position in (first, start, end))
            starts_L, stops_L = ((cut_L - before_L).tolist() for cut_L in cuts_L)
            for lane, rows in enumerate(self._lanes(window, first, last)):
                parts[lane].append(rows[starts_L[lane] : stops_L[lane]])
            start = end
        return np.concatenate([rows for lane in parts for rows in lane])

    def chunks_at_once(self, batch_size: int, num_shares: int) -> int:
        """See :class:`Order`: those of a share's lanes, of one more on either side, and of their edges."""
        num_lanes = len(self._turns_L)
        lanes = min(-(-num_lanes // num_shares) + 2, num_lanes)
        chunks = min(2 * self._window_chunks, len(self._chunks))
        return min(-(-chunks * lanes // num_lanes) + 2, chunks)

    def _given_L(self, position: int) -> npt.NDArray[np.int64]:
        """How many of the first ``position`` rows of the epoch each lane has."""
        return (position + self._turns_L) // len(self._turns_L)

    def _lanes(self, window: int, first: int, last: int) -> list[npt.NDArray[np.int64]]:
        """The rows of a window, lane by lane, each in its shuffled order."""
        if self._held is None or self._held[0] != window:
            sizes_L = self._given_L(last) - self._given_L(first)
            lanes = np.split(self._rows(window), sizes_L.cumsum()[:-1])
            for lane, rows in enumerate(lanes):
                np.random.default_rng((*self._key, _LANE_STREAM, window, lane)).shuffle(rows)
            self._held = (window, lanes)
        return self._held[1]
