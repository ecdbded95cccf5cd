"""Lines of text for the user, and log records for finding a cause. Free of torch.

Nothing else in ``hybrid`` and ``workers`` prints. Log records go to stderr, which is the log file of a role
under ``hybrid launch``.
"""

import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

# Control characters of both sets, bidirectional marks, separators of lines and paragraphs, and surrogates,
# which stand for bytes of file names that are not UTF-8.
_INVISIBLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_PACKAGES = ("hybrid", "workers")


class Verbosity(IntEnum):
    """How much a command prints."""

    QUIET = 0  # results, warnings and errors
    NORMAL = 1
    VERBOSE = 2  # log records too


_verbosity = Verbosity.NORMAL


def verbosity() -> Verbosity:
    """Return the verbosity of this process."""
    return _verbosity


@contextmanager
def logging_to_stderr(level: Verbosity, *, is_role_log: bool = False) -> Iterator[None]:
    """Send log records to stderr while the block lasts, and set the verbosity of this process.

    Args:
        level: QUIET logs errors, NORMAL warnings too, VERBOSE also what the process does.
        is_role_log: stderr is the log file of a role, which always has what the process does.
    """
    global _verbosity
    if is_role_log:
        threshold = logging.DEBUG if level is Verbosity.VERBOSE else logging.INFO
    else:
        threshold = (logging.ERROR, logging.WARNING, logging.INFO)[level]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(_FORMAT))
    if not is_role_log:  # the terminal shows these lines itself
        handler.addFilter(lambda record: record.name != "workers.console.terminal")
    loggers = [logging.getLogger(name) for name in _PACKAGES]
    previous_verbosity, previous_levels = _verbosity, [logger.level for logger in loggers]
    _verbosity = level
    for logger in loggers:
        logger.setLevel(threshold)
        logger.addHandler(handler)
    try:
        yield
    finally:
        _verbosity = previous_verbosity
        for logger, previous_level in zip(loggers, previous_levels, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(previous_level)


def print_line(text: str, *, to_stderr: bool = False) -> None:
    """Print a line, with control characters escaped."""
    print(visible(text), file=sys.stderr if to_stderr else sys.stdout, flush=True)


def print_text(text: str) -> None:
    """Print a text of several lines that the program has written itself."""
    print(text, end="", flush=True)


def visible(text: str) -> str:
    """Return ``text`` on one line, with an escape such as ``\\x1b`` for each invisible character.

    Text from files (column names, values, paths) could otherwise move the cursor, change colors, or run from
    right to left.
    """
    return _INVISIBLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
