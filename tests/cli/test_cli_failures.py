"""Clusters that cannot start or lose a role: the reported role, the delay, and what is left behind.

Two of the runs serve metrics, from ``hybrid launch`` and from a master that was started by hand.
The last tests are about the network of roles.
"""

import os
import re
import signal
import subprocess
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.commands import (
    COMMAND_SECONDS,
    DOING,
    HYBRID,
    ONE_EACH,
    ROOT,
    TRAINER,
    WORKER,
    Ended,
    by_hand,
    eventually,
    free_port,
    output_of,
    run,
    settings,
    started,
)
from support.namespaces import HAS_NAMESPACES, needs_namespaces

from workers.cli import main

STOP_SECONDS = 5.0
ROLES = ("master", "trainer 0", "worker 0")
# Docker's default profile and some distributions forbid namespaces.
FORBID = 'echo 0 >/proc/sys/user/max_net_namespaces && exec "$@"'


def listening(connections: Iterable[Any]) -> set[int]:
    """Return the ports of listening sockets."""
    return {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}


def network_of(process: psutil.Process | None = None) -> int:
    return os.stat(f"/proc/{process.pid if process else 'self'}/ns/net").st_ino


def last_line(ended: Ended) -> str:
    """Return the last message of a role; torch may have logged broken connections before."""
    return ended.stderr.rpartition("\n")[0].rpartition("\n")[2]


def served(port: int) -> str:
    """Return the metrics that a port serves once a step is logged."""

    def text() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as response:
            return str(response.read().decode())

    assert eventually(lambda: 'hybrid_metric{kind="train",name="step"}' in text())
    return text()


def test_launch_in_private_network_survives_a_killed_fork_server(endless: list[str], tmp_path: Path) -> None:
    overrides = settings(run={"folder": "run"}, cluster={"metrics_port": (port := free_port())})
    with started(["launch", *endless, *ONE_EACH, *overrides], tmp_path) as command:
        command.await_step()
        for role in ROLES:
            assert f'hybrid_role_memory_bytes{{role="{role}"}}' in served(port)
        networks = {network_of(command.role(role)) for role in ROLES}
        command.role("master").parent().kill()
        assert eventually(lambda: command.stderr.endswith("\n"))
        steps, message = command.stdout.count("\nstep "), command.stderr
        assert eventually(lambda: command.stdout.count("\nstep ") > steps), command.stderr
    assert len(networks) == 1
    assert (network_of() in networks) == (not HAS_NAMESPACES), "the network of roles is private"
    assert re.fullmatch(
        r"hybrid launch: the process that starts the roles \(pid \d+\) has ended; steps \d+ to \d+ are lost, "
        r"(starting from the beginning|resuming from step \d+)\n",
        message,
    )


def test_exception_before_the_first_step_ends_launch(tiny: list[str], tmp_path: Path) -> None:
    (tmp_path / "custom.py").write_text("def build(config, input_spec, widths):\n    raise KeyError('x')\n")
    net = settings(dense={"net": "custom:build"}, run={"folder": "run"})
    ended = run(["launch", *tiny, *ONE_EACH, *net], tmp_path)
    assert ended.code == 1
    assert re.fullmatch(
        r"hybrid launch: trainer 0 on \S+: custom.py:2, in build: KeyError: 'x' \(at start\); "
        r"see run/logs/trainer-0.log\n",
        ended.stderr,
    ), ended.stderr
    log = (tmp_path / "run/logs/trainer-0.log").read_text()
    frame = f'  File "{tmp_path}/custom.py", line 2, in build\n'
    trace = f"{frame}    raise KeyError('x')\nKeyError: 'x'\n\nAll frames:\nTraceback"
    assert f"\nTraceback of your code (most recent call last):\n{trace}" in log


