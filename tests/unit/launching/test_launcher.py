"""Which failures are followed by another start; messages; and when a launch uses a network namespace."""

import errno
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from hybrid.config import ClusterSection, DataSection, RunConfig, TableSection
from hybrid.errors import ClusterError, OutageError
from hybrid.storage import files
from hybrid.storage.remote_path import parse_path
from workers.cluster_task import TrainTask
from workers.exit_codes import Cause, ExitCode, ReportedError
from workers.launching.fork_server import ForkServer
from workers.launching.launcher import Restarts, launch, namespace_hint, uses_namespace
from workers.launching.role_processes import RoleFailure, RoleProcesses
from workers.run_folder.run_access import RESTARTS_FILE, command_name, describe_saved_state

KILLED = RoleFailure("worker 0 was killed", Cause.KILLED)


def log_steps(run: Path, last: int) -> None:
    """Log steps 1 to ``last`` again, as a resumed run does."""
    lines = [{"kind": "train", "step": step} for step in range(1, last + 1)]
    path = run / "metrics.jsonl"
    path.unlink(missing_ok=True)
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"kind": "tra')


def write_checkpoint(run: Path, step: int, suffix: str = "") -> None:
    folder = run / f"checkpoints/step-{step:08d}{suffix}"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")


@pytest.fixture
def restarts(tmp_path: Path) -> Restarts:
    return Restarts(tmp_path, 3)


def after(restarts: Restarts, failure: RoleFailure = KILLED) -> str:
    """Return the message about a restart, without the message of the failure before it."""
    line = restarts.plan_restart(failure)
    assert line.startswith(f"{failure.message}; ")
    return line.removeprefix(f"{failure.message}; ")


def test_steps_after_the_newest_checkpoint_are_lost(restarts: Restarts, tmp_path: Path) -> None:
    assert after(restarts) == "nothing is lost, starting from the beginning"
    log_steps(tmp_path, 5)
    assert after(restarts) == "steps 0 to 4 are lost, starting from the beginning"
    log_steps(tmp_path, 8)
    write_checkpoint(tmp_path, 6)
    write_checkpoint(tmp_path, 8, suffix=".partial")
    assert after(restarts) == "steps 6 to 7 are lost, resuming from step 6"
    # A start that is killed before its first step leaves the log as it was.
    assert after(restarts) == "nothing is lost, resuming from step 6"
    write_checkpoint(tmp_path, 8)
    assert after(restarts) == "nothing is lost, resuming from step 8"


@pytest.mark.parametrize(("cause", "maximum"), [(Cause.KILLED, 0), (Cause.REFUSED, 3)])
def test_message_without_restart_is_the_cause(cause: Cause, maximum: int, tmp_path: Path) -> None:
    log_steps(tmp_path, 5)
    with pytest.raises(ClusterError, match=r"^a message$"):
        Restarts(tmp_path, maximum).plan_restart(RoleFailure("a message", cause))
    assert not (tmp_path / RESTARTS_FILE).exists()


def test_restarts_end_with_the_first_cause_since_the_last_checkpoint(tmp_path: Path) -> None:
    restarts = Restarts(tmp_path, 2)
    restarts.plan_restart(KILLED)
    write_checkpoint(tmp_path, 4)
    first = RoleFailure("worker 1 was killed", Cause.KILLED)
    restarts.plan_restart(first)
    restarts.plan_restart(RoleFailure("trainer 0 was killed", Cause.KILLED))
    with pytest.raises(ClusterError) as ended:
        restarts.plan_restart(RoleFailure("trainer 1 was killed", Cause.KILLED))
    assert str(ended.value).startswith("worker 1 was killed; ")
    assert "cluster.max_restarts" in str(ended.value)


@pytest.mark.parametrize("cause", [Cause.LOST, Cause.SILENT, Cause.ECHO])
def test_other_causes_are_followed_by_a_restart(cause: Cause, restarts: Restarts) -> None:
    assert after(restarts, RoleFailure("it failed", cause)).startswith("nothing is lost")


