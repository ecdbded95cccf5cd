"""Runs in which roles fail as a plan says, and what ``launch`` says of it.

``PYTHONPATH=tests python -m support.failure_runs`` measures how long each kind of failure takes.
"""

import io
import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import psutil
import pytest
from support.commands import settings
from support.failure_plans import CHECKPOINT_STEPS, HEARTBEAT_SECONDS, HOWS, PLANS, STEPS, Plan
from support.faults import FAULTS_FILE, STEPPED_FILE, STRUCK_FILE, read_times

from workers.cli import main
from workers.launching import launcher
from workers.launching.fork_server import ForkServer

TEST_SAMPLES = 333
NOTICED_SECONDS = 10.0
JOB = settings(
    data={"synthetic_rows": 2000},
    train={"batch_size": 128, "log_every_steps": 1},
    dense={"device": "cpu"},
)


@contextmanager
def shared_server() -> Iterator[None]:
    """Have every ``launch`` of this process fork its roles from one server, which imports torch once.

    What it forks raises what support/faulty_net.py asks it to.
    """
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        servers: list[ForkServer] = []

        def get(preload: Sequence[str]) -> AbstractContextManager[ForkServer]:
            if not servers:
                preload = (*preload, "support.reporting", "support.faulty_roles")
                servers.append(stack.enter_context(ForkServer(preload)))
            return nullcontext(servers[0])

        patch.setattr(launcher, "ForkServer", get)
        yield


@dataclass(frozen=True, slots=True)
class Line:
    """What ``launch`` has said, and when: in seconds since the epoch."""

    text: str
    at: float


@dataclass(frozen=True, slots=True)
class Ended:
    """How one launch ended."""

    code: int
    lines: list[Line]
    at: float


@dataclass(frozen=True, slots=True)
class Took:
    """How long a failure took, in seconds.

    Attributes:
        noticed: until ``launch`` said so.
        back: until the first step after it; None where ``launch`` ended.
    """

    noticed: float
    back: float | None


class _Timed(io.StringIO):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[Line] = []

    def write(self, text: str) -> int:
        if text.strip():
            self.lines.append(Line(text.rstrip("\n"), time.time()))
        return len(text)


def _launch(arguments: Sequence[str]) -> Ended:
    """Run ``launch`` in this process; no role may be there when it has ended."""
    code, before = 0, _grandchildren()
    with redirect_stderr(_Timed()) as said:
        try:
            main(["launch", *arguments])
        except SystemExit as error:
            code = 1 if isinstance(error.code, str) else int(error.code or 0)
            if isinstance(error.code, str):
                print(error.code, file=said)
    ended_at = time.time()
    left = _grandchildren() - before
    assert not left, f"left behind: {left}"
    return Ended(code, said.lines, ended_at)


def _grandchildren() -> set[psutil.Process]:
    """The roles under the server are among them, and maybe processes of other tests."""
    return {process for child in psutil.Process().children() for process in child.children()}


def waiting_seconds(how: str) -> float:
    """How long a failure of this kind is waited for before it is one."""
    return HEARTBEAT_SECONDS if how == "SIGSTOP" else 0.0


def live_through(plan: Plan, job: Sequence[str], folder: Path) -> list[Took]:
    """Bring about every row of a plan; see that ``launch`` says so soon, and the run comes to its right end.

    Args:
        job: settings of the run, which takes ``STEPS`` steps.
        folder: for the run.

    Returns:
        How long each row took.
    """
    run = folder / "run"
    run.mkdir()
    (run / FAULTS_FILE).write_text(json.dumps([row.fault for row in plan.rows]))
    # A busy machine is no frozen one.
    beat = HEARTBEAT_SECONDS if plan.how == "SIGSTOP" else 10 * HEARTBEAT_SECONDS
    overrides = settings(
        run={"folder": run},
        train={"update": plan.update},
        dense={"net": "support.faulty_net:build"},
        checkpoint={"every_steps": CHECKPOINT_STEPS},
        cluster={"max_restarts": len(plan.rows), "heartbeat_timeout_seconds": beat},
    )
    launches = []
    for rows in plan.launches:
        ended = _launch([*job, *overrides])
        said = [line.text for line in ended.lines]
        assert len(said) == len(rows), said
        for row, text in zip(rows, said, strict=True):
            assert re.fullmatch(row.line, text), (row.line, text)
        assert ended.code == int(rows[-1].ends_launch), said
        launches.append(ended)
    _check_end(run)
    took = list(_took(launches, run))
    assert all(each.noticed < waiting_seconds(plan.how) + NOTICED_SECONDS for each in took), took
    return took


def _took(launches: Sequence[Ended], run: Path) -> Iterator[Took]:
    struck, stepped = iter(read_times(run, STRUCK_FILE)), read_times(run, STEPPED_FILE)
    for ended in launches:
        for line in ended.lines:
            start = next(struck)
            back = min((at - start for at in stepped if line.at < at < ended.at), default=None)
            yield Took(line.at - start, back)


def _check_end(run: Path) -> None:
    """See that all steps are taken, and logged once."""
    result = json.loads((run / "result.json").read_text())
    assert (result["steps"], result["num_samples"]) == (STEPS, TEST_SAMPLES), result
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in logged if line["kind"] == "train"]
    assert steps == list(range(1, STEPS + 1)), steps


def measure() -> None:
    """Print the medians of every way to fail."""
    with TemporaryDirectory() as scratch, shared_server():
        job = [*JOB, *settings(data={"cache_folder": f"{scratch}/prepared"})]
        for how in HOWS:
            took: list[Took] = []
            for plan in (plan for plan in PLANS if plan.how == how):
                folder = Path(scratch) / f"{plan.kind}-{how}"
                folder.mkdir()
                took += live_through(plan, job, folder)
            noticed = median(each.noticed for each in took) - waiting_seconds(how)
            back = median(each.back for each in took if each.back is not None) - waiting_seconds(how)
            print(f"{how}: said after {noticed:.1f} s, back after {back:.1f} s", flush=True)


if __name__ == "__main__":
    measure()
