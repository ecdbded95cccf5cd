"""Runs in which roles fail as a plan says, and what ``launch`` prints."""

import io
import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from support.commands import settings
from support.failure_plans import CHECKPOINT_STEPS, HEARTBEAT_SECONDS, STEPS, Plan
from support.faults import FAULTS_FILE, STRUCK_FILE, read_times

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
    left = _grandchildren() - before
    assert not left, f"left behind: {left}"
    return Ended(code, said.lines)


def _grandchildren() -> set[psutil.Process]:
    """The roles under the server are among them, and maybe processes of other tests."""
    return {process for child in psutil.Process().children() for process in child.children()}


def live_through(plan: Plan, job: Sequence[str], folder: Path) -> None:
    """Cause every failure of a plan; check that ``launch`` reports it soon and that the run completes.

    Args:
        job: settings of the run, which takes ``STEPS`` steps.
        folder: for the run.
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
    reports: list[Line] = []
    for rows in plan.launches:
        ended = _launch([*job, *overrides])
        said = [line.text for line in ended.lines]
        assert len(said) == len(rows), said
        for row, text in zip(rows, said, strict=True):
            assert re.fullmatch(row.line, text), (row.line, text)
        assert ended.code == int(rows[-1].ends_launch), said
        reports += ended.lines
    _check_end(run)
    most_seconds = NOTICED_SECONDS + (HEARTBEAT_SECONDS if plan.how == "SIGSTOP" else 0)
    delays = [line.at - struck for line, struck in zip(reports, read_times(run, STRUCK_FILE), strict=True)]
    assert max(delays) < most_seconds, delays


def _check_end(run: Path) -> None:
    """See that all steps are taken, and logged once."""
    result = json.loads((run / "result.json").read_text())
    assert (result["steps"], result["num_samples"]) == (STEPS, TEST_SAMPLES), result
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in logged if line["kind"] == "train"]
    assert steps == list(range(1, STEPS + 1)), steps