def test_a_resumed_run_has_finished_with_a_new_result(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text("{}")
    restarts = Restarts(tmp_path, 3)
    assert not restarts.is_finished(KILLED)
    (tmp_path / "result.json").unlink()
    assert not restarts.is_finished(KILLED)
    (tmp_path / "result.json").write_text('{"auc": 1}')
    assert restarts.is_finished(KILLED)


def test_failure_without_a_store(restarts: Restarts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "find_entry", Mock(side_effect=OutageError("s3://runs: is down")))
    for decide in (restarts.is_finished, restarts.plan_restart, restarts.code_of):
        with pytest.raises(ReportedError, match=r"^worker 0 was killed; s3://runs: is down$") as ended:
            decide(KILLED)
        assert ended.value.code is ExitCode.AGAIN
    assert describe_saved_state(tmp_path, "launch") == "s3://runs: is down"


def test_a_record_that_cannot_be_written_does_not_stop_the_run(restarts: Restarts, tmp_path: Path) -> None:
    (tmp_path / RESTARTS_FILE).mkdir()
    assert f"; {tmp_path / RESTARTS_FILE}: " in after(restarts)


def test_saved_state_of_a_stopped_run(tmp_path: Path) -> None:
    run = tmp_path / "my run"
    again = f"to resume: {command_name()} launch --resume '{run}'"
    assert describe_saved_state(run, "launch") == "nothing is saved"
    run.mkdir()
    log_steps(run, 5)
    assert describe_saved_state(run, "launch") == "nothing is saved; steps 0 to 4 are lost"
    write_checkpoint(run, 4)
    assert describe_saved_state(run, "launch") == f"step 4 is saved; steps 4 to 4 are lost; {again}"
    write_checkpoint(run, 6)
    assert describe_saved_state(run, "launch") == f"step 6 is saved; {again}"


def test_restarts_are_recorded(restarts: Restarts, tmp_path: Path) -> None:
    log_steps(tmp_path, 5)
    write_checkpoint(tmp_path, 4)
    restarts.plan_restart(KILLED)
    restarts.plan_restart(RoleFailure("frozen", Cause.LOST))
    lines = [json.loads(line) for line in (tmp_path / RESTARTS_FILE).read_text().splitlines()]
    assert all(line.pop("time") > 0 for line in lines)
    assert lines == [
        {"cause": "killed", "message": "worker 0 was killed", "step": 5, "resumed_step": 4},
        {"cause": "lost", "message": "frozen", "step": 4, "resumed_step": 4},
    ]


@pytest.mark.parametrize("cause", [Cause.EXCEPTION, Cause.STARVED])
def test_some_causes_end_a_run_only_at_its_start(cause: Cause, restarts: Restarts, tmp_path: Path) -> None:
    error = RoleFailure("trainer 0: KeyError: 'x'", cause)
    with pytest.raises(ClusterError, match=r"^trainer 0: KeyError: 'x'"):
        restarts.plan_restart(error)
    log_steps(tmp_path, 5)
    assert after(restarts, error) == "steps 0 to 4 are lost, starting from the beginning"
    with pytest.raises(ClusterError):
        restarts.plan_restart(error)  # the start before left no step of its own


HERE = Path("runs/a")


@pytest.mark.parametrize(
    "keys", [{}, *({"master": each} for each in ("localhost", "127.3.2.1", "::1"))], ids=str
)
def test_namespace_is_used_if_all_connections_stay_on_loopback(keys: dict[str, Any]) -> None:
    assert uses_namespace(RunConfig(cluster=ClusterSection(**keys)), HERE)


@pytest.mark.parametrize(
    "section",
    [
        {"cluster": ClusterSection(master="10.0.0.1")},
        {"cluster": ClusterSection(master="node0")},
        {"cluster": ClusterSection(interface="eth0")},
        {"cluster": ClusterSection(namespace="off")},
        {"cluster": ClusterSection(loggers=("tensorboard", "my_module:Logger"))},
        {"data": DataSection(cache_folder="s3://bucket/prepared")},
        {"data": DataSection(format="csv", path=("a.csv", "gs://bucket/b.csv"))},
        {"data": DataSection(format="csv", path=("a.csv",), test_path=("abfs://bucket/b.csv",))},
        {"data": DataSection(path=("a.csv",), joins=("table('s3://bucket/b.csv', key = 'item')",))},
        {"tables": {"item": TableSection(), "user": TableSection(initial="s3://bucket/rows.npy")}},
    ],
    ids=str,
)
def test_other_hosts_and_stores_need_the_network_of_the_machine(section: dict[str, Any]) -> None:
    assert not uses_namespace(RunConfig(**section), HERE)
    assert not uses_namespace(RunConfig(), parse_path("s3://bucket/runs/copy"))


def test_a_server_refused_a_namespace_is_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The refusal may have taken its user id."""
    servers: list[ForkServer] = []

    def refuse(server: ForkServer) -> None:
        servers.append(server)
        raise PermissionError(errno.EPERM, "refused")

    def start(roles: RoleProcesses, *_: object) -> None:
        servers.append(roles.server)
        assert [each.is_running() for each in servers] == [False, True]
        raise ClusterError("no process starts")

    monkeypatch.setattr(ForkServer, "isolate", refuse)
    monkeypatch.setattr(ForkServer, "preload", lambda _: None)
    monkeypatch.setattr(RoleProcesses, "start", start)
    config = RunConfig(cluster=ClusterSection(max_restarts=0))
    with pytest.raises(ReportedError, match="no process starts"):
        launch(config, tmp_path, TrainTask(tmp_path, False, 0.0), lock=2)


@pytest.mark.parametrize(
    ("failure", "has_hint"),
    [
        ("trainer 0: OSError: [Errno 101] Network is unreachable", True),
        ("trainer 0: gaierror: [Errno -3] Temporary failure in name resolution", True),
        ("trainer 0: OSError: curlCode: 6, Could not resolve hostname", True),
        ("trainer 0: ValueError: shapes differ", False),
    ],
)
def test_failures_for_want_of_a_network_name_the_remedy(failure: str, has_hint: bool) -> None:
    assert ('cluster.namespace = "off"' in namespace_hint(failure)) == has_hint
