"""The known values of a categorical column: texts in one array, and which place each has.

A value takes its bytes and 20 more: 8 where it begins, and 12 to find it by a hash of 64 bits; what is found
is compared byte by byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hybrid.primitives.splitmix64 import splitmix64

_HASHED_AT_ONCE = 1 << 20
_FACTORS = splitmix64(np.arange(4096, dtype=np.uint64)) | np.uint64(1)


class Vocabulary(Sequence[str]):
    """Distinct texts, each at its place.

    Args:
        texts: a pyarrow array of them, none null.
    """

    def __init__(self, texts: Any) -> None:
        self.texts = texts if texts.type == pa.large_string() else texts.cast(pa.large_string())

    @classmethod
    def of(cls, texts: Iterable[str]) -> Vocabulary:
        """Of Python's strings."""
        return cls(pa.array([*texts], pa.large_string()))

    def __len__(self) -> int:
        return len(self.texts)

    @overload
    def __getitem__(self, place: int) -> str: ...

    @overload
    def __getitem__(self, place: slice) -> Vocabulary: ...

    def __getitem__(self, place: int | slice) -> str | Vocabulary:
        found = self.texts[place]
        return Vocabulary(found) if isinstance(place, slice) else str(found.as_py())

    def __iter__(self) -> Iterator[str]:
        return iter(self.texts.to_pylist())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Vocabulary):
            return bool(self.texts.equals(other.texts))
        return isinstance(other, Sequence) and self.texts.to_pylist() == [*other]

    def __hash__(self) -> int:
        return hash(len(self))

    def __repr__(self) -> str:
        return f"Vocabulary({len(self)} values)"

    def places(self, texts: Any) -> npt.NDArray[np.int64]:
        """The place of each of an array of texts; -1 where it is unknown, or null."""
        texts = texts.cast(pa.large_string())
        places_N = np.full(len(texts), -1)
        if not len(self):
            return places_N
        hashes_V, place_V = self._by_hash
        hashes_N = _hashes(texts)
        at_N = np.searchsorted(hashes_V, hashes_N)
        open_N = np.asarray(texts.is_valid())
        while (open_N := open_N & (at_N < len(self))).any():
            rows = np.flatnonzero(open_N)
            same = hashes_V[at_N[rows]] == hashes_N[rows]
            open_N[rows[~same]] = False
            rows = rows[same]
            found = place_V[at_N[rows]]
            equal = np.asarray(pc.equal(texts.take(pa.array(rows)), self.texts.take(pa.array(found))))
            places_N[rows[equal]] = found[equal]
            open_N[rows[equal]] = False
            at_N += 1  # another text may have the same hash
        return places_N

    @cached_property
    def _by_hash(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int32]]:
        """The hashes of all texts, rising, and the place of each."""
        hashes = _hashes(self.texts)
        order = np.argsort(hashes, kind="stable")
        return hashes[order], order.astype(np.int32)


def text_bounds(texts: Any) -> npt.NDArray[np.int64]:
    """Where each of N large strings begins among their bytes, and where the last ends: (N + 1,)."""
    offsets = texts.buffers()[1]
    if not len(texts):
        return np.zeros(1, np.int64)
    return np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]


def _hashes(texts: Any) -> npt.NDArray[np.uint64]:
    """64 bits of each text: its bytes times factors that depend on their places, summed up and mixed."""
    parts = [_hashes_of(texts.slice(i, _HASHED_AT_ONCE)) for i in range(0, len(texts), _HASHED_AT_ONCE)]
    return np.concatenate(parts) if parts else np.empty(0, np.uint64)


def _hashes_of(texts: Any) -> npt.NDArray[np.uint64]:
    data = texts.buffers()[2]
    bounds = text_bounds(texts)
    lengths = np.diff(bounds)
    content = np.frombuffer(data or b"", np.uint8)[bounds[0] : bounds[-1]]
    place = np.arange(len(content)) - np.repeat(bounds[:-1] - bounds[0], lengths)
    terms = (content.astype(np.uint64) + np.uint64(1)) * _FACTORS[place % len(_FACTORS)]
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(terms, dtype=np.uint64)])[bounds - bounds[0]]
    return splitmix64(np.diff(sums))


NO_VALUES = Vocabulary.of(())
