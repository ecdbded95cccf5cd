"""One direction of an encrypted connection. Free of torch.

AES-256-GCM (NIST SP 800-38D) must never use a nonce twice with one key. The key belongs to this direction of
this connection, and a nonce is the number of the message, which both ends count. So a message is valid once,
at its place in the order, in its direction.
"""

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from hybrid.security.rejected_messages import RejectedMessage

TAG_BYTES = 16
_NONCE_BYTES = 12
_ALTERED = "it was altered, repeated or left out on the way"


class Direction:
    """Seals at one end, and opens at the other; for one thread at a time.

    Args:
        key: of 32 bytes.
    """

    def __init__(self, key: bytes) -> None:
        self._aead = AESGCM(key)
        self._count = 0

    def seal(self, plain: bytes | memoryview) -> bytes:
        """Encrypt ``plain``; the result is ``TAG_BYTES`` longer."""
        return self._aead.encrypt(self._next_nonce(), plain, None)

    def seal_into(self, plain: bytes | memoryview, sealed: memoryview) -> None:
        """Encrypt ``plain``, of less than 2 GiB, into memory that is ``TAG_BYTES`` longer."""
        self._aead.encrypt_into(self._next_nonce(), plain, None, sealed)

    def open(self, sealed: bytes | memoryview) -> bytes:
        """Decrypt what the other end has sealed next.

        Raises:
            RejectedMessage: it is something else.
        """
        try:
            return self._aead.decrypt(self._next_nonce(), sealed, None)
        except InvalidTag:
            raise RejectedMessage(_ALTERED) from None

    def open_into(self, sealed: memoryview, plain: memoryview) -> None:
        """As :meth:`open`, into memory that is ``TAG_BYTES`` shorter."""
        try:
            self._aead.decrypt_into(self._next_nonce(), sealed, None, plain)
        except InvalidTag:
            raise RejectedMessage(_ALTERED) from None

    def _next_nonce(self) -> bytes:
        nonce = self._count.to_bytes(_NONCE_BYTES, "big")
        self._count += 1
        return nonce