def test_roles_by_hand_report_the_killed_role(endless: list[str], tmp_path: Path) -> None:
    job = [*endless, *ONE_EACH, *settings(cluster={"metrics_port": (port := free_port())})]
    with by_hand([["master"], TRAINER, WORKER], job, tmp_path) as commands:
        master, trainer, worker = commands
        master.await_step()
        assert "process_resident_memory_bytes" in served(port)
        worker.process.kill()
        of_master, of_trainer = master.wait(STOP_SECONDS), trainer.wait(STOP_SECONDS)
    assert (of_master.code, of_trainer.code) == (75, 75)
    pid = worker.process.pid
    pattern = rf"lost worker 0 \(host \S+, pid {pid}\) {DOING}; its log may have the cause"
    assert re.fullmatch(f"hybrid master: {pattern}", last_line(of_master))
    assert re.fullmatch(f"hybrid trainer 0: stopped by the master: {pattern}", last_line(of_trainer))


def test_killed_launcher_leaves_nothing_behind(endless: list[str], tmp_path: Path) -> None:
    # Without a namespace, this process sees the ports.
    no_best = {"keep_best": "none"}  # the resumed run needs steps to do
    keys = settings(run={"folder": "run"}, cluster={"namespace": "off"}, checkpoint=no_best)
    shared_memory = set(Path("/dev/shm").iterdir())
    with started(["launch", *endless, *keys, *ONE_EACH], tmp_path) as command:
        command.await_step()
        assert network_of(command.role("trainer 0")) == network_of()
        with pytest.raises(SystemExit, match=r"^hybrid launch: run\.folder = "):
            main(["launch", "--resume", str(tmp_path / "run")])
        config = (tmp_path / "run/config.toml").read_text()
        assert 'master = "127.0.0.1"\n' in config, "the next start chooses another port"
        worker = command.role("worker 0")
        files = [Path(os.readlink(file)).name for file in Path(f"/proc/{worker.pid}/fd").iterdir()]
        assert ".lock" in files, "a running role keeps the lock"
        worker.suspend()
        ports = {port for process in command.processes() for port in listening(process.net_connections())}
        command.process.kill()
        assert command.wait(STOP_SECONDS, left_seconds=1.0).code == -signal.SIGKILL
    assert ports
    assert eventually(lambda: not ports & listening(psutil.net_connections()), 1.0)
    assert set(Path("/dev/shm").iterdir()) <= shared_memory
    once = ["--set", "train.epochs=1"]
    printed = output_of(["launch", "--resume", "auto", *endless, *keys, *ONE_EACH, *once], tmp_path)
    assert printed.startswith("resuming run\n")


def test_master_reports_missing_and_duplicate_roles(tiny: list[str], tmp_path: Path) -> None:
    master = ["master", *settings(cluster={"start_timeout_seconds": 4}, run={"folder": "run"})]
    with by_hand([master, TRAINER, TRAINER], [*tiny, *ONE_EACH], tmp_path) as commands:
        endings = [command.wait() for command in commands]
    assert [ended.code for ended in endings] == [75, 75, 75]
    reason = "missing after 4 s (cluster.start_timeout_seconds): worker 0\n"
    assert endings[0].stderr == f"hybrid master: {reason}"
    assert sorted(ended.stderr for ended in endings[1:]) == [
        f"hybrid trainer 0: stopped by the master: {reason}",
        "hybrid trainer 0: trainer 0 is already taken in this cluster: was it started twice?\n",
    ]
    assert not (tmp_path / "run").exists()


@needs_namespaces
@pytest.mark.long
def test_run_without_a_namespace_warns_of_open_ports(tiny: list[str], tmp_path: Path) -> None:
    ended = subprocess.run(
        ["unshare", "--user", "--map-root-user", "sh", "-c", FORBID, "sh", *HYBRID, "launch", *tiny],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=COMMAND_SECONDS,
    )
    assert ended.returncode == 0
    assert ended.stderr.startswith("hybrid launch: no network namespace (No space left on device): ")
    assert "cluster.namespace" in ended.stderr
    assert ended.stderr.count("\n") == 1
