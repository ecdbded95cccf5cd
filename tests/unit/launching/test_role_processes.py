"""How a role failed, as it reports it or as the launcher observes it, and which failure came first."""

import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from support.fork_context import fork_context

from hybrid import errors, transport
from hybrid.config import ClusterSection, RunConfig
from hybrid.security.secret import Secret
from hybrid.topology import MASTER, Role, RoleKind
from workers.cluster_task import ScriptTask
from workers.console import Verbosity
from workers.exit_codes import Cause, ExitCode
from workers.launching import role_processes
from workers.launching.fork_server import ProcessEnd
from workers.launching.role_processes import RoleFailure, RoleProcess, count_oom_kills, describe_failure
from workers.rendezvous.host_setup import listen
from workers.rendezvous.interrupt import describe_final_error
from workers.rendezvous.secure_channel import LARGEST_FRAME
from workers.run_folder.run_access import log_path

WORKER, LOG, RUN = Role(RoleKind.WORKER, 0), Path("worker.log"), Path("run")
SECONDS = 60.0
INVALID = RunConfig(cluster=ClusterSection(interface="none0"))  # a master ends at once on it


@pytest.fixture(autouse=True)
def _working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def make_failure(exit_code: int, logged: str = "", report: object = None) -> RoleFailure:
    """Return the failure of a role that has ended, after a line in its log."""
    process = RoleProcess(WORKER, LOG, pid=7)
    if logged:
        with LOG.open("a") as file:
            file.write(logged)
    process.record_end(ProcessEnd(str(WORKER), exit_code, report))
    assert process.has_ended
    assert process.failure is not None
    return process.failure


def test_a_report_counts_and_a_normal_end_is_no_failure() -> None:
    failure, process = RoleFailure("it is out of cheese", Cause.EXCEPTION), RoleProcess(WORKER, LOG)
    process.record_end(ProcessEnd(str(WORKER), 0))
    assert (process.has_ended, process.failure) == (True, None)
    assert make_failure(1, report=failure) is failure


@pytest.mark.parametrize(
    ("exit_code", "message", "cause"),
    [
        (-signal.SIGKILL, "was killed by SIGKILL", Cause.KILLED),
        (-signal.SIGSEGV, "was killed by SIGSEGV", Cause.KILLED),
        (3, "exited with code 3", Cause.SILENT),
    ],
)
def test_without_a_report_the_exit_code_has_the_cause(exit_code: int, message: str, cause: Cause) -> None:
    failure = make_failure(exit_code)
    assert (failure.message, failure.cause) == (f"worker 0 (pid 7) {message}; see worker.log", cause)


@pytest.mark.parametrize(
    ("earlier", "later", "text"),
    [
        ("", "a stack\nhybrid worker 0: the master is frozen\n", ": the master is frozen"),
        ("", "hybrid worker 0: the master is frozen\nsegments\n", ""),
        ("", "a user's own words, hybrid worker 0: among them\n", ""),
        ("hybrid worker 0: of an earlier start\n", "", ""),
        ("", f"{'x' * 10_000}\nhybrid worker 0: it is late\n", ": it is late"),
    ],
)
def test_without_a_report_the_log_has_the_error(earlier: str, later: str, text: str) -> None:
    LOG.write_text(earlier)
    assert make_failure(1, later).message == f"worker 0 (pid 7) exited with code 1{text}; see worker.log"


def test_a_kill_by_the_kernel_mentions_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    before = count_oom_kills()
    monkeypatch.setattr(role_processes, "count_oom_kills", lambda: before + 1)
    killed, other = make_failure(-signal.SIGKILL), make_failure(-signal.SIGSEGV)
    assert "SIGKILL, probably since memory ran out" in killed.message
    assert "memory" not in other.message, "the kernel does not use this signal for that"
    assert (killed.cause, other.cause) == (Cause.STARVED, Cause.KILLED)


def test_an_abort_without_memory_is_found_in_the_log() -> None:
    what = "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n"
    aborted = make_failure(-signal.SIGABRT, what)
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


