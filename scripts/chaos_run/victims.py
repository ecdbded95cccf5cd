"""The processes of a launch that can be killed, and the phase of the run."""

import os
from pathlib import Path

import psutil

from workers.run_folder.run_access import RESULT_FILE

LAUNCHER = "launcher"
PHASES = ("start", "step", "evaluation", "checkpoint", "shutdown")


def running_roles(launcher: psutil.Process, run: Path) -> dict[str, psutil.Process]:
    """Return the running roles of a launch by name: processes that write to logs below the run's folder."""
    roles = {}
    for process in _descendants(launcher):
        try:
            log = Path(os.readlink(f"/proc/{process.pid}/fd/2"))
            if (
                log.parent.name == "logs"
                and run.resolve() in log.parents
                and process.status() != psutil.STATUS_STOPPED
            ):
                roles[log.stem.replace("-", " ")] = process
        except (OSError, psutil.NoSuchProcess):  # the process has just ended
            continue
    return roles


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    try:
        return list(process.children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def phase_of(run: Path, output: str) -> str:
    """Return the phase of a run.

    Args:
        output: what its master has printed since its start.
    """
    last = output.rstrip("\n").rpartition("\n")[2]
    if any(run.rglob(RESULT_FILE)):
        return "shutdown"
    if "step " not in output:
        return "start"
    if last == "evaluating":
        return "evaluation"
    if last == "writing the checkpoint" or any(run.glob("checkpoints/*.partial")):
        return "checkpoint"
    return "step"
