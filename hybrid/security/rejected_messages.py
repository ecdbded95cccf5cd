"""Rejected messages, their log, and the text by which RPC reports an exception. Free of torch.

Torch brings a caller the text of an exception, amid its own text, and next to nothing about its class.
"""

import logging
import pickle
import threading
import time
from typing import NoReturn

from hybrid.errors import error_kind

_LOG = logging.getLogger(__name__)
_SECONDS_BETWEEN_LINES = 10.0
_RAISED = "raised by the called function: "
_REJECTED = "a message was rejected: "


class RejectedMessage(Exception):
    """The reason why nothing of a message is loaded."""


class RejectionLog:
    """Counts rejected messages, and logs at most one line every ten seconds."""

    def __init__(self) -> None:
        self.count = 0
        self._next_line_at = 0.0
        self._lock = threading.Lock()

    def add(self, reason: str) -> None:
        """Record one rejected message."""
        with self._lock:
            self.count += 1
            count, now = self.count, time.monotonic()
            if now < self._next_line_at:
                return
            self._next_line_at = now + _SECONDS_BETWEEN_LINES
        _LOG.warning("rejected a message: %s (%d rejected so far)", reason, count)


class PlainUnpickler(pickle.Unpickler):
    """Loads numbers, text, lists and the like; rejects a pickle that names a class or a function."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise RejectedMessage(f"it names {module}:{name}")


def describe_exception(error: Exception) -> str:
    """Return the text that reports an exception of an accepted call to its caller."""
    return f"{_RAISED}{error_kind(error)}: {error}"


def parse_exception(text: str) -> tuple[str, str] | None:
    """Return class and message of the innermost exception that ``text`` reports; None if it reports none."""
    _, mark, found = text.rpartition(_RAISED)
    kind, _, message = found.partition(":")
    return (kind, message.removeprefix(" ")) if mark else None


def describe_rejection(reason: str) -> str:
    """Return the text that reports a rejected message; ``reason`` is one line."""
    return _REJECTED + reason


def parse_rejection(text: str) -> str | None:
    """Return the reason of the rejection that ``text`` reports; None if it reports none."""
    _, mark, found = text.partition(_REJECTED)
    return found.splitlines()[0] if mark else None
