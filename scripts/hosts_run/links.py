"""Samples a second over links that are long or narrow, by update mode and by what travels."""

import itertools
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from support.commands import Command, eventually, settings
from support.host_roles import MASTER, placed, started_on
from support.hosts import Cable, Host, Switch

from hybrid.errors import HybridError
from workers.run_folder.run_paths import METRICS_FILE

UPDATES = ("sync", "pipelined", "async")
WIRE_DTYPES = ("rows", "bfloat16")
LINKS = {
    "as quick as the machine": None,
    "1 ms": Cable(1e-3, 10e9),
    "5 ms": Cable(5e-3, 10e9),
    "20 ms": Cable(20e-3, 10e9),
    "100 Mbit/s": Cable(0.1e-3, 100e6),
}
_LONGEST_SECONDS = 60.0
_LOG_STEPS = (
    20  # and a call of the master's, between which nothing is looked up ahead; the first is a warm-up
)


@dataclass(frozen=True, slots=True)
class Shape:
    """A job: how many samples a step has, and how wide rows are."""

    batch_size: int
    dim: int

    def __str__(self) -> str:
        return f"{self.batch_size} samples a step, rows of {self.dim}"


SHAPES = (Shape(256, 16), Shape(4096, 64))


@dataclass(frozen=True, slots=True)
class Rate:
    """What one run came to."""

    shape: Shape
    link: str
    update: str
    wire_dtype: str
    samples_per_second: float


def measure(folder: Path, links: Sequence[str], seconds: float) -> Iterator[Rate]:
    """Run every combination for some seconds: master and trainer on one host, the worker on another.

    Raises:
        HybridError: a run does not come to its steps.
    """
    for link in links:
        with Switch(folder, LINKS[link]) as switch:
            hosts = [switch.host(folder) for _ in range(2)]
            for shape, update, dtype in itertools.product(SHAPES, UPDATES, WIRE_DTYPES):
                run = folder / f"{link}-{shape.batch_size}-{update}-{dtype}".replace("/", " in ")
                rate = _rate(hosts, _arguments(shape, update, dtype, folder, run), run, seconds)
                yield Rate(shape, link, update, dtype, rate * shape.batch_size)


def _arguments(shape: Shape, update: str, dtype: str, folder: Path, run: Path) -> list[str]:
    return settings(
        data={"synthetic_rows": 200_000, "synthetic_test_rows": 1000, "cache_folder": folder / "prepared"},
        train={
            "batch_size": shape.batch_size,
            "update": update,
            "epochs": 1_000_000,
            "log_every_steps": _LOG_STEPS,
        },
        embedding={"dim": shape.dim, "wire_dtype": dtype},
        dense={"device": "cpu", "bottom_mlp": f"[64,{shape.dim}]"},
        run={"folder": run},
    )


def _rate(hosts: Sequence[Host], arguments: Sequence[str], run: Path, seconds: float) -> float:
    """Steps a second of a run that is stopped after so many seconds of them."""
    with started_on(placed(hosts), arguments) as roles:
        _await_steps(roles[MASTER], run, _LOG_STEPS)
        first_step, started_at = _last(run)
        time.sleep(seconds)  # what is measured
        _await_steps(roles[MASTER], run, first_step + _LOG_STEPS)
        last_step, ended_at = _last(run)
    return (last_step - first_step) / (ended_at - started_at)


def _await_steps(master: Command, run: Path, step: int) -> None:
    log = run / METRICS_FILE
    if not eventually(lambda: log.exists() and _last(run)[0] >= step, _LONGEST_SECONDS):
        raise HybridError(f"{run.name}: not at step {step} within {_LONGEST_SECONDS:g} s: {master.stderr}")


def _last(run: Path) -> tuple[int, float]:
    """The last step that the log has, and when it was."""
    lines = (run / METRICS_FILE).read_text().rpartition("\n")[0].splitlines()
    steps = [each for each in map(json.loads, lines) if each["kind"] == "train"]
    return (steps[-1]["step"], steps[-1]["time"]) if steps else (0, 0.0)


def table(rates: Sequence[Rate], links: Sequence[str]) -> str:
    """Samples a second: a line for each job, mode and type, a column for each link."""
    found = {(r.shape, r.update, r.wire_dtype, r.link): f"{r.samples_per_second:,.0f}" for r in rates}
    lines = [f"| job | update | on the wire | {' | '.join(links)} |", "|---" * 3 + "|---:" * len(links) + "|"]
    for shape in SHAPES:
        for update in UPDATES:
            for dtype in WIRE_DTYPES:
                cells = [found.get((shape, update, dtype, link), "") for link in links]
                lines.append(f"| {shape} | {update} | {dtype} | {' | '.join(cells)} |")
    return "\n".join(lines)
