"""Progress of a long task, as lines of text."""

import threading
import time
from collections.abc import Callable
from datetime import timedelta

_FIRST_SECONDS, _LONGEST_SECONDS = 1.0, 10.0


def ignore_progress(line: str) -> None:
    """Do nothing; the default progress callback."""


class Progress:
    """Reports the progress of a task: after one second, then at intervals that grow to ten seconds.

    Only calls of :meth:`add` report. Several threads may call :meth:`add`.

    Args:
        report: receives one line at a time.
        phase: the first phase of the task.
    """

    def __init__(self, report: Callable[[str], None], phase: str = "") -> None:
        self._report = report
        self._began = time.monotonic()
        self._interval = _FIRST_SECONDS
        self._due = self._began + self._interval
        self._lock = threading.Lock()
        self.start(phase)

    def start(self, phase: str) -> None:
        """Begin another phase of the task, and count its rows from 0."""
        self._phase = phase
        self._phase_began = time.monotonic()
        self._rows = 0

    def add(self, rows: int, fraction: float | None = None) -> None:
        """Add ``rows`` to the completed rows of the phase. If the interval has passed, report the progress.

        Args:
            fraction: completed fraction of the whole task; None if unknown.
        """
        now = time.monotonic()
        with self._lock:
            self._rows += rows
            if now < self._due:
                return
            self._interval = min(2 * self._interval, _LONGEST_SECONDS)
            self._due = now + self._interval
        if fraction is None:
            self._report(f"{self._phase}: {self._rows:,} rows so far")
            return
        speed = f", {self._rows / max(1e-9, now - self._phase_began):,.0f} rows/s" if self._rows else ""
        left = timedelta(seconds=round((now - self._began) * (1 - fraction) / max(1e-9, fraction)))
        self._report(f"{self._phase}: {100 * fraction:.0f}%{speed}, left {left}")
