"""Hash functions of 64-bit numbers, and buckets: 1,024 equal ranges of the keys of growing tables."""

import numpy as np
import numpy.typing as npt

NUM_BUCKETS = 1024  # equal ranges of keys; each bucket is on one worker
KEY_BITS = 54  # the bits of a key above these lowest bits are the number of its bucket
_STEP = np.uint64(0x9E3779B97F4A7C15)


def splitmix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the hash of each number; different numbers have different hashes."""
    return next_random(x * _STEP)


def next_random(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the next random number of SplitMix64 (Steele et al. 2014) for each generator state in ``x``."""
    x = x + _STEP
    x ^= x >> np.uint64(30)  # in place, since large new arrays cost more than the arithmetic
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def bucket_of(keys_U: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the number of the bucket of each key. The int64 values hold the bits of unsigned keys."""
    return (keys_U.view(np.uint64) >> np.uint64(KEY_BITS)).view(np.int64)


def buckets_of_shard(index: int, count: int) -> range:
    """Return the buckets of shard ``index`` of a growing table with ``count`` shards."""
    return range_of_shard(index, count, NUM_BUCKETS)


def range_of_shard(index: int, count: int, total: int) -> range:
    """Divide ``range(total)`` into ``count`` ranges of nearly equal size, and return range ``index``."""
    return range(-(-index * total // count), -(-(index + 1) * total // count))
