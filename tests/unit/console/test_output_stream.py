"""Output that cannot be written any more: one message, and the process prints on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import ROOT

# Prints a lot, then reports its end in a file.
RUN = """
import sys
from workers.console import tolerate_lost_output
with tolerate_lost_output("hybrid launch", run_continues=%r) as lost:
    for number in range(20_000):
        print("step", number)
    sys.stdout.flush()
    print("a word", file=sys.stderr)
    open("ended", "w").write(str(bool(lost)))
    assert open("another", "w").fileno() > 2
"""


def ended(folder: Path, redirection: str, run_continues: bool) -> tuple[str, str]:
    """Return stderr of a run under a shell, and whether output was lost."""
    command = f"{sys.executable} -c '{RUN % run_continues}' {redirection}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    shell = ["bash", "-o", "pipefail", "-c", command]
    ran = subprocess.run(shell, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    return ran.stderr, (folder / "ended").read_text()


LOST = "hybrid launch: stdout: {}; output is lost, the run continues\n"


@pytest.mark.parametrize(
    ("run_continues", "redirection", "message"),
    [
        (True, "", ""),
        (True, "| head -n 1", LOST.format("Broken pipe")),
        (True, ">/dev/full", LOST.format("No space left on device")),
        (True, ">&-", LOST.format("Bad file descriptor")),
        (True, ">/dev/full 2>/dev/full", None),
        (True, "2>&-", None),
        (True, "2>&1 | head -n 1", None),
        (False, "| head -n 1", ""),
        (False, ">/dev/full", "hybrid launch: stdout: No space left on device; output is lost\n"),
    ],
)
def test_output_may_close(run_continues: bool, redirection: str, message: str | None, tmp_path: Path) -> None:
    """A command that only prints ends silently if its reader ends."""
    stderr, is_lost = ended(tmp_path, redirection, run_continues)
    assert stderr == ("" if message is None else f"{message}a word\n")
    assert is_lost == str(bool(redirection))
