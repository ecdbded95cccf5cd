"""Lists of distinct texts, such as the known values of a categorical column, with a search by hash.

In memory, a text takes its bytes and 20 more: 8 for the offset of the text, and 12 for its 64-bit hash and
its index. If hashes are equal, texts are compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hybrid.primitives.key_hashes import splitmix64

HASHED_AT_ONCE = 1 << 16
_FACTORS = splitmix64(np.arange(4096, dtype=np.uint64)) | np.uint64(1)


class Vocabulary:
    """A list of distinct texts, without null. The index of a text is its position in the list."""

    def __init__(self, texts: pa.Array) -> None:
        self.texts = texts if texts.type == pa.large_string() else texts.cast(pa.large_string())

    @classmethod
    def of(cls, texts: Iterable[str]) -> Vocabulary:
        return cls(pa.array([*texts], pa.large_string()))

    def __len__(self) -> int:
        return len(self.texts)

    def __iter__(self) -> Iterator[str]:
        return iter(self.texts.to_pylist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and bool(self.texts.equals(other.texts))

    def indices(self, texts: pa.Array) -> npt.NDArray[np.int64]:
        """Return the index of each text, or -1 for null or an unknown text."""
        texts = texts.cast(pa.large_string())
        index_N = np.full(len(texts), -1)
        if not len(self):
            return index_N
        hashes_V, index_V = self._by_hash
        hashes_N = _hash(texts)
        candidate_N = np.searchsorted(hashes_V, hashes_N)
        open_N = np.array(texts.is_valid())
        while True:
            open_N &= candidate_N < len(self)
            rows = np.flatnonzero(open_N)
            if not len(rows):
                return index_N
            same = hashes_V[candidate_N[rows]] == hashes_N[rows]
            open_N[rows[~same]] = False
            rows = rows[same]
            candidates = index_V[candidate_N[rows]]
            equal = np.asarray(pc.equal(texts.take(pa.array(rows)), self.texts.take(pa.array(candidates))))
            index_N[rows[equal]] = candidates[equal]
            open_N[rows[equal]] = False
            candidate_N += 1  # another text may have the same hash

    @cached_property
    def _by_hash(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int32]]:
        """The hashes of all texts in ascending order, and the index of the text of each hash."""
        hashes = _hash(self.texts)
        order = np.argsort(hashes, kind="stable")
        return hashes[order], order.astype(np.int32)


def _hash(texts: pa.LargeStringArray) -> npt.NDArray[np.uint64]:
    """Return a 64-bit hash of each text."""
    hashes = [np.empty(0, np.uint64)]
    for start in range(0, len(texts), HASHED_AT_ONCE):
        block = texts.slice(start, HASHED_AT_ONCE)
        data = block.buffers()[2]
        offsets = np.frombuffer(block.buffers()[1], np.int64)
        bounds = offsets[block.offset : block.offset + len(block) + 1]
        content = np.frombuffer(data or b"", np.uint8)[bounds[0] : bounds[-1]]
        position = np.arange(len(content)) - np.repeat(bounds[:-1] - bounds[0], np.diff(bounds))
        terms = (content.astype(np.uint64) + np.uint64(1)) * _FACTORS[position % len(_FACTORS)]
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(terms, dtype=np.uint64)])
        hashes.append(splitmix64(np.diff(sums[bounds - bounds[0]])))
    return np.concatenate(hashes)
