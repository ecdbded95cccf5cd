"""The processes of a launch that can be killed, and the phase of the run."""

import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from workers.run_folder.run_access import RESULT_FILE

LAUNCHER = "launcher"
PHASES = ("start", "step", "evaluation", "checkpoint", "shutdown")


_ROLE = re.compile(r"hybrid (master|(trainer|worker) \d+)")  # the title of a role's process


def running_roles(processes: Iterable[psutil.Process]) -> dict[str, psutil.Process]:
    """Return the roles among the processes of a launch by name, without frozen roles."""
    roles = {}
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            title = _ROLE.fullmatch("".join(process.cmdline()[:1]))
            if title is not None and process.status() != psutil.STATUS_STOPPED:
                roles[title[1]] = process
    return roles


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
