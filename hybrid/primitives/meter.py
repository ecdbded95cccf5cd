"""How many rows have been read so far, for somebody who waits."""

import time
from collections.abc import Callable

_FIRST_SECONDS, _LONGEST_SECONDS = 1.0, 10.0


def tell_nobody(line: str) -> None:
    """What is told where nobody asks."""


class Meter:
    """Counts rows while ``what`` is done, and tells how many: often at first, then every ten seconds."""

    def __init__(self, what: str, tell: Callable[[str], None]) -> None:
        self._what = what
        self._tell = tell
        self._rows = 0
        self._pause = _FIRST_SECONDS
        self._due = time.monotonic() + self._pause

    def add(self, rows: int) -> None:
        """Count some further rows."""
        self._rows += rows
        if time.monotonic() >= self._due:
            self._tell(f"{self._what}: {self._rows:,} rows so far")
            self._pause = min(2 * self._pause, _LONGEST_SECONDS)
            self._due = time.monotonic() + self._pause
