"""The keys of a growing table in one process, in dictionaries.

This module shares no code with ``key_maps.py``. ``growing_group.py`` describes when keys get and lose rows.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence

from hybrid.embedding.table_spec import Growth

_BUCKETS = 1024
_SWEPT_BUCKETS = 16
_MAX_COUNT = 2**31 - 1


class ReferenceKeys:
    """The keys of one table, as numbers from 0 to 2**64 - 1.

    Attributes:
        row_of: row number of each key that has a row. New rows get the next numbers; numbers are not reused.
        seen: for each known key, the number of steps that have read it (halved in each half-life of
            :class:`Growth`), and the last of these steps.
        steps_before: number of steps of earlier runs, whose reads are in ``seen``.
    """

    def __init__(self, growth: Growth) -> None:
        self.row_of: dict[int, int] = {}
        self.seen: dict[int, tuple[int, int]] = {}
        self._growth = growth
        self._limit = growth.max_rows // _BUCKETS
        self.steps_before = 0
        self._next_row = 0

    def load(
        self, keys: Sequence[int], counts: Sequence[int], last_steps: Sequence[int], *, has_rows: bool
    ) -> None:
        """Add the keys of a checkpoint; with ``has_rows``, they get the next row numbers, in their order."""
        self.seen |= dict(zip(keys, zip(counts, last_steps, strict=True), strict=True))
        if has_rows:
            self.row_of |= {key: row for row, key in enumerate(keys, self._next_row)}
            self._next_row += len(keys)

    def count(self, keys: Sequence[int], step: int) -> list[int]:
        """Count one read of each of the distinct ``keys`` in ``step``; return the keys that get a row."""
        step += self.steps_before
        for key in keys:
            self.seen[key] = min(self._count(key, step) + 1, _MAX_COUNT), step
        candidates = defaultdict(list)
        for key in keys:
            if key not in self.row_of and self.seen[key][0] >= self._growth.admit_after:
                candidates[_bucket(key)].append((-self.seen[key][0], key))
        admitted = []
        num_rows = Counter(map(_bucket, self.row_of)) if candidates and self._limit else Counter()
        for bucket, of_bucket in candidates.items():
            chosen = sorted(of_bucket)
            if self._limit:
                chosen = chosen[: max(0, self._limit - num_rows[bucket])]
            admitted += [key for _, key in chosen]
        for key in admitted:
            self.row_of[key] = self._next_row
            self._next_row += 1
        return admitted

    def sweep(self, step: int) -> None:
        """Remove keys that were not read for long, and rows above the limit; each step sweeps 16 buckets."""
        growth, step = self._growth, step + self.steps_before
        if not (self._limit or growth.evict_after or growth.admit_after > 1):
            return
        first = step * _SWEPT_BUCKETS % _BUCKETS
        swept = [key for key in self.seen if first <= _bucket(key) < first + _SWEPT_BUCKETS]
        for key in swept:
            if key not in self.row_of and not self._count(key, step):
                del self.seen[key]
        for bucket in range(first, first + _SWEPT_BUCKETS):
            rows = [key for key in swept if _bucket(key) == bucket and key in self.row_of]
            unread = [key for key in rows if self.seen[key][1] != step]
            old = {key for key in unread if 0 < growth.evict_after < step - self.seen[key][1]}
            order = sorted(
                unread, key=lambda key: (key not in old, self._count(key, step), self.seen[key][1], key)
            )
            # The order among old keys does not matter, because all of them are removed.
            excess = len(rows) - (self._limit - self._limit // 8) if self._limit else 0
            for key in order[: max(len(old), excess)]:
                del self.row_of[key], self.seen[key]

    def _count(self, key: int, step: int) -> int:
        """Return a key's count, halved at each multiple of the half-life from its last read to ``step``."""
        count, last = self.seen.get(key, (0, step))
        half_life = self._growth.half_life
        return count >> (step // half_life - last // half_life)


def _bucket(key: int) -> int:
    return key >> 54
