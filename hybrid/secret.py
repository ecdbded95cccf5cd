"""The secret that the roles of a cluster share, and the keys that come of it.

Whoever has it belongs to the cluster. It travels to no other host by itself: ``launch`` draws one for each
start and hands it to its own children; on several machines it is in a file that only its owner may read, or
in the environment. It is never an argument of a command, and never printed. Free of torch.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from hybrid.errors import ConfigError

VARIABLE = "HYBRID_SECRET"
MINIMUM_CHARACTERS = 32
_BYTES = 32
_LARGEST_FILE = 4096
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


class Secret:
    """A cluster's secret. Shows nothing of itself in text, and tells keys only.

    Args:
        value: at least 32 characters that nobody can guess.

    Raises:
        ConfigError: it is shorter.
    """

    __slots__ = ("_value",)

    def __init__(self, value: str, source: str = VARIABLE) -> None:
        if len(value) < MINIMUM_CHARACTERS:
            rule = f"must hold at least {MINIMUM_CHARACTERS} characters; hybrid secret FILE makes a good one"
            raise ConfigError(source, rule)
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

    def key(self, purpose: str, context: bytes = b"") -> bytes:
        """A key of 32 bytes for one purpose and one context; other ones tell nothing of it."""
        # A length in front, so that no purpose and context look like another pair.
        info = len(purpose).to_bytes(2, "big") + purpose.encode() + context
        return HKDF(algorithm=SHA256(), length=_BYTES, salt=None, info=info).derive(self._value)

    def __repr__(self) -> str:
        return "Secret(hidden)"


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
