"""The origin of results: machine, software versions and git commit."""

import json
import os
import platform
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from benchmark.systems import ROOT

_PACKAGES = ("torch", "numpy", "numba", "fbgemm-gpu-cpu", "torchrec")
_ASK = """
import importlib.metadata, json, platform, sys
found = {"python": platform.python_version()}
for package in sys.argv[1:]:
    try:
        found[package] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def origin(interpreters: Iterable[str]) -> dict[str, Any]:
    """Return date, machine, git commit, and the versions of each environment, for JSON."""
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        **_git_state(),
        "machine": {
            "cpu": _cpu_model(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
            "platform": platform.platform(),
            "load_average": round(os.getloadavg()[0], 2),
        },
        "versions": {Path(i).parents[1].name: _versions(i) for i in dict.fromkeys(interpreters)},
    }


def origin_line(origin: dict[str, Any]) -> str:
    """Return the origin as one sentence."""
    machine = origin["machine"]
    versions = [
        f"{environment}: {', '.join(f'{k} {v}' for k, v in found.items())}"
        for environment, found in origin["versions"].items()
    ]
    commit = ""
    if origin["git_commit"]:
        commit = f"; commit {origin['git_commit'][:12]}{' with changes' if origin['git_has_changes'] else ''}"
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, load "
        f"{machine['load_average']} before; {'; '.join(versions)}; {origin['date']}{commit}."
    )


def _versions(interpreter: str) -> dict[str, str]:
    command = [interpreter, "-c", _ASK, *_PACKAGES]
    asked = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    found: dict[str, str] = json.loads(asked.stdout)
    return found


def _cpu_model() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _git_state() -> dict[str, Any]:
    """Return the git commit, and whether files differ from it; None without git."""
    try:
        commit, changes = _git("rev-parse", "--verify", "HEAD"), _git("status", "--porcelain")
    except (OSError, subprocess.SubprocessError):
        return {"git_commit": None, "git_has_changes": None}
    return {"git_commit": commit, "git_has_changes": bool(changes)}


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
