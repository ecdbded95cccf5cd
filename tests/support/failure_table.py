"""What happens when a role fails: the rows of docs/failures.md, which tests bring about one by one.

``PYTHONPATH=tests python -m support.failure_table`` prints the page.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parents[1]
TEST_FILE = "cli/test_failure_table.py"
HEARTBEAT_SECONDS = 3

_KILLED = "{role} (pid N) was killed by {how}; see LOG"
_FROZEN = "{role} (host H, pid N) is frozen: no sign of life for 10 s ..."
_AT_ONCE = "at once"
_BEATS = "after `cluster.heartbeat_timeout_seconds`"
_SINCE = "steps since the newest checkpoint"
_FINISHED = "nothing: the run has its result, and `launch` ends with exit code 0"
_NOTHING = "nothing but the time"


@dataclass(frozen=True, slots=True)
class Row:
    """One failure under ``launch``.

    Attributes:
        role: who fails.
        how: a signal, or an exception.
        phase: of the run: start, step, evaluation, checkpoint or shutdown.
        pattern: of what is said, as a regular expression; then comes what is lost.
        said, noticed, lost: for the page.
    """

    role: str
    how: str
    phase: str
    pattern: str
    said: str
    noticed: str
    lost: str

    @property
    def fault(self) -> tuple[str, str, str]:
        """What support/faulty_net.py is told."""
        return self.role, self.how, self.phase


def _lost(phase: str) -> str:
    return {"start": _NOTHING, "shutdown": _FINISHED}.get(phase, _SINCE)


def _killed(role: str, how: str, phase: str) -> Row:
    pattern = rf"{role} \(pid \d+\) was killed by {how}; see \S+\.log"
    return Row(role, how, phase, pattern, _KILLED.format(role=role, how=how), _AT_ONCE, _lost(phase))


def _frozen(role: str, phase: str) -> Row:
    silence = rf"is frozen: no sign of life for {HEARTBEAT_SECONDS} s \(cluster.heartbeat_timeout_seconds\).*"
    who, said = rf"{role} \(host \S+, pid \d+\)", _FROZEN.format(role=role)
    if role == "master":
        who, said = "the master", "the master is frozen: no sign of life for 10 s ..."
    return Row(role, "SIGSTOP", phase, f"{who} {silence}", said, _BEATS, _lost(phase))


def _raised(error: str, phase: str) -> Row:
    pattern = rf"trainer 0 on \S+: {error}: as the test wants it \(.+\)"
    said = f"trainer 0 on H: {error}: ... (at step N)"
    return Row("trainer 0", error, phase, pattern, said, _AT_ONCE, _lost(phase))


# Each plan is one launch, which lives through its rows one after the other.
PLANS: dict[str, list[Row]] = {
    "workers killed": [
        _killed("worker 0", "SIGKILL", "start"),
        _killed("worker 1", "SIGTERM", "step"),
        _killed("worker 0", "SIGKILL", "evaluation"),
        _killed("worker 1", "SIGKILL", "checkpoint"),
        _killed("worker 0", "SIGKILL", "shutdown"),
    ],
    "trainers killed": [
        _killed("trainer 0", "SIGKILL", "start"),
        _killed("trainer 1", "SIGTERM", "step"),
        _killed("trainer 1", "SIGKILL", "evaluation"),
        _killed("trainer 0", "SIGKILL", "checkpoint"),
        _raised("RuntimeError", "step"),
        _raised("RuntimeError", "evaluation"),
        _raised("RuntimeError", "checkpoint"),
        _raised("MemoryError", "step"),
        _killed("trainer 0", "SIGKILL", "shutdown"),
    ],
    "master killed": [
        _killed("master", "SIGKILL", "start"),
        _killed("master", "SIGTERM", "step"),
        _killed("master", "SIGKILL", "evaluation"),
        _killed("master", "SIGKILL", "checkpoint"),
        _killed("master", "SIGKILL", "shutdown"),
    ],
    "frozen": [
        _frozen("trainer 0", "start"),
        _frozen("worker 1", "step"),
        _frozen("master", "evaluation"),
        _frozen("worker 0", "checkpoint"),
    ],
}


@dataclass(frozen=True, slots=True)
class Case:
    """A failure that has a test of its own.

    Attributes:
        what: fails.
        happens: then.
        test: file and name.
    """

    what: str
    happens: str
    test: str


_FAILURES = "cli/test_cli_failures.py"
CASES = [
    Case(
        "`launch` is killed",
        "every process ends within a second, frozen ones too, and leaves no port, memory or temporary file; "
        "`launch --resume RUN` goes on",
        f"{_FAILURES}::test_nothing_outlives_a_launcher_that_was_killed",
    ),
    Case(
        "Ctrl-C, SIGTERM or SIGHUP to `launch`",
        "every process ends, exit code 130; `launch --resume RUN` goes on",
        f"{_FAILURES}::test_a_signal_stops_everything",
    ),
    Case(
        "an exception before the first step",
        "`launch` ends with it: it would come again",
        f"{_FAILURES}::test_an_exception_before_the_first_step_would_come_again",
    ),
    Case(
        "no new checkpoint between `cluster.max_restarts` restarts",
        "`launch` ends with the first cause",
        f"{_FAILURES}::test_launch_gives_up_with_the_first_cause",
    ),
    Case(
        "a wrong key, bad data, a loss that is not finite, a checkpoint of another model",
        "`launch` ends with one line: it would come again",
        f"{_FAILURES}::test_what_only_a_trainer_finds_out",
    ),
    Case(
        "the process that forks the roles is killed",
        "the roles end with it, and the run goes on as after any other kill",
        f"{_FAILURES}::test_launch_goes_on_where_all_its_processes_are_gone",
    ),
    Case(
        "the kernel ends a process since memory has run out",
        "as SIGKILL; the line says so where the kernel's count has gone up",
        "unit/test_outcome.py::test_a_kill_where_memory_ran_out_says_so",
    ),
    Case(
        "a second `launch` in the same run folder",
        "is refused",
        f"{_FAILURES}::test_nothing_outlives_a_launcher_that_was_killed",
    ),
    Case(
        "roles by hand: one is killed",
        "the others end and name it",
        f"{_FAILURES}::test_roles_by_hand_hear_who_was_killed",
    ),
    Case(
        "roles by hand: the master is killed or stopped",
        "the others end and say so",
        f"{_FAILURES}::test_roles_by_hand_stop_with_their_master",
    ),
    Case(
        "the disk is full, or read-only, or a role cannot write, when a checkpoint is due",
        "a line says so, what was written of it is removed, training goes on; the next is tried when due",
        "unit/test_run_checkpoints.py::test_one_that_cannot_be_written_is_said_and_the_next_is_tried_when_due",
    ),
    Case(
        "the same at the end of the run",
        "`launch` ends with exit code 1 and names the newest good checkpoint; `--resume` goes on from it",
        "unit/test_run_checkpoints.py::test_the_last_one_must_be_written",
    ),
    Case(
        "a file of the newest checkpoint is truncated or altered",
        "a line names it, and the checkpoint before is taken",
        "cluster/test_resumed_runs.py::test_an_altered_checkpoint_is_said_and_the_one_before_is_taken",
    ),
    Case(
        "the clock jumps",
        "nothing: nobody looks at it",
        "unit/test_heartbeat.py::test_a_clock_that_is_set_means_nothing",
    ),
    Case(
        "a whole host is stopped for a while, and goes on",
        "its roles accuse nobody; the others have taken them for frozen",
        "unit/test_heartbeat.py::test_a_master_that_was_stopped_itself_takes_nobody_for_frozen",
    ),
]


_INTRODUCTION = """\
# What happens when something fails

