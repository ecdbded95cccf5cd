"""The errors a user can meet, one tree.

    HybridError
    ├── ConfigError       a key of the configuration breaks a rule
    ├── DataError         an input file cannot be used
    ├── CheckpointError   a checkpoint is missing, broken, or of another model
    ├── StorageError      a store that is named by a URL does not do what it is asked
    │   └── OutageError   nor would it do anything else now: it is down, overloaded, or out of reach
    ├── NonFiniteError    a loss or gradient is infinite or not a number
    └── ClusterError      a role is missing, failed, or was lost

Every message is one line that says what happened and what to do; stacks go to the log of the role.
"""

from __future__ import annotations


class HybridError(Exception):
    """Base of every error that is the user's to mend; the command line prints it as one line."""

    @property
    def kind(self) -> type[Exception]:
        """Its class; of one that tells of an error elsewhere, or comes of an outage, that one's."""
        cause = self.__cause__
        is_outage = isinstance(cause, HybridError) and issubclass(cause.kind, OutageError)
        return OutageError if is_outage else type(self)


class ConfigError(HybridError):
    """A configuration key breaks a rule.

    Args:
        key: dotted name, for example ``train.batch_size``.
        rule: what the key must be, and the nearest valid spelling where there is one.
        value: the value found, or None where the key itself is at fault.
    """

    def __init__(self, key: str, rule: str, value: object = None) -> None:
        found = "" if value is None else f" = {value!r}"
        super().__init__(f"{' '.join(key.split())}{found}: {rule}")
        self.key = key
        self.value = value
        self.rule = rule

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, str, object]]:
        return type(self), (self.key, self.rule, self.value)


class DataError(HybridError):
    """An input file is missing, has the wrong shape, or holds too many bad rows."""


class CheckpointError(HybridError):
    """A checkpoint is missing, incomplete, altered, or belongs to another model."""


class StorageError(HybridError, OSError):
    """A store that is named by a URL does not do what it is asked: an OSError, as of the disk.

    Args:
        message: the place, what was asked, why not, and what to do.
        why: the part of the message that does not name the place.
    """

    def __init__(self, message: str, why: str = "") -> None:
        super().__init__(message)
        self.strerror = why or message


class OutageError(StorageError):
    """A store is down, overloaded or out of reach for the moment, and stayed so while it was asked again."""


class NonFiniteError(HybridError):
    """A loss or gradient is infinite or not a number, and the run is to stop at one."""


class ClusterError(HybridError):
    """A role is missing at start, failed, or was lost while running."""


def error_kind(error: BaseException) -> str:
    """The name that tells another process which kind of error it was; see :func:`error_class`."""
    return (error.kind if isinstance(error, HybridError) else type(error)).__name__


def error_class(name: str) -> type[Exception]:
    """The class of this tree that has a name; Exception where none has."""
    found = globals().get(name)
    return found if isinstance(found, type) and issubclass(found, HybridError) else Exception


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, or its type where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
