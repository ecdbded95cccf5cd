"""The order of samples in an epoch: an exact shuffle with random access.

A permutation of billions of rows held by every trainer would be wasteful, so the shuffle has two levels::

    chunks of 4096 rows     | c0 | c1 | c2 | c3 | c4 | ...
    chunks permuted         | c3 | c0 | c4 | c2 | c1 | ...
    rows permuted           |<- window of 256 ->|<- window

Every row comes exactly once an epoch, the order depends on (seed, epoch) alone, and only the window that is
being read is held. Up to 2**20 rows are one window, and so are shuffled fully.
"""

import numpy as np
import numpy.typing as npt

CHUNK_ROWS = 4096
WINDOW_CHUNKS = 256

_CHUNK_STREAM = 0
_WINDOW_STREAM = 1


class ShuffledOrder:
    """The rows 0 .. ``num_rows`` - 1 in an order drawn from (seed, epoch).

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
        self._held: tuple[int, npt.NDArray[np.int64]] | None = None

    def indices(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """The rows at positions ``start`` .. ``stop`` - 1."""
        parts = [np.empty(0, np.int64)]
        while start < stop:
            window = int(np.searchsorted(self._window_starts, start, side="right")) - 1
            first, last = self._window_starts[window : window + 2].tolist()
            end = min(stop, last)
            parts.append(self._window(window)[start - first : end - first])
            start = end
        return np.concatenate(parts)

    def _window(self, window: int) -> npt.NDArray[np.int64]:
        if self._held is None or self._held[0] != window:
            chunks = self._chunks[window * self._window_chunks : (window + 1) * self._window_chunks]
            rows = (chunks[:, None] * self._chunk_rows + np.arange(self._chunk_rows)).reshape(-1)
            rows = rows[rows < self._num_rows]
            np.random.default_rng((*self._key, _WINDOW_STREAM, window)).shuffle(rows)
            self._held = (window, rows)
        return self._held[1]
