"""The map from the keys of a growing table to rows: hash tables, and the counts for admission.

A key is already a hash (``hybrid/data/values/canonical.py``), so its bits are not hashed again. The highest
ten bits are its **bucket**; a table has 1,024 buckets. Each bucket has an open-addressing hash table with
linear probing, whose slots hold::

    key, value      value = 0          the slot is empty
                    value = row + 1    the key has a row
                    value < 0          the key is pending: it is counted, and has no row yet. value = ~record

A **record** counts the steps that have read a key: ``count << 32 | step``, where ``step`` is the last such
step. The records of keys with rows are in an array by row. Counts are halved at each multiple of the
half-life. A record is not rewritten then: ``_count`` applies the halvings since the record's step.

If bucket b has 2**c slots, they start at slot ``(1024 + b) << c`` of one reserved address range. So a bucket
can grow to twice its size without moving another bucket. The system provides memory for written pages only.
"""

import math
import mmap
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from hybrid.embedding.kernels import Ints, compiled, prefetch_row
from hybrid.embedding.placement import Shard
from hybrid.embedding.table_spec import Growth
from hybrid.errors import ClusterError
from hybrid.primitives.huge_pages import large_pages
from hybrid.primitives.key_hashes import KEY_BITS, NUM_BUCKETS, bucket_of

_SWEPT_BUCKETS = 16  # per update, so that 64 updates sweep a table

_LOG_SLOTS = 4  # logarithm of the slots of a new bucket
_MAX_LOG_SLOTS = 21  # two billion slots in a table
# Load factors: beyond a mean of the first, buckets grow a few at a time; beyond the second, at once.
_SOFT_LOAD, _HARD_LOAD = 0.6, 0.8
_MAX_COUNT = 2**31 - 1
_ROWS_AHEAD = 32  # prefetch distance: more than for sorted rows, which hardware partly prefetches
_BLOCK = 32  # keys whose slots are prefetched together


@numba.njit(inline="always")
def _bucket(key: int) -> int:
    return np.int64(np.uint64(key) >> np.uint64(KEY_BITS))  # type: ignore[return-value]


