"""One direction of a connection: what one end seals, the other opens once, in the same order. Free of torch.

Sealed with AES-256-GCM (NIST SP 800-38D). Its one rule is that no nonce comes twice under a key: the key is
of this direction of this connection alone, and a nonce is the number of what was sealed, which both ends
count. So nothing that was said is good again, in another place, on another connection, or the other way.
"""

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from hybrid.security.rejected_messages import RefusedPayload

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
        """What stands for ``plain``; ``TAG_BYTES`` longer."""
        return self._aead.encrypt(self._next(), plain, None)

    def seal_into(self, plain: bytes | memoryview, sealed: memoryview) -> None:
        """As :meth:`seal`, into memory of that length; of less than 2 GiB."""
        self._aead.encrypt_into(self._next(), plain, None, sealed)

    def open(self, sealed: bytes | memoryview) -> bytes:
        """What ``sealed`` stands for.

        Raises:
            RefusedPayload: it is not what the other end has sealed next.
        """
        try:
            return self._aead.decrypt(self._next(), sealed, None)
        except InvalidTag:
            raise RefusedPayload(_ALTERED) from None

    def open_into(self, sealed: memoryview, plain: memoryview) -> None:
        """As :meth:`open`, into memory that is ``TAG_BYTES`` shorter."""
        try:
            self._aead.decrypt_into(self._next(), sealed, None, plain)
        except InvalidTag:
            raise RefusedPayload(_ALTERED) from None

    def _next(self) -> bytes:
        nonce = self._count.to_bytes(_NONCE_BYTES, "big")
        self._count += 1
        return nonce
