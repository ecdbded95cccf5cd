"""Every failure of every role in every phase of a run: the rows of docs/failures.md."""

import json
import re
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest
from support.commands import ROOT, result_of, run, settings
from support.faults import ERRORS, FAULTS_FILE, WORDS, read_times

from workers.run_folder.run_access import RESTARTS_FILE

PHASES = ("start", "step", "evaluation", "checkpoint", "shutdown")
ROLES = ("master", "trainer", "worker")
HOWS = ("SIGKILL", "SIGSTOP", *ERRORS)
STEPS, TEST_SAMPLES = 16, 333  # of the run
HEARTBEAT_SECONDS = 2
NOTICED_SECONDS = 10.0
# With two of a kind, others wait for the one that fails.
INDICES = {"start": 0, "step": 1, "evaluation": 0, "checkpoint": 1, "shutdown": 1}
FROZEN = rf"is frozen: no heartbeat for {HEARTBEAT_SECONDS} s \(cluster\.heartbeat_timeout_seconds\)"
CAUSES = {"SIGKILL": "was killed by SIGKILL", "SIGSTOP": FROZEN}
RESTARTED = {
    "start": "nothing is lost, starting from the beginning",
    "step": "steps 0 to 1 are lost, starting from the beginning",
    "shutdown": "the run had finished, nothing is lost",
}
RESUMED = r"steps (?P<step>\d+) to \d+ are lost, resuming from step (?P=step)"


@dataclass(frozen=True, slots=True)
class Row:
    """One failure under ``launch``.

    Attributes:
        kind: of the role that fails.
        how: a signal, or an exception.
        phase: of the run.
    """

    kind: str
    how: str
    phase: str

    @property
    def role(self) -> str:
        """The role that fails; trainer 0 raises within a call, as a user's net does, except at shutdown."""
        is_in_call = self.how in ERRORS and self.phase != "shutdown" and self.kind == "trainer"
        index = 0 if is_in_call else INDICES[self.phase]
        return self.kind if self.kind == "master" else f"{self.kind} {index}"

    @property
    def result(self) -> str:
        """The result in the table of docs/failures.md."""
        if self.phase == "start" and self.how in ERRORS:
            return "ends"  # a restart would raise the exception again
        return {"start": "restarts", "shutdown": "finished"}.get(self.phase, "resumes")

    @property
    def line(self) -> str:
        """The line of ``launch``, as a regular expression."""
        cause = CAUSES.get(self.how, f"{self.how}: {WORDS}")
        lost = "" if self.result == "ends" else RESTARTED.get(self.phase, RESUMED)
        return rf"hybrid launch: (the )?{self.role}\b.*{cause}.*{lost}"


Plan = tuple[Row, ...]  # the failures of a run, in the order of the phases


# Each failure, each kind of role and each phase; the others take minutes.
SHORT_PLANS: list[Plan] = [
    (Row("worker", "SIGSTOP", "step"),),
    (
        Row("worker", "ValueError", "start"),
        Row("worker", "MemoryError", "evaluation"),
        Row("trainer", "SIGKILL", "checkpoint"),
        Row("master", "MemoryError", "shutdown"),
    ),
]
# Each of these failures takes a heartbeat timeout. A run that fails in a checkpoint needs an earlier one.
FROZEN_PHASES = [["step"], [phase for phase in PHASES if phase != "step"]]
LONG_PLANS: list[Plan] = [
    tuple(Row(kind, how, phase) for phase in phases)
    for kind, how in product(ROLES, HOWS)
    for phases in (FROZEN_PHASES if how == "SIGSTOP" else [PHASES])
]
LONG_PLANS = [plan for plan in LONG_PLANS if plan not in SHORT_PLANS]
PLANS = [*SHORT_PLANS, *LONG_PLANS]


@pytest.mark.parametrize(
    "plan",
    [*SHORT_PLANS, *(pytest.param(plan, marks=pytest.mark.long) for plan in LONG_PLANS)],
    ids=lambda plan: ", ".join(f"{row.kind} {row.how} {row.phase}" for row in plan),
)
def test_run_completes_after_failures(plan: Plan, tiny: list[str], tmp_path: Path) -> None:
    """``launch`` reports every failure soon, and each step of the run is logged once."""
    folder, is_frozen = tmp_path / "run", plan[0].how == "SIGSTOP"
    folder.mkdir()
    (folder / FAULTS_FILE).write_text(json.dumps([(row.role, row.how, row.phase) for row in plan]))
    # A busy machine must not count as frozen.
    beat = HEARTBEAT_SECONDS if is_frozen else 10 * HEARTBEAT_SECONDS
    sizes = {f"{kind}s": 1 + (f"{kind} 1" in [row.role for row in plan]) for kind in ROLES[1:]}
    keys = settings(
        run={"folder": folder},
        train={"update": ("sync", "lookahead")[PLANS.index(plan) % 2]},
        dense={"net": "support.faulty_net:build"},
        checkpoint={"every_steps": 4},
        cluster={"max_restarts": len(plan), "heartbeat_timeout_seconds": beat, **sizes},
    )
    for part in [plan[:1], plan[1:]] if plan[0].result == "ends" else [plan]:
        ended = run(["launch", *tiny, *keys], tmp_path)
        lines = ended.stderr.splitlines()
        assert len(lines) == len(part), ended
        assert all(re.fullmatch(row.line, line) for row, line in zip(part, lines, strict=True)), ended
        assert ended.code == (part[-1].result == "ends")
    restarts = [json.loads(line) for line in (folder / RESTARTS_FILE).read_text().splitlines()]
    struck = [at for row, at in zip(plan, read_times(folder), strict=True) if row.result[:2] == "re"]
    delays = [restart["time"] - at for restart, at in zip(restarts, struck, strict=True)]
    assert max(delays) < NOTICED_SECONDS + HEARTBEAT_SECONDS * is_frozen, delays
    result = result_of(folder)
    assert (result["steps"], result["num_samples"]) == (STEPS, TEST_SAMPLES)
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [each["step"] for each in logged if each["kind"] == "train"] == list(range(1, STEPS + 1))


def test_page_has_the_table_of_failures() -> None:
    titles = {"ValueError": "exception", "MemoryError": "out of memory"}
    lines = [f"| when | {' | '.join(titles.get(how, how) for how in HOWS)} |"]
    lines.append("|---" * (1 + len(HOWS)) + "|")
    for phase in PHASES:
        (cells,) = {" | ".join(Row(kind, how, phase).result for how in HOWS) for kind in ROLES}
        lines.append(f"| {phase} | {cells} |")
    table = "\n".join(lines) + "\n"
    assert table in (ROOT / "docs/failures.md").read_text(encoding="utf-8"), f"the table should be:\n{table}"
