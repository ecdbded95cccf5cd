"""What happens when a role fails: docs/failures.md, from the rows that tests bring about one by one.

``PYTHONPATH=tests python -m support.failure_table`` prints the page.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path

from support.failure_plans import HOWS, PHASES, ROLES, Row

TESTS = Path(__file__).parents[1]
ROWS_FILE = "cli/test_failing_roles.py"
ROW_TEST = "test_the_run_comes_to_its_end"


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
_STOPPING = "cli/test_cli_stopping.py"
CASES = [
    Case(
        "`launch` is killed",
        "every process ends within a second, frozen ones too, and leaves no port, memory or temporary file; "
        "`launch --resume RUN` goes on",
        f"{_FAILURES}::test_nothing_outlives_a_launcher_that_was_killed",
    ),
    Case(
        "Ctrl-C, SIGTERM or SIGHUP to `launch`, or to all of its processes at once",
        "the step under way is finished and a checkpoint written, every process ends, exit code 130, and the "
        "command that goes on is printed",
        f"{_STOPPING}::test_a_signal_saves_and_stops_everything",
    ),
    Case(
        "the same, to a master that was started by hand",
        "the same; the other roles end in peace",
        f"{_STOPPING}::test_the_master_by_hand_saves_and_stops_all",
    ),
    Case(
        "the same for the second time, or step and checkpoint take longer than `cluster.rpc_timeout_seconds`",
        "every process ends at once, exit code 130; what the newest checkpoint does not hold is lost",
        f"{_STOPPING}::test_a_step_that_does_not_end",
    ),
    Case(
        "the same, and then a role fails",
        "`launch` ends with its failure and exit code 1; it starts nothing again",
        f"{_STOPPING}::test_a_step_that_does_not_end",
    ),
    Case(
        "the same before the first step",
        "every process ends at once, exit code 130; nothing is saved",
        f"{_STOPPING}::test_before_the_first_step_it_ends_at_once",
    ),
    Case(
        "Ctrl-C, SIGTERM or SIGHUP to `compare` or `run`",
        "every process ends at once, exit code 130: there is nothing to save",
        f"{_STOPPING}::test_a_comparison_has_nothing_to_save",
    ),
    Case(
        "SIGTERM or SIGHUP to a role under `launch` alone",
        "nothing: the launcher decides",
        "unit/launching/test_fork_server.py::test_signals_that_stop_a_launch_are_not_for_its_processes",
    ),
    Case(
        "an exception before the first step",
        "`launch` ends with it: it would come again",
        f"{_FAILURES}::test_an_exception_before_the_first_step_would_come_again",
    ),
    Case(
        "an exception in code of your own, at any time",
        "the line has your file, line and function, and for a net the layer; the log that it names has the "
        "stack, first the part in your code",
        f"{_FAILURES}::test_an_exception_before_the_first_step_would_come_again",
    ),
    Case(
        "nobody reads what `launch` prints any more (`| head`), or stdout is closed, or its disk is full",
        "the run goes on without it; a line on stderr says so, once",
        "unit/screen/test_lasting_output.py::test_a_run_goes_on_without_its_output",
    ),
    Case(
        "too few open files are allowed",
        "the soft limit is raised to the hard one; where that is too low, a line says how many a role needs, "
        "before anything starts",
        "unit/launching/test_open_files.py::test_every_command_that_starts_roles_says_so_before_it_starts_any",
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
        "the process that forks the roles is killed, or frozen for some seconds",
        "the roles end with it, and the run goes on as after any other kill",
        f"{_FAILURES}::test_launch_goes_on_where_all_its_processes_are_gone",
    ),
    Case(
        "that process cannot import what the roles need",
        "`launch` ends with one line: it would come again",
        "unit/launching/test_fork_server.py::test_what_cannot_be_imported_is_told_and_not_tried_again",
    ),
    Case(
        "the kernel ends a role since memory has run out",
        "as SIGKILL; the line says so where the kernel's count has gone up",
        f"{ROWS_FILE}::test_the_kernel_ends_a_role_for_want_of_memory",
    ),
    Case(
        "the same before the first step, as while the data are prepared",
        "`launch` ends with one line: it would come again",
        "unit/launching/test_restarts.py::test_memory_that_runs_out_before_the_first_step_would_run_out_again",
    ),
    Case(
        "an input file has changed since the run began",
        "`launch --resume` ends with one line that names it",
        "cli/test_cli_runs.py::test_files_of_every_format",
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
        "roles by hand: the master is killed",
        "the others end and say so",
        f"{_FAILURES}::test_roles_by_hand_stop_with_their_master",
    ),
    Case(
        "the disk is full, or read-only, or a role cannot write, when a checkpoint is due",
        "a line says so, what was written of it is removed, training goes on; the next is tried when due",
        "unit/jobs/test_checkpoints.py::test_one_that_cannot_be_written_is_said_and_the_next_is_tried_when_due",
    ),
    Case(
        "the same at the end of the run",
        "`launch` ends with exit code 1 and names the newest good checkpoint; `--resume` goes on from it",
        "unit/jobs/test_checkpoints.py::test_the_last_one_must_be_written",
    ),
    Case(
        "the disk is full, or read-only, when anything else of a run is written",
        "`launch` ends with exit code 1 and names the file; after making room, `--resume` goes on",
        "unit/run_folder/test_folder.py::test_a_full_disk_while_logging",
    ),
    Case(
        "the same when a restart is to be noted in `restarts.jsonl`",
        "the line that says who failed says that too, and the run is started again",
        "unit/launching/test_restarts.py::test_a_restart_that_finds_no_room_on_the_record_is_said_with_its_cause",
    ),
    Case(
        "the same, for the log of a role that fails",
        "`launch` says who failed, and how, as ever",
        "unit/launching/test_role_processes.py::test_it_tells_its_error",
    ),
    Case(
        "a file of the newest checkpoint is truncated or altered",
        "a line names it, and the checkpoint before is taken",
        "cluster/test_resumed_runs.py::test_an_altered_checkpoint_is_said_and_the_one_before_is_taken",
    ),
    Case(
        "the clock jumps",
        "nothing: nobody looks at it",
        "unit/joining/test_heartbeat.py::test_a_clock_that_is_set_means_nothing",
    ),
    Case(
        "a whole host is stopped for a while, and goes on",
        "its roles accuse nobody; the others have taken them for frozen",
        "unit/joining/test_heartbeat.py::test_a_master_that_was_stopped_itself_takes_nobody_for_frozen",
    ),
]


@dataclass(frozen=True, slots=True)
class Way:
    """A way to fail, for the page.

    Attributes:
        how: as in a row.
        said: by ``launch``.
        noticed, back: medians in seconds: until ``launch`` says so, and until the run is at a step again.
    """

    how: str
    said: str
    noticed: float
    back: float


# As support.failure_runs has measured them.
WAYS = [
    Way("SIGKILL", "worker 0 (pid N) was killed by SIGKILL; see LOG; ...", 0.0, 0.5),
    Way("SIGSTOP", "worker 0 (host H, pid N) is frozen: no sign of life for 10 s ...", 0.3, 0.7),
    Way(
        "ValueError",
        "trainer 0 on H: my_net.py:17, in forward: ValueError: ... (at step N); see LOG; ...",
        0.1,
        0.5,
    ),
    Way("MemoryError", "worker 0: MemoryError: ...; see LOG; ...", 0.1, 0.5),
]
_MEASURED_ON = "22 November 2026"


_INTRODUCTION = """\
# What happens when something fails

