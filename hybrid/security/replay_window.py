"""Which numbered messages of one sender have come already."""

import threading

# Messages overtake each other, between threads and between connections, by as many as a sender sends to all
# receivers within the timeout of a call. Bits of numbers that do not come take address space, not memory.
_BYTES = 1 << 17


class ReplayWindow:
    """Admits each number once, in any order; those too far behind the highest one are not admitted.

    A ring of bits over the numbers around the highest, as in RFC 6479.

    Args:
        num_bytes: of the ring; 8 numbers each.
    """

    def __init__(self, num_bytes: int = _BYTES) -> None:
        self._bits = bytearray(num_bytes)
        self._highest = 0
        self._lock = threading.Lock()

    def admit(self, number: int) -> bool:
        """Whether ``number`` has not come before, as far as can be told; it has now."""
        size = len(self._bits)
        byte, bit = number >> 3, 1 << (number & 7)
        with self._lock:
            last = self._highest >> 3
            if byte > last:
                if byte - last >= size:
                    self._bits = bytearray(size)
                else:
                    for entered in range(last + 1, byte + 1):
                        self._bits[entered % size] = 0
            elif last - byte >= size:
                return False
            if self._bits[byte % size] & bit:
                return False
            self._bits[byte % size] |= bit
            self._highest = max(self._highest, number)
            return True
