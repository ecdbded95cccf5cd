"""What the test of a failure, and the roles that fail in it, tell each other. Free of torch."""

import signal
from pathlib import Path

FAULTS_FILE, STRUCK_FILE = "faults.json", "struck.txt"

WORDS = "as the test wants it"
ERRORS = {"ValueError": ValueError, "MemoryError": MemoryError}
# The signals on which every role raises these in its main thread.
RAISING = {"ValueError": signal.SIGVTALRM, "MemoryError": signal.SIGUSR2}
RAISED = tuple(ERRORS)
STARVED = "out of memory"  # and the kernel ends a process for it


def read_times(run: Path, file: str) -> list[float]:
    """The times in a file of these, in seconds since the epoch; none where it is not there."""
    path = run / file
    return [float(line) for line in path.read_text().splitlines()] if path.exists() else []
