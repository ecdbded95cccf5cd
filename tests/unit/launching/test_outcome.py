"""How a role's process ended, which failure came first, and what the kernel says of memory."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from hybrid import errors, wire
from hybrid.topology import MASTER, Role, RoleKind
from workers.joining.alarm import EndedRoleError, LostRoleError, StoppedError
from workers.launching.description import describe
from workers.launching.oom import oom_kills
from workers.launching.outcome import Cause, Child, Outcome, outcome_pipe
from workers.roles.diagnosis import UnexpectedError

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


def remote(kind: str, is_users: bool) -> wire.RemoteError:
    return wire.RemoteError(WORKER, wire.Failure("bad", kind, is_users, "host", not is_users))


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (errors.ConfigError("train.epochs", "is bad"), Cause.REFUSED),
        (errors.CheckpointError("altered"), Cause.REFUSED),
        (remote("DataError", True), Cause.REFUSED),
        (remote("NonFiniteError", True), Cause.REFUSED),
        (remote("ClusterError", True), Cause.LOST),
        (remote("KeyError", False), Cause.EXCEPTION),
        (UnexpectedError(remote("KeyError", False), "at step 3"), Cause.EXCEPTION),
        (errors.ClusterError("missing after 60 s"), Cause.LOST),
        (wire.LostError(WORKER, "no answer"), Cause.LOST),
        (LostRoleError("worker 0 is frozen"), Cause.LOST),
        (StoppedError("stopped by the master"), Cause.ECHO),
        (EndedRoleError("worker 0 has ended: KeyError"), Cause.ECHO),
        (KeyError("x"), Cause.EXCEPTION),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value.value,
)
def test_a_role_tells_what_kind_of_error_ends_it(error: Exception, cause: Cause) -> None:
    assert describe(MASTER, error).cause is cause


def test_a_role_tells_its_error_in_one_line() -> None:
    assert describe(MASTER, KeyError("x")).message == "master: KeyError: 'x'"
    assert describe(MASTER, errors.DataError("one\n  two")).message == "one two"


@pytest.mark.parametrize(
    ("error", "role"),
    [
        (remote("KeyError", False), WORKER),
        (UnexpectedError(remote("KeyError", False), "at step 3"), WORKER),
        (remote("ConfigError", True), None),
        (errors.ConfigError("train.epochs", "is bad"), None),
        (KeyError("x"), MASTER),
    ],
)
def test_it_says_whose_log_has_the_stack(error: Exception, role: Role | None) -> None:
    assert describe(MASTER, error).logged_by == role


GROUPS: list[tuple[str, dict[str, str], int]] = [
    (
        "version 2",
        {"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/memory.events": "oom 9\noom_kill 3\n"},
        3,
    ),
    (
        "version 1",
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/job\n4:memory:/job\n0::/\n",
            "sys/fs/cgroup/memory/job/memory.oom_control": "under_oom 0\noom_kill 2\n",
            "sys/fs/cgroup/memory/memory.oom_control": "oom_kill 7\n",
        },
        2,
    ),
    (
        "seen from inside a container",
        {"proc/self/cgroup": "0::/../../job\n", "sys/fs/cgroup/memory.events": "oom_kill 5\n"},
        5,
    ),
    ("of the machine", {"proc/vmstat": "oom_kill 6\n"}, 6),
    ("nowhere", {}, 0),
]


@pytest.mark.parametrize(("files", "kills"), [case[1:] for case in GROUPS], ids=[case[0] for case in GROUPS])
def test_the_kernels_count_is_read_where_it_is(files: dict[str, str], kills: int, tmp_path: Path) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert oom_kills(tmp_path) == kills
