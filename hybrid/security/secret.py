"""The secret that the roles of a cluster share, and the keys that come of it.

Whoever has it belongs to the cluster. It travels to no other host by itself: ``launch`` draws one for each
start and hands it to its own children; on several machines it is in a file that only its owner may read, or
in the environment. It is never an argument of a command, and never printed. Free of torch.
"""

from __future__ import annotations

import math
import os
import secrets
import stat
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from hybrid.errors import ConfigError

VARIABLE = "HYBRID_SECRET"
MINIMUM_CHARACTERS = 32
_MINIMUM_BITS = 48
_MAKE_ONE = "hybrid secret FILE makes a good one"
_BYTES = 32
_LOOKED_AT = 256  # characters of a secret; more need not be random
_LARGEST_FILE = 4096
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


class Secret:
    """A cluster's secret. Shows nothing of itself in text, and tells keys only.

    Args:
        value: at least 32 characters that nobody can guess.

    Raises:
        ConfigError: it is shorter, or follows a pattern.
    """

    __slots__ = ("_value",)

    def __init__(self, value: str, source: str = VARIABLE) -> None:
        if len(value) < MINIMUM_CHARACTERS:
            raise ConfigError(source, f"must hold at least {MINIMUM_CHARACTERS} characters; {_MAKE_ONE}")
        if _random_bits(value) < _MINIMUM_BITS:
            raise ConfigError(source, f"can be guessed: it repeats itself, or counts up; {_MAKE_ONE}")
        self._value = value.encode()

    @classmethod
    def fresh(cls) -> Secret:
        """A new one that nobody knows."""
        return cls(secrets.token_hex(_BYTES))

    @classmethod
    def find(cls, file: str) -> Secret | None:
        """The secret in ``file``, or in the environment where ``file`` is empty; None where there is none.

        Raises:
            ConfigError: the file cannot be read, others may read it too, or what it holds is too short.
        """
        if file:
            return cls(_read(Path(file)), "cluster.secret_file")
        value = os.environ.get(VARIABLE, "").strip()
        return cls(value) if value else None

    def write(self, file: Path) -> None:
        """Write it to a new file that only its owner may read."""
        try:
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, stat.S_IRUSR | stat.S_IWUSR)
        except OSError as error:
            raise ConfigError("FILE", f"cannot be made: {error.strerror}", str(file)) from error
        with open(descriptor, "wb") as opened:
            opened.write(self._value + b"\n")

    def key(self, purpose: str, context: bytes = b"", agreed: bytes = b"") -> bytes:
        """A key of 32 bytes for one purpose and one context; other ones tell nothing of it.

        Args:
            agreed: what two sides have agreed on besides; without it, the secret does not tell the key.
        """
        # A length in front, so that no purpose and context look like another pair.
        info = len(purpose).to_bytes(2, "big") + purpose.encode() + context
        key = HKDF(algorithm=SHA256(), length=_BYTES, salt=None, info=info).derive(self._value)
        return HKDF(algorithm=SHA256(), length=_BYTES, salt=key, info=info).derive(agreed) if agreed else key

    def __repr__(self) -> str:
        return "Secret(hidden)"


def _random_bits(value: str) -> float:
    """About how many random bits made a text, at most: what repeats or counts was not drawn.

    In 32 random hexadecimal digits, the fewest that are taken, it finds 110, and hardly ever below 80.
    """
    codes = [ord(character) for character in value]
    return min(_bits_of_news(codes), _bits_of_news([b - a for a, b in pairwise(codes)]))


def _bits_of_news(numbers: Sequence[int]) -> float:
    """Bits of a sequence cut into the longest pieces that have come before (Lempel and Ziv, 1976)."""
    smallest = min(numbers, default=0)
    text = "".join(chr(number - smallest) for number in numbers[:_LOOKED_AT])
    pieces = at = 0
    while at < len(text):
        length = 1
        while at + length < len(text) and text[at : at + length + 1] in text[: at + length]:
            length += 1
        pieces, at = pieces + 1, at + length
    return pieces * math.log2(max(1, len(set(text))))


def _read(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            text = opened.read(_LARGEST_FILE)
    except OSError as error:
        raise ConfigError("cluster.secret_file", f"cannot be read: {error.strerror}", str(file)) from error
    if mode & _OTHERS:
        rule = f"must be its owner's alone, as chmod 600 {file} makes it"
        raise ConfigError("cluster.secret_file", rule, str(file))
    return text.decode(errors="replace").strip()
