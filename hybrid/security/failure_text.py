"""The text by which RPC tells of an exception: made and read here alone. Free of torch.

torch brings a caller the text of an exception, amid words of its own, and of its class next to nothing.
"""

from hybrid.errors import kind_of

_RAISED_LATER = "raised while the answer was waited for: "
_REFUSED = "a message was refused: "


def raised_later(error: Exception) -> str:
    """Tells that a call was accepted, and what its answer waited for has failed."""
    return f"{_RAISED_LATER}{kind_of(error)}: {error}"


def read_raised_later(text: str) -> tuple[str, str] | None:
    """Class and words of the exception that ``text`` tells to have been raised later, the innermost."""
    _, mark, told = text.rpartition(_RAISED_LATER)
    kind, _, words = told.partition(":")
    return (kind, words.removeprefix(" ")) if mark else None


def refused(reason: str) -> str:
    """Tells that a payload was refused; ``reason`` is one line."""
    return _REFUSED + reason


def read_refused(text: str) -> str | None:
    """Why a payload was refused, where ``text`` tells that."""
    _, mark, told = text.partition(_REFUSED)
    return told.splitlines()[0] if mark else None
