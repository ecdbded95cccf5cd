"""Columns of growing tables: the keys of values."""

import hashlib
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from hybrid.data.values.canonical import canonicalize, compute_keys

M = 2**64


def mixed(number: int) -> int:
    """Return the SplitMix64 hash of a number, in Python's integers."""
    x = (number + 0x9E3779B97F4A7C15) % M
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % M
    x = (x ^ x >> 27) * 0x94D049BB133111EB % M
    return x ^ x >> 31


def digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


EDGES = [edge + d for edge in (0, 2**31, 2**53, 2**63, M, -(2**63)) for d in (-2, -1, 0, 1, 2)]
INTEGERS = [n for n in [*EDGES, 10**18, 10**19, -(10**18)] if -(2**63) <= n < M]
TEXTS = ["", "u1", "Zürich", "007", "+7", "1.5", "5e0", "12\x1f34", "٣", "-", "1\n"]
FAR = [n for n in [*EDGES, 10**20, -(10**19), -(10**20), 2 * 10**19] if n not in INTEGERS]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_keys_are_hashes_of_bits_or_of_texts(kind: Any) -> None:
    expected = {str(n): mixed(n % M) for n in INTEGERS} | {t: digest(t) for t in [*TEXTS, *map(str, FAR)]}
    keys = compute_keys(pa.array([*expected, None], kind))
    assert keys.dtype == np.int64
    assert keys.view(np.uint64).tolist() == [*expected.values(), 0]
    assert len(compute_keys(pa.array([], kind))) == 0


def test_fixed_keys_never_change() -> None:
    """The key of 0 is the first number of the published generator of seed 0."""
    keys = compute_keys(pa.array(["0", "1", "-1", str(2**63), "u1"])).view(np.uint64).tolist()
    assert keys == [
        0xE220A8397B1DCDAF,
        0x910A2DEC89025CC1,
        0xE4D971771B652C20,
        0x481EC0A212A9F3DB,
        0xD56A4E3F684D9992,
    ]


@pytest.mark.parametrize(
    "column",
    [
        pa.array([5, -7, 0]),
        pa.array([5.0, -7.0, -0.0]),
        pa.array(["5", "-7", "0"]),
        pa.array([" 5", "-7.0", "-0"]),
        pa.array(["5.0", "-7e+00", "-0.0"]),
        pa.array([5, -7, 0], pa.int8()),
    ],
)
def test_equal_numbers_have_one_key(column: Any) -> None:
    texts, _ = canonicalize(column)
    assert compute_keys(texts).view(np.uint64).tolist() == [mixed(5), mixed(-7 % M), mixed(0)]
