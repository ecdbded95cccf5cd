"""Exceptions raised in user code: their location in it, and their log entries."""

import functools
import logging
import os
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

from hybrid.errors import HybridError, first_line

# Packages whose code is not user code.
PROJECT = ("hybrid", "workers")
_PROJECT_FOLDER = Path(__file__).resolve().parents[2]
_LOG = logging.getLogger(__name__)
# In any folder: PYTHONPATH and .pth files may name those of another Python. Debian has dist-packages.
_PACKAGES = {"site-packages", "dist-packages"}
_STANDARD = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib"))


def is_library(path: Path) -> bool:
    """Return whether a file belongs to the standard library, or is installed."""
    return not _PACKAGES.isdisjoint(path.parts) or any(map(path.is_relative_to, _STANDARD))


@functools.cache
def is_user_file(filename: str) -> bool:
    """Return whether a file is neither this project's, nor the standard library's, nor installed."""
    if filename.startswith("<"):  # generated code
        return False
    path = Path(filename).resolve()
    return not is_library(path) and not any(path.is_relative_to(_PROJECT_FOLDER / name) for name in PROJECT)


def user_location(error: BaseException | None) -> str:
    """Return the innermost frame of user code of an exception, or of its cause.

    Returns:
        Such as ``my_net.py:17, in forward``; empty if no user code is involved.
    """
    for each in _causes(error):
        if isinstance(each, SyntaxError) and each.filename and is_user_file(each.filename):
            return f"{_short(each.filename)}:{each.lineno}"
        frames = traceback.extract_tb(each.__traceback__)
        if own := [frame for frame in frames if is_user_file(frame.filename)]:
            return f"{_short(own[-1].filename)}:{own[-1].lineno}, in {own[-1].name}"
    return ""


def describe_error(error: BaseException) -> str:
    """Describe an exception in one line: its location in user code, class, text and notes."""
    location = user_location(error)
    notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
    return f"{location}: {kind_and_text(error)}{notes}" if location else f"{kind_and_text(error)}{notes}"


def kind_and_text(error: BaseException) -> str:
    """Return the class and text of an exception, such as ``KeyError: 'user'``."""
    kind, text = type(error).__name__, first_line(error)
    return kind if text == kind else f"{kind}: {text}"


def needs_traceback(error: BaseException) -> bool:
    """Return whether one line may not explain an exception; its traceback then goes to the role's log."""
    return not isinstance(error, HybridError) or bool(user_location(error.__cause__))


def log_traceback(error: BaseException) -> None:
    """Log the traceback of an exception: first the frames in the user's code, then all frames."""
    lines = traceback.format_exception(error)
    for each in _causes(error):
        frames = traceback.extract_tb(each.__traceback__)
        first = next((i for i, frame in enumerate(frames) if is_user_file(frame.filename)), 0)
        if first > 0:
            lines = [
                "Traceback of your code (most recent call last):\n",
                *traceback.StackSummary.from_list(frames[first:]).format(),
                *traceback.format_exception_only(each),
                "\nAll frames:\n",
                *lines,
            ]
            break
    _LOG.error("%s\n%s", kind_and_text(error), "".join(lines).rstrip("\n"))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and its causes, the first cause first."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        error = error.__cause__
    yield from reversed(seen)


def _short(filename: str) -> str:
    """Return a path relative to the current folder if the file is below it."""
    path = Path(os.path.abspath(filename))
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