Under `launch`, training goes on by itself: all roles are stopped, a new cluster starts in the same run
folder, with a new port and a new secret, and takes up the newest checkpoint. A line on stderr says who
failed, how, and which steps are lost. They are taken again, and in sync mode the end is the same to the
last bit. The file `restarts.jsonl` in the run folder keeps these lines. The sections [checkpoint] and
[cluster] of the [configuration](config.md) say how much may be lost, and how often in a row a run is
started again without a new checkpoint in between.

SIGKILL, SIGTERM, SIGABRT, SIGSEGV and a kill by the kernel for want of memory are the same to the launcher:
a process that a signal has ended. It sees that at once. A frozen role is silent; the master notices, and
the other roles notice a silent master.

This page is written by `PYTHONPATH=tests python -m support.failure_table > docs/failures.md`, from the rows
that the tests bring about.

## Roles
"""


_CHAOS = """

## A hundred kills

`scripts/chaos --kills 100 --freeze 0.05 --pause 2 --seed 2026`, 2 trainers and 2 workers on 2 cores,
on 21 November 2026: a random role at a random moment, in six runs one after another, since a run has an end.

| role | start | step | evaluation | checkpoint | all | of them frozen |
|---|---:|---:|---:|---:|---:|---:|
| master | 5 | 10 | 1 | 1 | 17 | 1 |
| trainer 0 | 4 | 10 | 2 | 1 | 17 | 1 |
| trainer 1 | 2 | 9 | 1 | 4 | 16 | 1 |
| worker 0 | 5 | 14 | 2 | 4 | 25 | 0 |
| worker 1 | 5 | 10 | 3 | 7 | 25 | 1 |

All six ended with the tables, nets and optimizer states of an undisturbed run, bit for bit. After a kill, the
run was back at a step within 1.2 s (median; 1.5 s at most); after a freeze within 11.3 s, of which 10 s are
the timeout.
"""


def describe() -> str:
    """The page."""
    lines = [*_INTRODUCTION.splitlines()]
    for plan, rows in PLANS.items():
        test = f"[test_launch_goes_on[{plan}]](../tests/{TEST_FILE})"
        lines += ["", f"Tested by {test}, one after the other in one launch:", ""]
        lines += ["| role | how | when | `launch` says | noticed | lost |", "|---|---|---|---|---|---|"]
        lines += [
            f"| {row.role} | {row.how} | {row.phase} | {row.said} | {row.noticed} | {row.lost} |"
            for row in rows
        ]
    lines += ["", "## Everything else", "", "| what | then | test |", "|---|---|---|"]
    for case in CASES:
        file, _, name = case.test.partition("::")
        lines.append(f"| {case.what} | {case.happens} | [{name}](../tests/{file}) |")
    return "\n".join(lines) + _CHAOS


if __name__ == "__main__":
    print(describe(), end="")
