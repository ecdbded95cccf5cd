"""SplitMix64 (Steele et al. 2014), a random generator, used as a hash of 64-bit numbers."""

import numpy as np
import numpy.typing as npt

_STEP = np.uint64(0x9E3779B97F4A7C15)


def splitmix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the hash of each number; different numbers have different hashes."""
    return next_of(x * _STEP)


def next_of(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the next random number for each generator state in ``x``."""
    x = x + _STEP
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
