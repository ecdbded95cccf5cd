"""The buckets of a growing table: 1,024 equal ranges of 64-bit keys. Each bucket is on one worker."""

import numpy as np
import numpy.typing as npt

NUM_BUCKETS = 1024
KEY_BITS = 54  # the bits of a key above these lowest bits are the number of its bucket


def bucket_of(keys_U: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the bucket of each key, which is an unsigned number in an int64."""
    return (keys_U.view(np.uint64) >> np.uint64(KEY_BITS)).view(np.int64)


def buckets_of_shard(index: int, count: int) -> range:
    """Return the buckets of shard ``index`` of ``count``."""
    return range_of_shard(index, count, NUM_BUCKETS)


def range_of_shard(index: int, count: int, total: int) -> range:
    """Return the range ``index`` of the ``count`` ranges that divide ``range(total)``."""
    return range(-(-index * total // count), -(-(index + 1) * total // count))