Under `launch`, training goes on by itself: all roles are stopped, a new cluster starts in the same run
folder, with a new port and a new secret, and takes up the newest checkpoint. A line on stderr says who
failed, how, and which steps are lost. They are taken again, and in sync mode the end is the same to the
last bit. The file `restarts.jsonl` in the run folder keeps these lines. The sections [checkpoint] and
[cluster] of the [configuration](config.md) say how much may be lost, and how often in a row a run is
started again without a new checkpoint in between.

SIGKILL, SIGABRT, SIGSEGV and, once a step has been taken, a kill by the kernel for want of memory
are the same to the launcher: a process that a signal has ended. A frozen role (SIGSTOP) is silent.

This page is written by `PYTHONPATH=tests python -m support.failure_table > docs/failures.md`, from the rows
that the tests bring about.

## Every role, in every way, at every moment

"""

_CONSEQUENCES = """
- *starts again*: from the beginning. Nothing is lost, since no step had been taken.
- *goes on*: from the newest checkpoint, or from the beginning where there is none yet. The steps since then
  are lost, and taken again.
- *ends*: `launch` ends with exit code 1. No step had been taken, and an exception before the first one would
  come again.
- *finished*: the run has its result, and nothing is lost; `launch` ends with exit code 0.

Each cell is brought about by a [test](../tests/{rows}), which for worker and SIGKILL has the name
`[worker SIGKILL]`. One for each way to fail is part of `scripts/test`, the others of `scripts/test -m long`.
The exceptions of a trainer come up in a call that the master has made, as those of a net of your own do,
those of the others in their main thread. Out of memory is Python's `MemoryError` here. Where the kernel ends
a role for want of memory, it is as SIGKILL, and tested there with every role.

