"""Payloads that were refused: counted, and told in few lines however many come."""

import logging
import threading
import time

_LOG = logging.getLogger(__name__)
_SECONDS_BETWEEN_LINES = 10.0


class RefusedPayload(Exception):
    """A payload of which nothing is loaded; says why."""


class Refusals:
    """Counts refused payloads, and logs a line for the first of some seconds.

    Attributes:
        count: of all.
    """

    def __init__(self) -> None:
        self.count = 0
        self._next_line_at = 0.0
        self._lock = threading.Lock()

    def add(self, reason: str) -> None:
        """Note that a payload was refused for ``reason``."""
        with self._lock:
            self.count += 1
            count, now = self.count, time.monotonic()
            if now < self._next_line_at:
                return
            self._next_line_at = now + _SECONDS_BETWEEN_LINES
        _LOG.warning("refused a message: %s (%d refused so far)", reason, count)
