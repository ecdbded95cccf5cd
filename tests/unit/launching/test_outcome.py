"""How a role's process ended, and which failure came first."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from hybrid.topology import Role, RoleKind
from workers.launching.oom import oom_kills
from workers.launching.outcome import Cause, Child, Outcome, outcome_pipe

WORKER = Role(RoleKind.WORKER, 0)


def ended_child(exit_code: int, told: object = None) -> Child:
    """A child that has ended so, after it had said ``told``."""
    outcomes, writer = outcome_pipe()
    if told is None:
        os.close(writer)
    else:
        with Connection(writer, readable=False) as sender:
            sender.send(told)
    child = Child(WORKER, Path("worker.log"), outcomes, pid=7)
    child.end(exit_code)
    return child


def test_an_end_in_peace_is_no_failure() -> None:
    child = ended_child(0)
    assert child.has_ended
    assert child.failure is None


def test_what_a_role_says_of_itself_counts() -> None:
    outcome = Outcome("it is out of cheese", Cause.EXCEPTION)
    child = ended_child(1, told=outcome)
    assert (child.failure, child.has_told) == (outcome, True)
    assert not ended_child(1).has_told


@pytest.mark.parametrize(
    ("exit_code", "message", "cause"),
    [
        (-signal.SIGKILL, "was killed by SIGKILL", Cause.KILLED),
        (-signal.SIGSEGV, "was killed by SIGSEGV", Cause.KILLED),
        (3, "exited with code 3", Cause.SILENT),
    ],
)
def test_of_one_that_says_nothing_the_system_tells_how_it_ended(
    exit_code: int, message: str, cause: Cause
) -> None:
    failure = ended_child(exit_code).failure
    assert failure is not None
    assert (failure.message, failure.cause) == (f"worker 0 (pid 7) {message}; see worker.log", cause)


@pytest.mark.parametrize(
    ("earlier", "later", "said"),
    [
        ("", "a stack\nhybrid worker 0: the master is frozen\n", ": the master is frozen"),
        ("", "hybrid worker 0: the master is frozen\nsegments\n", ""),
        ("", "a user's own words, hybrid worker 0: among them\n", ""),
        ("hybrid worker 0: of an earlier start\n", "", ""),
        ("", f"{'x' * 10_000}\nhybrid worker 0: it is late\n", ": it is late"),
    ],
)
def test_of_one_that_could_only_write_it_the_log_tells_the_error(
    earlier: str, later: str, said: str, tmp_path: Path
) -> None:
    log = tmp_path / "worker.log"
    log.write_text(earlier)
    outcomes, writer = outcome_pipe()
    os.close(writer)
    child = Child(WORKER, log, outcomes, pid=7)
    log.write_text(earlier + later)
    child.end(1)
    assert child.failure is not None
    assert child.failure.message == f"worker 0 (pid 7) exited with code 1{said}; see {log}"


def test_a_kill_where_memory_ran_out_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    before = oom_kills()
    monkeypatch.setattr("workers.launching.outcome.oom_kills", lambda: before + 1)
    failure = ended_child(-signal.SIGKILL).failure
    assert failure is not None
    assert failure.message == (
        "worker 0 (pid 7) was killed by SIGKILL, probably since memory ran out; see worker.log"
    )
    other = ended_child(-signal.SIGSEGV).failure  # which the kernel does not use for that
    assert other is not None
    assert "memory" not in other.message
    assert (failure.cause, other.cause) == (Cause.STARVED, Cause.KILLED)


def test_an_abort_for_want_of_memory_is_told_by_its_log(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    outcomes, writer = outcome_pipe()
    os.close(writer)
    child = Child(WORKER, log, outcomes, pid=7)
    log.write_text(
        "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n"
    )
    child.end(-signal.SIGABRT)
    assert child.failure is not None
    assert child.failure.cause is Cause.STARVED
    assert "killed by SIGABRT, probably since memory ran out" in child.failure.message


def test_the_first_failure_is_the_one_that_is_no_echo() -> None:
    causes = [
        *(Cause.SILENT, Cause.ECHO, Cause.LOST, Cause.EXCEPTION, Cause.KILLED, Cause.KILLED),
        Cause.STOPPED,
    ]
    outcomes = [Outcome(cause.value, cause, at=at) for at, cause in enumerate(causes)]
    ordered = [(o.cause, o.at) for o in sorted(outcomes, key=lambda outcome: outcome.order)]
    assert ordered == [
        *((Cause.KILLED, 4), (Cause.KILLED, 5), (Cause.STOPPED, 6), (Cause.LOST, 2), (Cause.EXCEPTION, 3)),
        *((Cause.ECHO, 1), (Cause.SILENT, 0)),
    ]
