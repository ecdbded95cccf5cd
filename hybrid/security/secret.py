"""The secret that the roles of a cluster share, keys derived from it, and encryption with these keys.

A process that has the secret is a member of the cluster. ``launch`` generates a secret for each start and
passes it to its children. On several machines, the secret is in a file that only its owner may read, or in
the environment. The secret is never an argument of a command, and never printed. This module does not import
torch.
"""

from __future__ import annotations

import os
import secrets
import stat
from itertools import pairwise
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from hybrid.errors import ConfigError
from hybrid.security.rejections import RejectionError

VARIABLE = "HYBRID_SECRET"
MINIMUM_CHARACTERS = 32
_HINT = "create a good one by: hybrid secret FILE"
_BYTES = 32
# A random secret has at least this many distinct characters, and this many distinct differences of neighbors.
_MIN_DISTINCT = 7
_LARGEST_FILE = 4096
_GROUP_AND_OTHERS = stat.S_IRWXG | stat.S_IRWXO
TAG_BYTES = 16
_NONCE_BYTES = 12
_NOT_NEXT = "it was changed, or is not the next message of the sender"


class Secret:
    """A cluster's secret, from which keys are derived. ``repr`` does not show the value.

    Args:
        value: at least 32 characters that cannot be guessed; else, ConfigError is raised.
        source: the configuration key or variable that errors name.
    """

    __slots__ = ("_value",)

    def __init__(self, value: str, source: str = VARIABLE) -> None:
        if len(value) < MINIMUM_CHARACTERS:
            raise ConfigError(source, f"must hold at least {MINIMUM_CHARACTERS} characters; {_HINT}")
        steps = {ord(b) - ord(a) for a, b in pairwise(value)}
        is_periodic = value in (value + value)[1:-1]
        if is_periodic or min(len(set(value)), len(steps)) < _MIN_DISTINCT:
            raise ConfigError(source, f"can be guessed, since it repeats or counts up; {_HINT}")
        self._value = value.encode()

    @classmethod
    def fresh(cls) -> Secret:
        return cls(secrets.token_hex(_BYTES))

    @classmethod
    def find(cls, file: str) -> Secret | None:
        """Read the secret from ``file``; if that is "", from HYBRID_SECRET. Return None if both are empty.

        Raises:
            ConfigError: the file cannot be read, other users may access it, or the secret is short or weak.
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
        if mode & _GROUP_AND_OTHERS:
            raise ConfigError(key, f"must be accessible to its owner only; run chmod 600 {file}", file)
        return cls(text.decode(errors="replace").strip(), key)

    def write(self, file: Path) -> None:
        """Write the secret to a new file that only its owner may read; ConfigError if that fails."""
        try:
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, stat.S_IRUSR | stat.S_IWUSR)
        except OSError as error:
            raise ConfigError("FILE", f"cannot be created: {error.strerror}", str(file)) from error
        with open(descriptor, "wb") as opened:
            opened.write(self._value + b"\n")

    def key(self, purpose: str, context: bytes = b"", agreed: bytes = b"") -> bytes:
        """Derive a key of 32 bytes.

        Args:
            purpose, context: different values result in independent keys.
            agreed: result of a key exchange. If given, the key cannot be derived from the secret alone.
        """
        # The length separates purpose and context.
        info = len(purpose).to_bytes(2, "big") + purpose.encode() + context
        key = HKDF(algorithm=SHA256(), length=_BYTES, salt=None, info=info).derive(self._value)
        return HKDF(algorithm=SHA256(), length=_BYTES, salt=key, info=info).derive(agreed) if agreed else key

    def __repr__(self) -> str:
        return "Secret(hidden)"


class DirectionCipher:
    """Encryption of one direction of a connection; for one thread at a time.

    One end seals (encrypts and authenticates) messages, the other opens them. AES-256-GCM (NIST SP 800-38D)
    must never use a nonce twice with one key. So the key, of 32 bytes, belongs to one direction of one
    connection, and the nonce is the number of the message, which both ends count. A message is valid once, at
    its position in the sequence.
    """

    def __init__(self, key: bytes) -> None:
        self._aead = AESGCM(key)
        self._count = 0

    def seal(self, plain: bytes | memoryview) -> bytes:
        """Encrypt ``plain``; the result is ``TAG_BYTES`` longer than ``plain``."""
        return self._aead.encrypt(self._next_nonce(), plain, None)

    def seal_into(self, plain: bytes | memoryview, sealed: memoryview) -> None:
        """Encrypt ``plain``, of less than 2 GiB, into ``sealed``, which is ``TAG_BYTES`` longer."""
        self._aead.encrypt_into(self._next_nonce(), plain, None, sealed)

    def open(self, sealed: bytes | memoryview) -> bytes:
        """Decrypt the next message of the other end; RejectionError if ``sealed`` is not that message."""
        try:
            return self._aead.decrypt(self._next_nonce(), sealed, None)
        except InvalidTag:
            raise RejectionError(_NOT_NEXT) from None

    def open_into(self, sealed: memoryview, plain: memoryview) -> None:
        """Decrypt ``sealed`` like :meth:`open`, but into ``plain``, which is ``TAG_BYTES`` shorter."""
        try:
            self._aead.decrypt_into(self._next_nonce(), sealed, None, plain)
        except InvalidTag:
            raise RejectionError(_NOT_NEXT) from None

    def _next_nonce(self) -> bytes:
        nonce = self._count.to_bytes(_NONCE_BYTES, "big")
        self._count += 1
        return nonce
