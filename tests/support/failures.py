"""Every failure of a role in a run: what ``launch`` prints, and how the run continues."""

import io
import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import psutil
import pytest
from support.commands import settings
from support.faults import FAULTS_FILE, RAISED, STARVED, STRUCK_FILE, WORDS, read_times

from workers.cli import main
from workers.launching import launcher
from workers.launching.fork_server import ForkServer

PHASES = ("start", "step", "evaluation", "checkpoint", "shutdown")
ROLES = ("master", "trainer", "worker")
HOWS = ("SIGKILL", "SIGSTOP", "ValueError", "MemoryError")
STEPS = 16  # of a run
CHECKPOINT_STEPS = 4
HEARTBEAT_SECONDS = 2

# With two of a kind, others wait for the one that fails.
_INDICES = {"start": 0, "step": 1, "evaluation": 0, "checkpoint": 1, "shutdown": 1}
_SIGNALS = {"SIGKILL": "SIGKILL", STARVED: "SIGKILL, probably since memory ran out"}
_MOMENTS = {
    "start": r"at (start|step 0)",
    "step": r"at step 2",
    "evaluation": rf"while evaluating after step {STEPS}",
    "checkpoint": r"(at step \d+|while writing the checkpoint)",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One failure under ``launch``.

    Attributes:
        role: the role that fails.
        how: a signal, an exception, or a kill by the kernel because memory ran out.
        phase: of the run.
    """

    role: str
    how: str
    phase: str

    @property
    def fault(self) -> tuple[str, str, str]:
        """The fault as support/faulty_net.py reads it."""
        return self.role, self.how, self.phase

    @property
    def ends_launch(self) -> bool:
        """Whether ``launch`` fails: a restart would raise an exception before the first step again."""
        return self.how in RAISED and self.phase == "start"

    @property
    def line(self) -> str:
        """The line of ``launch``, as a regular expression."""
        if self.ends_launch:
            return f"hybrid launch: {self._failure}"
        return f"hybrid launch: {self._failure}; {self._lost}"

    @property
    def _failure(self) -> str:
        if self.how in _SIGNALS:
            return rf"{self.role} \(pid \d+\) was killed by {_SIGNALS[self.how]}; see \S+\.log"
        if self.how == "SIGSTOP":
            return self._frozen
        if self.role == "trainer 0":  # a call to it raises
            where = r"\S*faulty_net.py:\d+, in reach"
            layer = "; in bottom of the net, Bottom" if self.phase in ("step", "evaluation") else ""
            text = rf"trainer 0 on \S+: {where}: {self.how}: {WORDS}{layer} \({_MOMENTS[self.phase]}\)"
        else:
            text = rf"{self.role}: \S*faulty_roles.py:\d+, in _raise: {self.how}: {WORDS}"
        return rf"{text}; see \S+/{self.role.replace(' ', '-')}\.log"

    @property
    def _frozen(self) -> str:
        timeout = rf"{HEARTBEAT_SECONDS} s \(cluster\.heartbeat_timeout_seconds\)"
        who = "the master" if self.role == "master" else rf"{self.role} \(host \S+, pid \d+\)"
        text = f"{who} is frozen: no heartbeat for {timeout}"
        if self.role == "master" or self.phase == "shutdown":
            return text
        return f"{text} {_MOMENTS[self.phase]}; its log may have the cause"

    @property
    def _lost(self) -> str:
        if self.phase == "shutdown":
            return "the run had finished, nothing is lost"
        if self.phase == "start":
            return "nothing is lost, starting from the beginning"
        if self.phase == "step":
            return "steps 0 to 1 are lost, starting from the beginning"
        return r"steps (?P<step>\d+) to \d+ are lost, resuming from step (?P=step)"


@dataclass(frozen=True, slots=True)
class Plan:
    """One run in which the failures of its rows happen one after another.

    Attributes:
        kind: of the role that fails.
        how: the role fails, every time.
        phases: in which the role fails.
    """

    kind: str
    how: str
    phases: tuple[str, ...] = PHASES

    def __str__(self) -> str:
        return " ".join((self.kind, self.how, *(self.phases if len(self.phases) == 1 else ())))

    @property
    def update(self) -> str:
        """The update mode; plans alternate."""
        if self.how == STARVED:
            return "lookahead"
        return ("sync", "lookahead")[(ROLES.index(self.kind) + HOWS.index(self.how)) % 2]

    @property
    def rows(self) -> list[Row]:
        return [Row(self._role(phase), self.how, phase) for phase in self.phases]

    @property
    def launches(self) -> list[list[Row]]:
        """The rows of each ``launch`` that the run takes."""
        rows = self.rows
        return [rows[:1], rows[1:]] if rows[0].ends_launch else [rows]

    def _role(self, phase: str) -> str:
        if self.kind == "master":
            return "master"
        # Trainer 0 raises within a call, as a user's net does, except at shutdown.
        raises = self.kind == "trainer" and self.how in RAISED and phase != "shutdown"
        return f"{self.kind} {0 if raises else _INDICES[phase]}"


PLANS = [Plan(kind, how) for kind, how in product(ROLES, HOWS) if how != "SIGSTOP"]
# Each of these failures takes a heartbeat timeout. A run that fails in a checkpoint needs an earlier one.
_OTHER_PHASES = tuple(phase for phase in PHASES if phase != "step")
PLANS += [Plan(kind, "SIGSTOP", phases) for kind, phases in product(ROLES, (("step",), _OTHER_PHASES))]
STARVED_PLANS = [Plan(kind, STARVED, ("step",)) for kind in ROLES]
# One plan for each failure and for each kind of role; the others take minutes.
SHORT_PLANS = [
    Plan("trainer", "SIGKILL"),
    Plan("worker", "SIGSTOP", ("step",)),
    Plan("worker", "ValueError"),
    Plan("master", "MemoryError"),
]


TEST_SAMPLES = 333
NOTICED_SECONDS = 10.0
JOB = settings(
    data={"synthetic_rows": 2000}, train={"batch_size": 128, "log_every_steps": 1}, dense={"device": "cpu"}
)


@contextmanager
def shared_server() -> Iterator[None]:
    """Have every ``launch`` of this process fork its roles from one server, which imports torch once.

    Its processes raise the exceptions that support/faulty_net.py requests by signals.
    """
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        servers: list[ForkServer] = []

        def get(preload: Sequence[str], inherited: object) -> AbstractContextManager[ForkServer]:
            if not servers:
                preload = (*preload, "support.reporting", "support.faulty_roles")
                servers.append(stack.enter_context(ForkServer(preload)))
            return nullcontext(servers[0])

        patch.setattr(launcher, "ForkServer", get)
        yield


@dataclass(frozen=True, slots=True)
class Line:
    """A line of ``launch``, and its time in seconds since the epoch."""

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
    with redirect_stderr(_Timed()) as printed:
        try:
            main(["launch", *arguments])
        except SystemExit as error:
            code = 1 if isinstance(error.code, str) else int(error.code or 0)
            if isinstance(error.code, str):
                print(error.code, file=printed)
    left = _grandchildren() - before
    assert not left, f"left behind: {left}"
    return Ended(code, printed.lines)


def _grandchildren() -> set[psutil.Process]:
    """Return the roles under the server, and possibly processes of other tests."""
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
    # A busy machine must not count as frozen.
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
        texts = [line.text for line in ended.lines]
        assert len(texts) == len(rows), texts
        for row, text in zip(rows, texts, strict=True):
            assert re.fullmatch(row.line, text), (row.line, text)
        assert ended.code == int(rows[-1].ends_launch), texts
        reports += ended.lines
    _check_end(run)
    most_seconds = NOTICED_SECONDS + (HEARTBEAT_SECONDS if plan.how == "SIGSTOP" else 0)
    delays = [line.at - struck for line, struck in zip(reports, read_times(run, STRUCK_FILE), strict=True)]
    assert max(delays) < most_seconds, delays


def _check_end(run: Path) -> None:
    """Check that all steps are taken, and that each is logged once."""
    result = json.loads((run / "result.json").read_text())
    assert (result["steps"], result["num_samples"]) == (STEPS, TEST_SAMPLES), result
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in logged if line["kind"] == "train"]
    assert steps == list(range(1, STEPS + 1)), steps
