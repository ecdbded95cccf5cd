"""Rejected messages, their log, and the text that reports an exception to a caller; does not import torch.

RPC sends only the text of an exception to the caller, with text of torch around it. So the text has a fixed
prefix, the class and the message of the exception.
"""

import logging
import pickle
import threading
import time
from typing import NoReturn

from hybrid.errors import error_kind

_LOG = logging.getLogger(__name__)
_SECONDS_BETWEEN_LINES = 10.0
_EXCEPTION_PREFIX = "raised by the called function: "
_REJECTION_PREFIX = "a message was rejected: "


class RejectedMessage(Exception):
    """A message was rejected, and not loaded. The text is the reason."""


class RejectionLog:
    """Counts rejected messages, or connections (``what``), and logs at most one line every ten seconds."""

    def __init__(self, what: str = "message") -> None:
        self.count = 0
        self._what = what
        self._next_line_at = 0.0
        self._lock = threading.Lock()

    def add(self, reason: str) -> None:
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
        raise RejectedMessage(f"it names {module}:{name}")


def describe_exception(error: Exception) -> str:
    """Return the text that reports an exception of a call to its caller."""
    return f"{_EXCEPTION_PREFIX}{error_kind(error)}: {error}"


def parse_exception(text: str) -> tuple[str, str] | None:
    """Return class and message of the innermost exception in a text of RPC; None if there is none."""
    _, prefix, rest = text.rpartition(_EXCEPTION_PREFIX)
    kind, _, message = rest.partition(":")
    return (kind, message.removeprefix(" ")) if prefix else None


def describe_rejection(reason: str) -> str:
    """Return the text that reports a rejected message; ``reason`` is one line."""
    return _REJECTION_PREFIX + reason


def parse_rejection(text: str) -> str | None:
    """Return the reason of the rejection in a text of RPC; None if there is none."""
    _, prefix, rest = text.partition(_REJECTION_PREFIX)
    return rest.splitlines()[0] if prefix else None
