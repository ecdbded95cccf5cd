"""The secret that the roles of a cluster share, and the keys that are derived from it.

Whoever has the secret is a member of the cluster. ``launch`` generates one for each start and passes it to
its children. On several machines it is in a file that only its owner may read, or in the environment. It is
never an argument of a command, and never printed. Free of torch.
"""

from __future__ import annotations

import os
import secrets
import stat
from itertools import pairwise
from pathlib import Path

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from hybrid.errors import ConfigError

VARIABLE = "HYBRID_SECRET"
MINIMUM_CHARACTERS = 32
_MAKE_ONE = "hybrid secret FILE makes a good one"
_BYTES = 32
# Characters, and steps between neighbors, of which random digits have more.
_FEWEST_DIFFERENT = 7
_LARGEST_FILE = 4096
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


class Secret:
    """A cluster's secret. It gives keys, and never appears in text.

    Args:
        value: at least 32 characters that nobody can guess.
        source: key or variable that an error names.

    Raises:
        ConfigError: it is shorter, or follows a pattern.
    """

    __slots__ = ("_value",)

    def __init__(self, value: str, source: str = VARIABLE) -> None:
        if len(value) < MINIMUM_CHARACTERS:
            raise ConfigError(source, f"must hold at least {MINIMUM_CHARACTERS} characters; {_MAKE_ONE}")
        steps = {ord(b) - ord(a) for a, b in pairwise(value)}
        is_periodic = value in (value + value)[1:-1]
        if is_periodic or min(len(set(value)), len(steps)) < _FEWEST_DIFFERENT:
            raise ConfigError(source, f"can be guessed: it repeats itself, or counts up; {_MAKE_ONE}")
        self._value = value.encode()

    @classmethod
    def fresh(cls) -> Secret:
        """Generate a new secret."""
        return cls(secrets.token_hex(_BYTES))

    @classmethod
    def find(cls, file: str) -> Secret | None:
        """Read the secret from ``file``, or from the environment if ``file`` is empty; None if there is none.

        Raises:
            ConfigError: the file cannot be read, others may read it too, or the secret is bad.
        """
        if not file:
            value = os.environ.get(VARIABLE, "").strip()
            return cls(value) if value else None
        key = "cluster.secret_file"
        try:
            with open(file, "rb") as opened:
                mode = os.fstat(opened.fileno()).st_mode
                text = opened.read(_LARGEST_FILE)
        except OSError as error:
            raise ConfigError(key, f"cannot be read: {error.strerror}", file) from error
        if mode & _OTHERS:
            raise ConfigError(key, f"must be its owner's alone, as chmod 600 {file} makes it", file)
        return cls(text.decode(errors="replace").strip(), key)

    def write(self, file: Path) -> None:
        """Write the secret to a new file that only its owner may read."""
        try:
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, stat.S_IRUSR | stat.S_IWUSR)
        except OSError as error:
            raise ConfigError("FILE", f"cannot be made: {error.strerror}", str(file)) from error
        with open(descriptor, "wb") as opened:
            opened.write(self._value + b"\n")

    def key(self, purpose: str, context: bytes = b"", agreed: bytes = b"") -> bytes:
        """Derive a key of 32 bytes for one purpose and one context.

        Args:
            agreed: result of a key exchange; without it, the secret alone does not give the key.
        """
        # The length keeps purpose and context apart.
        info = len(purpose).to_bytes(2, "big") + purpose.encode() + context
        key = HKDF(algorithm=SHA256(), length=_BYTES, salt=None, info=info).derive(self._value)
        return HKDF(algorithm=SHA256(), length=_BYTES, salt=key, info=info).derive(agreed) if agreed else key

    def __repr__(self) -> str:
        return "Secret(hidden)"