@numba.njit(inline="always")
def _count(record: int, step: int, half_life: int) -> int:
    """Return the count of a record at ``step``. In async mode, ``step`` may be before the record's step."""
    return (record >> 32) >> max(0, min(31, step // half_life - (record & 0xFFFFFFFF) // half_life))


@numba.njit(inline="always")
def _find_slot(slots_S2: Ints, logs_N: Ints, key: int) -> int:
    """Return the slot of a key, or the empty slot for a new key."""
    bucket = _bucket(key)
    mask = (np.int64(1) << logs_N[bucket]) - 1
    first = (NUM_BUCKETS + bucket) << logs_N[bucket]
    place = key & mask
    while slots_S2[first + place, 1] != 0 and slots_S2[first + place, 0] != key:
        place = (place + 1) & mask
    return first + place  # type: ignore[no-any-return]


@compiled("void(int64[:,::1], int64[::1], int64[::1], int64[::1])")
def _find_rows(slots_S2: Ints, logs_N: Ints, keys_U: Ints, rows_U: Ints) -> None:
    for start in range(0, len(keys_U), _BLOCK):
        stop = min(start + _BLOCK, len(keys_U))
        for u in range(start, stop):
            bucket = _bucket(keys_U[u])
            mask = (np.int64(1) << logs_N[bucket]) - 1
            prefetch_row(slots_S2, ((NUM_BUCKETS + bucket) << logs_N[bucket]) + (keys_U[u] & mask))  # type: ignore[call-arg]
        for u in range(start, stop):
            rows_U[u] = max(np.int64(0), slots_S2[_find_slot(slots_S2, logs_N, keys_U[u]), 1]) - 1


_COPY = "int64({0}[:,::1], int64[::1], {0}[:,::1])"


@compiled(*map(_COPY.format, ("float32", "float64", "uint16")))
def copy_rows(weight_RD: npt.NDArray[Any], rows_U: Ints, out_UD: npt.NDArray[Any]) -> int:
    """Copy rows of a matrix to ``out_UD``; skip negative row numbers, and return how many were skipped."""
    num_absent = 0
    for u in range(len(rows_U)):
        if u + _ROWS_AHEAD < len(rows_U):
            prefetch_row(weight_RD, max(np.int64(0), rows_U[u + _ROWS_AHEAD]))  # type: ignore[call-arg]
        if rows_U[u] < 0:
            num_absent += 1
            continue
        row = np.uint64(rows_U[u])  # an index that cannot be negative
        for d in range(out_UD.shape[1]):
            out_UD[np.uint64(u), np.uint64(d)] = weight_RD[row, np.uint64(d)]
    return num_absent


@compiled(
    "void(int64[:,::1], int64[::1], int64[::1], int64[:,::1], int64[::1], int64, int64, int64[::1], "
    "int64[::1])"
)
def _count_keys(
    slots_S2: Ints,
    logs_N: Ints,
    sizes_N: Ints,
    records_R2: Ints,
    keys_U: Ints,
    step: int,
    half_life: int,
    rows_U: Ints,
    counts_U: Ints,
) -> None:
    """Count each key once; a new key becomes pending.

    Args:
        rows_U: receives the row of each key, or -1.
        counts_U: receives the counts of pending keys, and 0 for keys with rows.
    """
    for u in range(len(keys_U)):
        slot = _find_slot(slots_S2, logs_N, keys_U[u])
        value = slots_S2[slot, 1]
        record: Any = np.int64(0)
        if value > 0:
            record = records_R2[value - 1, 1]
        elif value < 0:
            record = ~value
        count = min(_count(record, step, half_life) + 1, _MAX_COUNT)
        if value > 0:
            records_R2[value - 1, 1] = count << 32 | step
            rows_U[u] = value - 1
            counts_U[u] = 0
        else:
            sizes_N[_bucket(keys_U[u])] += value == 0
            slots_S2[slot, 0] = keys_U[u]
            slots_S2[slot, 1] = ~(count << 32 | step)
            rows_U[u] = -1
            counts_U[u] = count


@compiled("void(int64[:,::1], int64[::1], int64[::1], int64[:,::1], int64[::1], int64[::1])")
def _give_rows(
    slots_S2: Ints, logs_N: Ints, free_R: Ints, records_R2: Ints, keys_U: Ints, rows_U: Ints
) -> None:
    for u in range(len(keys_U)):
        if free_R[0] > 0:
            row = free_R[1 + free_R[0]]
            free_R[0] -= 1
        else:
            row = free_R[1]
            free_R[1] += 1
        slot = _find_slot(slots_S2, logs_N, keys_U[u])
        records_R2[row, 0] = keys_U[u]
        records_R2[row, 1] = ~slots_S2[slot, 1]
        slots_S2[slot, 1] = row + 1
        rows_U[u] = row


@compiled("int64(int64[:,::1], int64[::1], int64[:,::1], int64, int64, int64, int64, int64[::1], int64[::1])")
def _rank_keys(
    slots_S2: Ints,
    logs_N: Ints,
    records_R2: Ints,
    bucket: int,
    step: int,
    half_life: int,
    evict_after: int,
    keys_M: Ints,
    ranks_M: Ints,
) -> int:
    """Write the removable keys of a bucket and their ranks; return the number of these keys.

    Keys of low rank are removed first. A pending key whose count has fallen to 0 has rank -2. A key with a
    row that no step has read for more than ``evict_after`` steps has rank -1. All other keys with rows rank
    by their count at ``step``, then by the last step that read them. Keys that ``step`` reads are not
    removable, nor are pending keys with a count above 0.
    """
    number = 0
    first = (NUM_BUCKETS + bucket) << logs_N[bucket]
    for slot in range(first, first + (np.int64(1) << logs_N[bucket])):
        value = slots_S2[slot, 1]
        if value == 0:
            continue
        record = records_R2[value - 1, 1] if value > 0 else ~value
        last_step = record & 0xFFFFFFFF
        count = _count(record, step, half_life)
        if last_step == step or (value < 0 and count > 0):
            continue
        rank = count << 32 | last_step
        if value < 0:
            rank = -2
        elif evict_after > 0 and step - last_step > evict_after:
            rank = -1
        keys_M[number] = slots_S2[slot, 0]
        ranks_M[number] = rank
        number += 1
    return number


@compiled("void(int64[:,::1], int64[::1], int64[::1], int64[:,::1], int64[::1])")
def _remove_keys(slots_S2: Ints, logs_N: Ints, free_R: Ints, records_R2: Ints, keys_U: Ints) -> None:
    """Remove keys and free their rows. Later keys of the same probe sequence move into the empty slots."""
    for u in range(len(keys_U)):
        bucket = _bucket(keys_U[u])
        mask = (np.int64(1) << logs_N[bucket]) - 1
        first = (NUM_BUCKETS + bucket) << logs_N[bucket]
        gap = _find_slot(slots_S2, logs_N, keys_U[u]) - first
        row = slots_S2[first + gap, 1] - 1
        if row >= 0:
            free_R[0] += 1
            free_R[1 + free_R[0]] = row
            records_R2[row, 1] = -1
        place = (gap + 1) & mask
        while slots_S2[first + place, 1] != 0:
            home = slots_S2[first + place, 0] & mask
            if ((place - home) & mask) >= ((place - gap) & mask):
                slots_S2[first + gap, 0] = slots_S2[first + place, 0]
                slots_S2[first + gap, 1] = slots_S2[first + place, 1]
                gap = place
            place = (place + 1) & mask
        slots_S2[first + gap, 1] = 0


@compiled("void(int64[:,::1], int64[::1], int64[::1], int64[::1])")
def _insert(slots_S2: Ints, logs_N: Ints, keys_U: Ints, values_U: Ints) -> None:
    for u in range(len(keys_U)):
        slot = _find_slot(slots_S2, logs_N, keys_U[u])
        slots_S2[slot, 0] = keys_U[u]
        slots_S2[slot, 1] = values_U[u]


class KeyMap:
    """The keys of a shard of a growing table, with their rows and use counts. Not thread-safe.

    Args:
        capacity: the largest number of rows that fit into memory.

    Attributes:
        num_rows_N: number of keys with rows in each of the 1,024 buckets.
        end: the first row that has never been used; later rows have not been used either.
    """

    def __init__(self, shard: Shard, growth: Growth, capacity: int) -> None:
        self._buckets = shard.buckets
        self._table = shard.table.name
        self._growth = growth
        self._bucket_limit = growth.max_rows // NUM_BUCKETS  # largest number of rows of a bucket; 0 for any
        self._capacity = capacity
        self._memory = large_pages(16 * (2 * NUM_BUCKETS << _MAX_LOG_SLOTS), is_overcommitted=True)
        self._slots_S2 = np.frombuffer(self._memory, np.int64).reshape(-1, 2)
        self._logs_N = np.full(NUM_BUCKETS, _LOG_SLOTS)
        self._map = self._slots_S2, self._logs_N
        self._sizes_N = np.zeros(NUM_BUCKETS, np.int64)  # number of keys in each bucket, with pending keys
        self._num_added = 0  # upper bound of the keys added by the last update
        self.num_rows_N = np.zeros(NUM_BUCKETS, np.int64)
        self._records_R2 = np.frombuffer(large_pages(16 * capacity, True), np.int64).reshape(-1, 2)
        # The number of free rows, the first row that was never used, and then the free rows.
        self._free_R = np.frombuffer(large_pages(8 * (capacity + 2), True), np.int64)

    @property
    def end(self) -> int:
        return int(self._free_R[1])

    @property
    def sizes(self) -> tuple[int, int]:
        """Numbers of keys with rows, and of pending keys."""
        num_rows = int(self.num_rows_N.sum())
        return num_rows, int(self._sizes_N.sum()) - num_rows

    def keys_of(self, rows_U: Ints) -> npt.NDArray[np.int64]:
        """Return the key of each row; the rows must be in use."""
        return self._records_R2[rows_U, 0]  # type: ignore[no-any-return]

    def find(self, keys_U: Ints) -> npt.NDArray[np.int64]:
        """Return the row of each key; -1 for a key without a row."""
        rows_U = np.empty(len(keys_U), np.int64)
        _find_rows(*self._map, keys_U, rows_U)
        return rows_U

    def count(self, keys_U: Ints, step: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Count each key of an update once; give rows to keys with a count of at least ``admit_after``.

        A bucket has at most ``max_rows`` / 1,024 rows. If too few rows are free, the keys with the highest
        counts get rows first; among equal counts, the lowest keys.

        Args:
            keys_U: distinct keys, ascending as unsigned numbers.

        Returns:
            The row of each key, or -1, and the indices of the keys whose rows are new.

        Raises:
            ClusterError: the rows do not fit into this worker's memory, or a bucket has too many keys.
        """
        half_life, limit = self._growth.half_life, self._bucket_limit
        added_N = np.bincount(bucket_of(keys_U), minlength=NUM_BUCKETS)
        self._reserve(self._sizes_N + added_N, _HARD_LOAD)
        if not limit:
            self._require_memory(self.end - self._free_R[0] + len(keys_U))
        rows_U, counts_U = np.empty(len(keys_U), np.int64), np.empty(len(keys_U), np.int64)
        _count_keys(*self._map, self._sizes_N, self._records_R2, keys_U, step, half_life, rows_U, counts_U)
        self._num_added = int((counts_U == 1).sum())
        new = np.flatnonzero(counts_U >= self._growth.admit_after)
        if limit:
            buckets_A = bucket_of(keys_U[new])
            order = np.lexsort((-counts_U[new], buckets_A))  # stable, so by key among equals
            firsts_A = np.searchsorted(buckets_A, buckets_A)
            new = np.sort(new[order][np.arange(len(new)) - firsts_A < limit - self.num_rows_N[buckets_A]])
        rows_A = np.empty(len(new), np.int64)
        _give_rows(*self._map, self._free_R, self._records_R2, keys_U[new], rows_A)
        rows_U[new] = rows_A
        self.num_rows_N += np.bincount(bucket_of(keys_U[new]), minlength=NUM_BUCKETS)
        return rows_U, new

    def sweep(self, step: int) -> Ints:
        """Remove seldom-read keys of the 16 buckets whose turn it is; return removed keys that had rows.

        Three kinds of keys are removed: pending keys with a count of 0; keys with rows that no step has read
        for over ``evict_after`` steps; keys with the lowest counts, if a bucket is over 7/8 of its limit.
        Among equal counts, keys read earlier are removed first, then lower keys. Keys read at ``step`` stay.
        """
        half_life, evict_after = self._growth.half_life, self._growth.evict_after
        # One row in eight stays free for the keys of the next steps.
        limit = self._bucket_limit - self._bucket_limit // 8
        evicted = [np.empty(0, np.int64)]
        swept = (step * _SWEPT_BUCKETS + np.arange(_SWEPT_BUCKETS)) % NUM_BUCKETS
        for bucket in set(swept.tolist()).intersection(self._buckets):
            keys_M = np.empty(self._sizes_N[bucket], np.int64)
            ranks_M = np.empty_like(keys_M)
            number = _rank_keys(
                *self._map, self._records_R2, bucket, step, half_life, evict_after, keys_M, ranks_M
            )
            keys_M, ranks_M = keys_M[:number], ranks_M[:number]
            num_pending = int((ranks_M == -2).sum())
            excess = int(self.num_rows_N[bucket]) - limit if limit else 0
            num_removed = max(int((ranks_M < 0).sum()), min(number, num_pending + excess))
            if not num_removed:
                continue
            bound = np.partition(ranks_M, num_removed - 1)[num_removed - 1]
            lower, ties = keys_M[ranks_M < bound], keys_M[ranks_M == bound]
            ties = np.sort(ties.view(np.uint64)).view(np.int64)
            removed = np.concatenate([lower, ties[: num_removed - len(lower)]])
            evicted.append(removed[self.find(removed) >= 0])
            _remove_keys(*self._map, self._free_R, self._records_R2, removed)
            self._sizes_N[bucket] -= num_removed
            self.num_rows_N[bucket] -= num_removed - num_pending
        return np.concatenate(evicted)

    def grow(self) -> None:
        """If buckets fill up, double the slots of a few of them, so that not all must grow in one update."""
        own = np.asarray(self._buckets)
        log = int(self._logs_N[own].min())
        smallest = own[self._logs_N[own] == log]
        if self._sizes_N[smallest].sum() > _SOFT_LOAD * (len(smallest) << log):
            number = math.ceil(self._num_added / ((_HARD_LOAD - _SOFT_LOAD) * (1 << log)))
            self._double(smallest[:number])

    def _require_memory(self, num_rows: int) -> None:
        if num_rows > self._capacity:
            raise ClusterError(f"table {self._table}: its rows exceed the memory of a worker; set max_rows")

    def _reserve(self, sizes_N: Ints, load: float) -> None:
        while len(full := np.flatnonzero(sizes_N > load * (1 << self._logs_N))):
            self._double(full)

    def _double(self, buckets: Ints) -> None:
        for bucket in buckets.tolist():
            log = int(self._logs_N[bucket])
            if log == _MAX_LOG_SLOTS:
                rule = f"too many keys for the {1 << log:,} slots of a bucket; set evict_after"
                raise ClusterError(f"table {self._table}: {rule}")
            slots_S2 = self._slots(bucket)
            keys_M, values_M = slots_S2[slots_S2[:, 1] != 0].T
            self._logs_N[bucket] += 1
            _insert(*self._map, np.ascontiguousarray(keys_M), np.ascontiguousarray(values_M))
            if slots_S2.nbytes >= mmap.PAGESIZE:  # no bucket uses this memory again
                first = (NUM_BUCKETS + bucket) << log
                self._memory.madvise(mmap.MADV_DONTNEED, first * 16, slots_S2.nbytes)

    def _slots(self, bucket: int) -> Ints:
        log = int(self._logs_N[bucket])
        first = (NUM_BUCKETS + bucket) << log
        return self._slots_S2[first : first + (1 << log)]

    def state(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the pairs (key, record) of all rows, and of all pending keys. A free row has record -1."""
        has_pending = self._sizes_N > self.num_rows_N
        slots = [self._slots(bucket) for bucket in self._buckets if has_pending[bucket]]
        pending = [slots_S2[slots_S2[:, 1] < 0] for slots_S2 in slots]
        pending_P2 = np.concatenate([np.empty((0, 2), np.int64), *pending])
        pending_P2[:, 1] = ~pending_P2[:, 1]
        return self._records_R2[: self.end].copy(), pending_P2

    def load(self, records_R2: Ints, pending_P2: Ints) -> None:
        """Add new keys with their records. The keys of ``records_R2`` get the rows from ``end`` on."""
        first, stop = self.end, self.end + len(records_R2)
        self._require_memory(stop)
        self.num_rows_N += self._add(records_R2[:, 0], 1 + np.arange(first, stop))
        self._add(pending_P2[:, 0], ~pending_P2[:, 1])
        self._records_R2[first:stop] = records_R2
        self._free_R[1] = stop

    def _add(self, keys_E: Ints, values_E: Ints) -> npt.NDArray[np.int64]:
        sizes_N = np.bincount(bucket_of(keys_E), minlength=NUM_BUCKETS)
        self._reserve(self._sizes_N + sizes_N, _SOFT_LOAD)
        _insert(*self._map, np.ascontiguousarray(keys_E), values_E)
        self._sizes_N += sizes_N
        return sizes_N
