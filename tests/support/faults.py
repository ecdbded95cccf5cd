"""Files and signals by which a test of failures controls the roles that fail. Does not import torch."""

import signal
from pathlib import Path
from types import FrameType

FAULTS_FILE, STRUCK_FILE = "faults.json", "struck.txt"

WORDS = "as the test wants it"
ERRORS = {"ValueError": ValueError, "MemoryError": MemoryError}
# Signals on which a role raises these exceptions in its main thread.
RAISING = {"ValueError": signal.SIGVTALRM, "MemoryError": signal.SIGUSR2}


def read_times(run: Path) -> list[float]:
    """Return the times of the faults of a run so far, in seconds since the epoch."""
    path = run / STRUCK_FILE
    return [float(line) for line in path.read_text().splitlines()] if path.exists() else []


def raise_on_signals() -> None:
    """Make this process, and those forked from it, raise the exception that a test requests by a signal."""

    def fail(number: int, frame: FrameType | None) -> None:
        raise next(ERRORS[name] for name, requested in RAISING.items() if requested == number)(WORDS)

    for number in RAISING.values():
        signal.signal(number, fail)
