"""Rejections of messages: the exception, the log, and the text for the sender. Does not import torch."""

import logging
import pickle
import threading
import time
from typing import NoReturn

_LOG = logging.getLogger(__name__)
_SECONDS_BETWEEN_LINES = 10.0
_PREFIX = "a message was rejected: "


class RejectionError(Exception):
    """A received message is forged, replayed or unexpected, so it was not loaded. The text is the reason."""


class RejectionLog:
    """Counts rejections, and logs at most one line every ten seconds.

    Args:
        what: the noun for log lines: "message" or "connection".
    """

    def __init__(self, what: str = "message") -> None:
        self.count = 0
        self._what = what
        self._next_line_at = 0.0
        self._lock = threading.Lock()

    def add(self, reason: str) -> None:
        """Count a rejection, and log it unless a line was logged in the last ten seconds."""
        with self._lock:
            self.count += 1
            count = self.count
            now = time.monotonic()
            if now < self._next_line_at:
                return
            self._next_line_at = now + _SECONDS_BETWEEN_LINES
        _LOG.warning("rejected a %s: %s (%d rejected so far)", self._what, reason, count)


class PlainUnpickler(pickle.Unpickler):
    """Loads numbers, text and built-in collections; rejects a pickle that names a class or a function."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise RejectionError(f"it names {module}:{name}")


def describe_rejection(reason: str) -> str:
    """Return the text that reports a rejection to the sender of the message; ``reason`` is one line."""
    return _PREFIX + reason


def parse_rejection(text: str) -> str | None:
    """Return the reason if ``text`` contains a result of :func:`describe_rejection`, else None."""
    _, prefix, rest = text.partition(_PREFIX)
    return rest.splitlines()[0] if prefix else None