| how | `launch` says | it says so after | the run is at a step again after |
|---|---|---:|---:|
"""

_MEASURED = """
The times are medians over all roles and moments, with 2 trainers and 2 workers on 2 cores, {on}.
Those of SIGSTOP come on top of `cluster.heartbeat_timeout_seconds`.

## Who says which it was

Five notice failures, several of them the same one, in any order:

```
what fails              who notices                                       what comes of it
──────────              ───────────                                       ────────────────
a process ends ───────► the launcher, which sees how ─────────────────────────────────────┐
a role raises ────────► itself: it tells the launcher, by a pipe ─────────────────────────┤
     │ farewell                                                                           │
     ▼                                                                                    │
its signs of life end ► the master's Watch ──── alarm ────────┐                           │
                                                              ▼                           │
a call to it fails ───► the master: of several calls, ────► diagnose ──► the master ends ─┤
                        gather takes the first to fail                      │ why         │
                                                                            ▼             │
the master is gone, ──► the Pulse of every other role ─ alarm ─► they end ────────────────┤
frozen, or says stop                                                                      ▼
                                             what launch says ◄──────────────────── Outcome.order
```

In each process the first error that reaches the main thread ends it. Between them, three choose. `gather`
takes the first of the master's calls to fail. `diagnose` then asks every role for a sign of life: one that
gives none is the cause, whoever has complained of it; so is one that the Watch has lost. `Outcome.order` puts
first who was killed, then who was asked to stop, then who tells something of its own, then who repeats what
it was told, and last who has said nothing; of equals, the earliest. Roles by hand have no launcher: there all
say what the master has found.

## Everything else

| what | then | test |
|---|---|---|
"""


_CHAOS = """
## A hundred kills

`scripts/chaos --kills 100 --freeze 0.05 --pause 2 --seed 2026`, 2 trainers and 2 workers on 2 cores,
on 22 November 2026: a random role at a random moment, in eight runs one after another, since a run
has an end.

| role | start | step | evaluation | checkpoint | all | of them frozen |
|---|---:|---:|---:|---:|---:|---:|
| master | 5 | 10 | 0 | 4 | 19 | 1 |
| trainer 0 | 0 | 13 | 0 | 1 | 14 | 2 |
| trainer 1 | 1 | 8 | 3 | 2 | 14 | 0 |
| worker 0 | 3 | 21 | 2 | 3 | 29 | 0 |
| worker 1 | 0 | 21 | 0 | 3 | 24 | 1 |

All eight ended with the tables, nets and optimizer states of an undisturbed run, bit for bit. After a kill,
the run was back at a step within 0.5 s (median, and at most); after a freeze within 10.8 s, of which 10 s are
the timeout.
"""


def describe() -> str:
    """The page."""
    consequences = _CONSEQUENCES.format(rows=ROWS_FILE)
    measured = _MEASURED.format(on=_MEASURED_ON)
    return "".join([_INTRODUCTION, _rows(), consequences, _ways(), measured, _cases(), _CHAOS])


def _rows() -> str:
    heads = " | ".join(map(_title, HOWS))
    lines = [f"| role | when | {heads} |", "|---" * (2 + len(HOWS)) + "|"]
    for role, phase in product(ROLES, PHASES):
        cells = " | ".join(_consequence(Row(role, how, phase)) for how in HOWS)
        lines.append(f"| {role} | {phase} | {cells} |")
    return "\n".join(lines) + "\n"


def _title(how: str) -> str:
    return {"ValueError": "exception", "MemoryError": "out of memory"}.get(how, how)


def _consequence(row: Row) -> str:
    if row.ends_launch:
        return "ends"
    return {"start": "starts again", "shutdown": "finished"}.get(row.phase, "goes on")


def _ways() -> str:
    return "".join(
        f"| {_title(way.how)} | `{way.said}` | {way.noticed:.1f} s | {way.back:.1f} s |\n" for way in WAYS
    )


def _cases() -> str:
    rows = []
    for case in CASES:
        file, _, name = case.test.partition("::")
        rows.append(f"| {case.what} | {case.happens} | [{name}](../tests/{file}) |\n")
    return "".join(rows)


if __name__ == "__main__":
    print(describe(), end="")
