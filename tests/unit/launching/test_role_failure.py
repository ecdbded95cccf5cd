"""How a role failed, as the role reports it or as the launcher observes it, and which failure came first."""

import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from hybrid import errors, transport
from hybrid.topology import MASTER, Role, RoleKind
from workers.exit_codes import Cause
from workers.launching.role_failure import RoleFailure, RoleProcess, describe, oom_kills
from workers.rendezvous.interrupt import EndedRoleError, LostRoleError, StoppedError
from workers.roles.master import UnexpectedError

WORKER, LOG = Role(RoleKind.WORKER, 0), Path("worker.log")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def ended_process(exit_code: int, reported: object = None, logged: str = "") -> RoleProcess:
    """Return the process of a role that has ended, after a report to the launcher and a line in its log."""
    reader, writer = os.pipe()
    child = RoleProcess(WORKER, LOG, Connection(reader, writable=False), pid=7)
    with Connection(writer, readable=False) as sender:
        if reported is not None:
            sender.send(reported)
    if logged:
        with LOG.open("a") as file:
            file.write(logged)
    child.end(exit_code)
    return child


def failure_of(exit_code: int, logged: str = "") -> RoleFailure:
    """Return the failure of a role that has reported nothing."""
    failure = ended_process(exit_code, logged=logged).failure
    assert failure is not None
    return failure


def test_a_normal_end_is_no_failure() -> None:
    child = ended_process(0)
    assert (child.has_ended, child.failure) == (True, None)


def test_the_report_of_a_role_counts() -> None:
    failure = RoleFailure("it is out of cheese", Cause.EXCEPTION)
    child = ended_process(1, reported=failure)
    assert (child.failure, child.has_reported) == (failure, True)
    assert not ended_process(1).has_reported


@pytest.mark.parametrize(
    ("exit_code", "message", "cause"),
    [
        (-signal.SIGKILL, "was killed by SIGKILL", Cause.KILLED),
        (-signal.SIGSEGV, "was killed by SIGSEGV", Cause.KILLED),
        (3, "exited with code 3", Cause.SILENT),
    ],
)
def test_without_a_report_the_exit_code_tells_the_cause(exit_code: int, message: str, cause: Cause) -> None:
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
def test_without_a_report_the_log_tells_the_error(earlier: str, later: str, said: str) -> None:
    LOG.write_text(earlier)
    assert failure_of(1, later).message == f"worker 0 (pid 7) exited with code 1{said}; see worker.log"


def test_a_kill_by_the_kernel_mentions_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    before = oom_kills()
    monkeypatch.setattr("workers.launching.role_failure.oom_kills", lambda: before + 1)
    killed, other = failure_of(-signal.SIGKILL), failure_of(-signal.SIGSEGV)
    assert killed.message == (
        "worker 0 (pid 7) was killed by SIGKILL, probably since memory ran out; see worker.log"
    )
    assert "memory" not in other.message, "the kernel does not use this signal for that"
    assert (killed.cause, other.cause) == (Cause.STARVED, Cause.KILLED)


def test_an_abort_without_memory_is_found_in_the_log() -> None:
    what = "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n"
    aborted = failure_of(-signal.SIGABRT, what)
    assert aborted.cause is Cause.STARVED
    assert "killed by SIGABRT, probably since memory ran out" in aborted.message


def test_the_first_cause_sorts_first() -> None:
    causes = [
        *(Cause.SILENT, Cause.ECHO, Cause.LOST, Cause.EXCEPTION, Cause.KILLED, Cause.KILLED),
        Cause.STOPPED,
    ]
    outcomes = [RoleFailure(cause.value, cause, at=at) for at, cause in enumerate(causes)]
    ordered = [(o.cause, o.at) for o in sorted(outcomes, key=lambda outcome: outcome.order)]
    assert ordered == [
        *((Cause.KILLED, 4), (Cause.KILLED, 5), (Cause.STOPPED, 6), (Cause.LOST, 2), (Cause.EXCEPTION, 3)),
        *((Cause.ECHO, 1), (Cause.SILENT, 0)),
    ]


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
def test_kills_are_counted_in_every_kind_of_control_group(
    files: dict[str, str], kills: int, tmp_path: Path
) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert oom_kills(tmp_path) == kills


def remote(kind: str, is_users: bool) -> transport.RemoteError:
    return transport.RemoteError(WORKER, transport.Failure("bad", kind, is_users, "host", not is_users))


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
        (transport.LostError(WORKER, "no answer"), Cause.LOST),
        (LostRoleError("worker 0 is frozen"), Cause.LOST),
        (StoppedError("stopped by the master"), Cause.ECHO),
        (EndedRoleError("worker 0 has ended: KeyError"), Cause.ECHO),
        (KeyError("x"), Cause.EXCEPTION),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value.value,
)
def test_a_report_has_the_cause_of_the_error(error: Exception, cause: Cause) -> None:
    assert describe(MASTER, error).cause is cause


def test_a_report_is_one_line() -> None:
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
def test_a_report_names_the_log_with_the_traceback(error: Exception, role: Role | None) -> None:
    assert describe(MASTER, error).logged_by == role
