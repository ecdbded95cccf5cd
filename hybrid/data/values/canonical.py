"""The canonical text of a categorical value, independent of the file format and its writer.

pandas writes a column of integers with a missing value as ``5.0``, R writes ``5e+05``, and other programs
write ``TRUE``, ``true`` or ``1``. Values of the same meaning have the same canonical text:

======================================= ================================================================
given                                   its canonical text
======================================= ================================================================
integers of any type                    ``5``
floats of integral value; texts such    the digits of the integer: ``5``, ``5``, ``500000``
as ``5.0``, ``5e+00``, ``5.0E5``
-0, ``-0``, ``-0.0``                    ``0``
other floats                            the shortest text that parses to the same float: ``0.1``, ``1e-07``
true; ``True``, ``true``, ``TRUE``      ``1``
false; ``False``, ``false``, ``FALSE``  ``0``
dates, and times at midnight            ``2024-01-31``
other times, also with a ``T``          ``2024-01-31 09:30:00.5``, without trailing zeros
times in UTC; Parquet: of any zone      ``2024-01-31 00:00:00Z`` in UTC, also at midnight
null, and NaN in a column of floats     none: the value is missing
other texts, and decimals with a        unchanged, but without surrounding blanks
fraction
======================================= ================================================================

Texts that may have another meaning stay as they are:

- Leading zeros, as in postal codes: ``007`` and ``7`` differ.
- Trailing zeros of a fraction, as in versions: ``1.10`` and ``1.1`` differ.
- A leading plus: ``+49``.
- An exponent without a sign, except ``5.0E5``: ``5e0`` may be hexadecimal, like 1 in 70 of Criteo's hashes.
- A time without seconds, or with a zone other than UTC.
- The text ``nan``, unless ``data.missing`` has it.

Floats hold all integers below 2**53 (float32: 2**24). From this bound on, different ids may have the same
float. A float of this size, or a text such as ``1e+16``, is *inexact*, and its row is invalid.
"""

import re
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hybrid.primitives.key_hashes import next_random

_INTEGER = r"-?(?:0|[1-9][0-9]*)"
_POINT = re.compile(rf"({_INTEGER})\.0+")
_EXPONENT = re.compile(r"(-?[1-9])(?:\.([0-9]+)(?:[eE]\+|E)|[eE]\+)([0-9]{1,3})")
_UTC = r" ?(?:Z|\+00(?::?00)?)| UTC| GMT"
_TIME = re.compile(
    rf"([0-9]{{4}}-[0-9]{{2}}-[0-9]{{2}})[ T]([0-9]{{2}}:[0-9]{{2}}:[0-9]{{2}})(\.[0-9]+)?({_UTC})?"
)
_WORDS = {"-0": "0", **dict.fromkeys(("True", "true", "TRUE"), "1")}
_WORDS |= dict.fromkeys(("False", "false", "FALSE"), "0")
# Matches every text that a rule changes. Most columns have no match.
_SUSPECT = f"^({'|'.join([_POINT.pattern, _EXPONENT.pattern, _TIME.pattern, *_WORDS])})$"
_SUSPECT_BYTES = b".+-tTlF"  # every suspect text has one of these bytes; few columns have these bytes
_MAX_EXACT = 2**53
_KEY_INTEGER = "^(0|-?[1-9][0-9]{0,18}|1[0-9]{19})$"
_LOWEST, _HIGHEST = "-9223372036854775808", "18446744073709551615"  # of int64 and uint64, each 20 characters


def canonicalize(values: pa.Array) -> tuple[pa.Array, npt.NDArray[np.bool_]]:
    """Return the canonical texts of an array without lists, null for NaN, and a mask of inexact values."""
    kind = values.type
    inexact_D = np.zeros(len(values), np.bool_)
    if pa.types.is_floating(kind):
        numbers_D = values.to_numpy(zero_copy_only=False)
        inexact_D = np.isfinite(numbers_D) & (np.abs(numbers_D) >= 2 ** (np.finfo(numbers_D.dtype).nmant + 1))
        texts = pa.array(numbers_D.astype(str), mask=np.isnan(numbers_D))
    elif pa.types.is_timestamp(kind) and kind.tz is not None:
        texts = pc.binary_join_element_wise(values.cast(pa.timestamp(kind.unit)).cast(pa.string()), "Z", "")
    else:  # also times without a zone
        texts = trim_blanks(values.cast(pa.string()))
    content = _content(texts).tobytes()
    if not any(byte in content for byte in _SUSPECT_BYTES):
        return texts, inexact_D
    is_suspect = pc.fill_null(pc.match_substring_regex(texts, _SUSPECT), False)
    suspects = np.flatnonzero(is_suspect)
    if not len(suspects):
        return texts, inexact_D
    folded = [canonical_text(text) for text in texts.take(suspects).to_pylist()]
    if not pa.types.is_decimal(kind):
        inexact_D[suspects] |= [is_inexact for _, is_inexact in folded]
    replaced = pa.array([text for text, _ in folded], texts.type)
    return pc.replace_with_mask(texts, is_suspect, replaced), inexact_D


