"""Files and signals by which a test of failures controls the roles that fail. Does not import torch."""

import signal
from pathlib import Path

FAULTS_FILE, STRUCK_FILE = "faults.json", "struck.txt"

WORDS = "as the test wants it"
ERRORS = {"ValueError": ValueError, "MemoryError": MemoryError}
# Signals on which a role raises these exceptions in its main thread.
RAISING = {"ValueError": signal.SIGVTALRM, "MemoryError": signal.SIGUSR2}
RAISED = tuple(ERRORS)
STARVED = "out of memory"  # and the kernel ends a process for it


def read_times(run: Path, file: str) -> list[float]:
    """Return the times in a file, in seconds since the epoch; none if there is no file."""
    path = run / file
    return [float(line) for line in path.read_text().splitlines()] if path.exists() else []