V2 = {"proc/self/mountinfo": "29 28 0:26 / /groups rw - cgroup2 cgroup2 rw\n"}
V1 = {"proc/self/mountinfo": "35 31 0:32 / /groups rw - cgroup cgroup rw,memory\n"}
GROUPS: list[tuple[str, dict[str, str], int]] = [
    ("own", V2 | {"proc/self/cgroup": "0::/job\n", "groups/job/memory.events": "oom 9\noom_kill 3\n"}, 3),
    ("root", V2 | {"proc/self/cgroup": "0::/\n", "groups/memory.events": "oom_kill 5\n"}, 5),
    ("v1", V1 | {"proc/self/cgroup": "4:memory:/job\n", "groups/job/memory.oom_control": "oom_kill 2\n"}, 2),
    ("host", V1 | {"proc/self/cgroup": "4:memory:/job\n", "proc/vmstat": "oom_kill 6\n"}, 6),
    ("nowhere", {}, 0),
]


@pytest.mark.parametrize(("files", "kills"), [case[1:] for case in GROUPS], ids=[case[0] for case in GROUPS])
def test_kills_are_counted_by_group_or_machine(files: dict[str, str], kills: int, tmp_path: Path) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert count_oom_kills(tmp_path) == kills


def remote(kind: str, is_self_contained: bool) -> transport.RemoteError:
    return transport.RemoteError(
        WORKER, transport.Failure("bad", kind, is_self_contained, "host", not is_self_contained)
    )


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (remote("KeyError", False), f"{remote('KeyError', False)}; see run/logs/worker-0.log"),
        (remote("ConfigError", True), str(remote("ConfigError", True))),
        (errors.DataError("one\n  two"), "one two"),
        (KeyError("x"), "master: KeyError: 'x'; see run/logs/master.log"),
    ],
)
def test_a_report_is_one_line_and_names_the_log_with_the_traceback(error: Exception, message: str) -> None:
    assert describe_failure(MASTER, error, RUN).message == message


def test_a_report_is_short_enough_for_a_frame_of_the_rendezvous() -> None:
    error = errors.DataError("é" * LARGEST_FRAME)
    for message in (describe_failure(MASTER, error, RUN).message, describe_final_error(error)):
        assert 1000 < len(message.encode()) < LARGEST_FRAME // 4


def _run_master(report: Callable[[RoleFailure], None], folder: Path, most_bytes: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, hard))  # as a full disk
    task = ScriptTask("train.py", ())
    with listen("127.0.0.1", 0) as listener:
        role_processes.run_role(
            MASTER, INVALID, folder, task, Secret.fresh(), Verbosity.NORMAL, listener, report
        )


def end_of_master(folder: Path, most_bytes: int = 1 << 20) -> tuple[int, RoleFailure]:
    """Return the exit code and the report of a master whose files may have this size."""
    context = fork_context()
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_run_master, args=(writer.send, folder, most_bytes))
    process.start()
    writer.close()
    process.join(SECONDS)
    return process.exitcode or 0, reader.recv()


@pytest.mark.parametrize("most_bytes", [1 << 20, 0], ids=["room", "no room in its log"])
def test_a_role_reports_its_error(most_bytes: int, tmp_path: Path) -> None:
    code, report = end_of_master(tmp_path, most_bytes)
    assert (code, report.cause) == (ExitCode.FAILED, Cause.REFUSED)
    assert report.message.startswith("cluster.interface = 'none0': this host has ")
    assert ("Traceback" in log_path(tmp_path, MASTER).read_text()) == bool(most_bytes)


def test_a_role_reports_an_unwritable_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = log_path(tmp_path, MASTER)
    log.parent.touch()
    code, report = end_of_master(tmp_path)
    assert report.message.startswith(f"{log}: cannot be written: File exists")
    assert (code, report.cause) == (ExitCode.FAILED, Cause.REFUSED)
    assert capfd.readouterr().err == ""