def trim_blanks(texts: pa.Array) -> pa.Array:
    """Remove blanks at the start and end of each text."""
    content = _content(texts)
    if not len(content) or (content.min() > ord(" ") and content.max() < 128):
        return texts
    return pc.utf8_trim_whitespace(texts)


def _content(texts: pa.Array) -> npt.NDArray[np.uint8]:
    """Return the bytes of all texts of an array. For a slice, return the bytes of the whole array."""
    return np.frombuffer(texts.buffers()[2] or b"", np.uint8)


def canonical_text(text: str) -> tuple[str, bool]:
    """Return the canonical text of ``text``, which has no surrounding blanks, and whether it is inexact."""
    integer = _integral_text(text)
    if integer is not None:
        return _WORDS.get(integer, integer), abs(int(integer)) >= _MAX_EXACT
    match = _TIME.fullmatch(text)
    if match is None:
        return _WORDS.get(text, text), False
    date, time, fraction, zone = match.groups("")
    fraction = fraction.rstrip("0").rstrip(".")
    is_date = time == "00:00:00" and not fraction and not zone
    return date if is_date else f"{date} {time}{fraction}{'Z' if zone else ''}", False


def _integral_text(text: str) -> str | None:
    """Return the integer in a text such as ``5.0`` or ``5e+00``. Return None for other texts, also ``5``."""
    point = _POINT.fullmatch(text)
    if point is not None:
        return point[1]
    exponent = _EXPONENT.fullmatch(text)
    if exponent is None:
        return None
    fraction, power = (exponent[2] or "").rstrip("0"), int(exponent[3])
    return exponent[1] + fraction.ljust(power, "0") if len(fraction) <= power else None


def hash_texts(texts: pa.Array) -> npt.NDArray[np.uint64]:
    """Return a 64-bit hash of each text, which is the same on every platform. Null counts as empty text."""
    contents = pc.fill_null(texts, "").cast(pa.large_binary()).to_numpy(zero_copy_only=False)
    digests = b"".join([blake2b(content, digest_size=8).digest() for content in contents])
    return np.frombuffer(digests, "<u8")


def compute_keys(texts: pa.Array) -> npt.NDArray[np.int64]:
    """Return the 64-bit key of each canonical text. A growing table finds the row of an id by the key.

    - The key of an integer in the range of int64 or uint64 is the SplitMix64 hash of its 64 bits. Different
      integers have different keys, but a negative integer n has the key of 2**64 + n.
    - The key of any other text is the result of :func:`hash_texts`.
    - The key of null is 0, which may also be the key of another value.
    """
    integer_D = pc.fill_null(pc.match_substring_regex(texts, _KEY_INTEGER), False)
    negative_D = pc.fill_null(pc.starts_with(texts, "-"), False)
    # Texts of 20 characters and one sign are in the order of their digits.
    is_far_D = pc.greater(texts, pc.if_else(negative_D, _LOWEST, _HIGHEST))
    is_long_D = pc.equal(pc.binary_length(texts), len(_LOWEST))
    integer_D = pc.and_not(integer_D, pc.fill_null(pc.and_(is_long_D, is_far_D), False))
    keys_D = np.zeros(len(texts), np.uint64)
    for of_sign_D, kind in ((negative_D, pa.int64()), (pc.invert(negative_D), pa.uint64())):
        of_kind_D = pc.and_(integer_D, of_sign_D)
        numbers = texts.filter(of_kind_D).cast(kind).to_numpy(zero_copy_only=False)
        keys_D[np.asarray(of_kind_D)] = next_random(numbers.astype(np.uint64))
    other_D = pc.and_not(texts.is_valid(), integer_D)
    keys_D[np.asarray(other_D)] = hash_texts(texts.filter(other_D))
    return keys_D.view(np.int64)
