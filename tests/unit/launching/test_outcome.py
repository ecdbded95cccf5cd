"""How a role's process ended, and which failure came first."""

import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from hybrid.topology import Role, RoleKind
from workers.exit_codes import Cause
from workers.launching.oom import oom_kills
from workers.launching.role_outcome import Child, Outcome, outcome_pipe

WORKER, LOG = Role(RoleKind.WORKER, 0), Path("worker.log")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def ended_child(exit_code: int, told: object = None, logged: str = "") -> Child:
    """A child that has ended so, after it had said ``told`` to the launcher and ``logged`` to its log."""
    outcomes, writer = outcome_pipe()
    child = Child(WORKER, LOG, outcomes, pid=7)
    with Connection(writer, readable=False) as sender:
        if told is not None:
            sender.send(told)
    if logged:
        with LOG.open("a") as file:
            file.write(logged)
    child.end(exit_code)
    return child


def failure_of(exit_code: int, logged: str = "") -> Outcome:
    """What is known of a child that has told nothing."""
    failure = ended_child(exit_code, logged=logged).failure
    assert failure is not None
    return failure


def test_an_end_in_peace_is_no_failure() -> None:
    child = ended_child(0)
    assert (child.has_ended, child.failure) == (True, None)


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
    failure = failure_of(exit_code)
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
def test_of_one_that_could_only_write_it_the_log_tells_the_error(earlier: str, later: str, said: str) -> None:
    LOG.write_text(earlier)
    assert failure_of(1, later).message == f"worker 0 (pid 7) exited with code 1{said}; see worker.log"


def test_a_kill_where_memory_ran_out_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    before = oom_kills()
    monkeypatch.setattr("workers.launching.role_outcome.oom_kills", lambda: before + 1)
    killed, other = failure_of(-signal.SIGKILL), failure_of(-signal.SIGSEGV)
    assert killed.message == (
        "worker 0 (pid 7) was killed by SIGKILL, probably since memory ran out; see worker.log"
    )
    assert "memory" not in other.message, "the kernel does not use this signal for that"
    assert (killed.cause, other.cause) == (Cause.STARVED, Cause.KILLED)


def test_an_abort_for_want_of_memory_is_told_by_its_log() -> None:
    what = "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n"
    aborted = failure_of(-signal.SIGABRT, what)
    assert aborted.cause is Cause.STARVED
    assert "killed by SIGABRT, probably since memory ran out" in aborted.message


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
