"""Output of a benchmark: results.json, results.md, and tables in the terminal."""

import json
import os
import platform
import subprocess
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from benchmark.systems import ROOT
from hybrid.errors import ConfigError

NO_VALUE = "-"
_JSON_FILE = "results.json"
_PACKAGES = ("torch", "numpy", "numba", "fbgemm-gpu-cpu", "torchrec")
_WIDTH = 1000  # of results.md, so that no line is wrapped


def new_folder(output: Path | None, kind: str) -> Path:
    """Create the folder for results: ``output``, or one under ``runs/`` named by benchmark and time.

    Raises:
        ConfigError: it holds results already.
    """
    folder = output or Path("runs") / f"{kind}-{datetime.now():%Y%m%d-%H%M%S}"
    if (folder / _JSON_FILE).exists():
        raise ConfigError("--output", "holds results already; choose another", str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def origin(interpreters: Iterable[str]) -> dict[str, Any]:
    """Return date, git commit, machine, and the versions of each environment, for JSON."""
    cpu_lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = (line.partition(": ")[2] for line in cpu_lines if line.startswith("model name"))
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "commit": _output_of("git", "-C", str(ROOT), "describe", "--always", "--dirty"),
        "cpu": next(names, platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "load": round(os.getloadavg()[0], 2),
        "versions": {each: _versions(each) for each in dict.fromkeys(interpreters)},
    }


def _versions(interpreter: str) -> list[str]:
    lines = _output_of(interpreter, "-m", "pip", "--disable-pip-version-check", "freeze").splitlines()
    return [line for line in lines if line.partition("==")[0] in _PACKAGES]


def _output_of(*command: str) -> str:
    """Return the output of a command; empty if it fails."""
    return subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout.strip()


def new_table(title: str, *header: str) -> Table:
    """Return a table whose columns, except the first, hold numbers."""
    table = Table(title=title, title_justify="left", box=box.MARKDOWN)
    for index, name in enumerate(header):
        table.add_column(name, justify="right" if index else "left")
    return table


def write(folder: Path, values: dict[str, Any], notes: Sequence[str], tables: Sequence[Table]) -> None:
    """Write results.json and results.md.

    Args:
        values: content of results.json.
        notes: paragraphs above the tables.
    """
    (folder / _JSON_FILE).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    with (folder / "results.md").open("w", encoding="utf-8") as file:
        _print(Console(file=file, width=_WIDTH), notes, tables)


def show(console: Console, folder: Path, notes: Sequence[str], tables: Sequence[Table]) -> None:
    """Print the results and their folder."""
    _print(console, notes, tables)
    console.print(f"written to {folder}", markup=False, highlight=False, soft_wrap=True)


def _print(console: Console, notes: Sequence[str], tables: Sequence[Table]) -> None:
    for note in notes:
        console.print(f"{note}\n", markup=False, highlight=False)
    for table in tables:
        console.print(table)
