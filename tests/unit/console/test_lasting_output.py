"""Output that goes away: what is said of it, once, and that printing goes on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import ROOT

# Prints a lot, then says on a file of its own that it has come to its end.
RUN = """
import sys
from workers.console.output_stream import lasting_output
with lasting_output("hybrid launch", goes_on=%r) as losses:
    for number in range(20_000):
        print("step", number)
    sys.stdout.flush()
    print("a word", file=sys.stderr)
    open("ended", "w").write(str(losses.any))
    assert open("another", "w").fileno() > 2
"""


def ended(folder: Path, redirection: str, goes_on: bool = True) -> tuple[str, str]:
    """What is on stderr, and whether anything was lost, of a run under a shell."""
    command = f"{sys.executable} -c '{RUN % goes_on}' {redirection}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    shell = ["bash", "-o", "pipefail", "-c", command]
    ran = subprocess.run(shell, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    return ran.stderr, (folder / "ended").read_text()


LOST = "hybrid launch: stdout: {}; output is lost, the run goes on\na word\n"


@pytest.mark.parametrize(
    ("redirection", "said"),
    [
        ("", "a word\n"),
        ("| head -n 1", LOST.format("Broken pipe")),
        (">/dev/full", LOST.format("No space left on device")),
        (">&-", LOST.format("Bad file descriptor")),
        ("<&- >&-", LOST.format("Bad file descriptor")),
        (">/dev/full 2>/dev/full", ""),
        (">&- 2>&-", ""),
        ("2>&-", ""),
        ("2>&1 | head -n 1", ""),
    ],
)
def test_a_run_goes_on_without_its_output(redirection: str, said: str, tmp_path: Path) -> None:
    found, is_lost = ended(tmp_path, redirection)
    assert found == said
    assert is_lost == str(bool(redirection))


@pytest.mark.parametrize(
    ("redirection", "said"),
    [("| head -n 1", ""), (">/dev/full", "hybrid launch: stdout: No space left on device; output is lost\n")],
)
def test_what_only_prints_has_nothing_to_go_on_with(redirection: str, said: str, tmp_path: Path) -> None:
    assert ended(tmp_path, redirection, goes_on=False) == (f"{said}a word\n", "True")
