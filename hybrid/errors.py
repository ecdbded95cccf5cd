"""The errors that users see.

    HybridError
    ├── ConfigError       a key of the configuration breaks a rule
    ├── DataError         input data cannot be used
    ├── CheckpointError   a checkpoint is missing, broken, or of another model
    ├── StorageError      a store refuses a request, or the system refuses a path
    │   └── OutageError   a store or a broker is down, overloaded, or out of reach
    ├── NonFiniteError    a loss or gradient is infinite or not a number
    └── ClusterError      a role is missing, failed, or was lost

Every message is one line that says what happened and what to do. The log of the role has the stack trace.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from contextlib import suppress

_CUTOFF = 0.65  # similarity of names, from 0 to 1
_MAX_MESSAGE_CHARACTERS = 4000
_PREFIX = "raised by the called function: "


class HybridError(Exception):
    """Base class of the errors that a user can correct; the command line prints their message."""

    @property
    def kind(self) -> type[Exception]:
        """The class of this error; OutageError if the outage of a store caused this error."""
        cause = self.__cause__
        is_outage = isinstance(cause, HybridError) and issubclass(cause.kind, OutageError)
        return OutageError if is_outage else type(self)


class ConfigError(HybridError):
    """A configuration key breaks a rule.

    Args:
        key: dotted name, for example ``train.batch_size``.
        rule: what the value must be, and what to do.
        value: the invalid value; None to leave it out of the message.
    """

    def __init__(self, key: str, rule: str, value: object = None) -> None:
        shown = "" if value is None else f" = {value!r:.300}"
        super().__init__(f"{' '.join(key.split())}{shown}: {rule}")
        self.key = key
        self.value = value
        self.rule = rule

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, str, object]]:
        return type(self), (self.key, self.rule, self.value)


class DataError(HybridError):
    """Data are missing, invalid, or of the wrong shape; differ among trainers; or cannot be stored."""


class CheckpointError(HybridError):
    """A checkpoint is missing, incomplete, altered, or belongs to another model."""


class StorageError(HybridError, OSError):
    """A store refuses a request, or the operating system refuses a path; also an OSError.

    Args:
        message: the path, the action, the reason, and what to do.
        reason: the message without the path, for ``strerror``; empty for the whole message.
    """

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.strerror = reason or message


class OutageError(StorageError):
    """A store or a broker is down, overloaded or out of reach, and remained so during all attempts."""


class NonFiniteError(HybridError):
    """A loss or gradient is infinite or not a number, and ``train.non_finite`` is ``stop``."""


class ClusterError(HybridError):
    """A role is missing at the start, failed, was lost, or broke a rule of the protocol between roles."""


def error_kind(error: BaseException) -> str:
    """Return the class name of an error; for a HybridError, the name of its :attr:`HybridError.kind`."""
    return (error.kind if isinstance(error, HybridError) else type(error)).__name__


def error_class(name: str) -> type[Exception]:
    """Return the class of this module with this name; Exception if there is none."""
    cls = globals().get(name)
    return cls if isinstance(cls, type) and issubclass(cls, HybridError) else Exception


def describe_exception(error: Exception) -> str:
    """Return the class name (:func:`error_kind`) and message of an exception as text for another process.

    :func:`parse_exception` finds both again, even if RPC has added text before this text.
    """
    return f"{_PREFIX}{error_kind(error)}: {error}"


def parse_exception(text: str) -> tuple[str, str] | None:
    """Return class name and message of the last exception that ``text`` describes; None if there is none."""
    _, prefix, rest = text.rpartition(_PREFIX)
    kind, _, message = rest.partition(":")
    return (kind, message.removeprefix(" ")) if prefix else None


def shorten(text: str) -> str:
    """Return ``text``; if it has more than 4,000 characters, an ellipsis replaces its middle."""
    half = _MAX_MESSAGE_CHARACTERS // 2
    return text if len(text) <= 2 * half else f"{text[:half]} ... {text[-half:]}"


def most_similar(name: str, names: Iterable[str]) -> str | None:
    """Return the name that is most similar to ``name``, ignoring case; None if no name is similar."""
    by_folded = {each.casefold(): each for each in names}
    matches = difflib.get_close_matches(name.casefold(), by_folded, n=1, cutoff=_CUTOFF)
    return by_folded[matches[0]] if matches else None


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's text, or its class name if the text is empty or unavailable."""
    text = ""
    with suppress(Exception):
        text = str(error)
    return (text.strip().splitlines() or [type(error).__name__])[0]
