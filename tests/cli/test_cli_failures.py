"""Clusters that cannot start, or lose a role: who is named, how soon, and what is left."""

import os
import re
import signal
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.commands import (
    COMMAND_SECONDS,
    DOING,
    ONE_EACH,
    TRAINER,
    WORKER,
    Ended,
    by_hand,
    eventually,
    free_port,
    fresh_secret,
    output_of,
    run,
    settings,
    started,
)

from workers.cli import main
from workers.rendezvous.master_address import listen

STOP_SECONDS = 5.0


def listening(connections: Iterable[Any]) -> set[int]:
    """The ports on which somebody listens."""
    return {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}


def last_line(ended: Ended) -> str:
    """What a role said last; torch may have complained of broken connections before."""
    return ended.stderr.rpartition("\n")[0].rpartition("\n")[2]


@pytest.mark.long
def test_launch_gives_up_with_the_first_cause(endless: list[str], tmp_path: Path) -> None:
    overrides = settings(run={"folder": "run"}, cluster={"max_restarts": 1})
    with started(["launch", *endless, *ONE_EACH, *overrides], tmp_path) as command:
        command.await_step()
        first = command.role("worker 0")
        first.kill()
        assert eventually(lambda: "starting from the beginning" in command.stderr, STOP_SECONDS)
        starts = command.stdout.count("\nstep 1/")
        assert eventually(lambda: command.stdout.count("\nstep 1/") > starts, COMMAND_SECONDS)
        command.role("master").kill()
        ended = command.wait(STOP_SECONDS)
    assert ended.code == 75
    cause = rf"worker 0 \(pid {first.pid}\) was killed by SIGKILL; see run/logs/worker-0.log"
    assert re.fullmatch(
        rf"hybrid launch: {cause}; steps 0 to \d+ are lost, starting from the beginning\n"
        rf"hybrid launch: {cause}; stopped after 1 restart\(s\) without a new checkpoint "
        r"\(cluster.max_restarts\)\n",
        ended.stderr,
    )
    assert not (tmp_path / "run/result.json").exists()


@pytest.mark.parametrize(
    ("end", "how"), [("kill", "has ended"), pytest.param("suspend", "was frozen", marks=pytest.mark.long)]
)
def test_launch_goes_on_where_all_its_processes_are_gone(
    endless: list[str], tmp_path: Path, end: str, how: str
) -> None:
    overrides = settings(run={"folder": "run"})
    with started(["launch", *endless, *ONE_EACH, *overrides], tmp_path) as command:
        command.await_step()
        getattr(command.role("master").parent(), end)()
        assert eventually(lambda: command.stderr.endswith("\n"), COMMAND_SECONDS)
        steps, said = command.stdout.count("\nstep "), command.stderr
        assert eventually(lambda: command.stdout.count("\nstep ") > steps, COMMAND_SECONDS), command.stderr
    assert re.fullmatch(
        rf"hybrid launch: the process that starts the roles \(pid \d+\) {how}; steps \d+ to \d+ are lost, "
        r"(starting from the beginning|resuming from step \d+)\n",
        said,
    )


def test_an_exception_before_the_first_step_would_come_again(tiny: list[str], tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def build(config, input_spec, widths):\n    raise KeyError('mine')\n")
    own = settings(dense={"net": "own:build"}, run={"folder": "run"})
    ended = run(["launch", *tiny, *ONE_EACH, *own], tmp_path)
    assert ended.code == 1
    assert re.fullmatch(
        r"hybrid launch: trainer 0 on \S+: own.py:2, in build: KeyError: 'mine' \(at start\); "
        r"see run/logs/trainer-0.log\n",
        ended.stderr,
    ), ended.stderr
    log = (tmp_path / "run/logs/trainer-0.log").read_text()
    assert (
        f'\nTraceback of your code (most recent call last):\n  File "{tmp_path}/own.py", line 2, in build\n'
        "    raise KeyError('mine')\nKeyError: 'mine'\n\nAll frames:\nTraceback"
    ) in log


def test_roles_by_hand_hear_who_was_killed(endless: list[str], tmp_path: Path) -> None:
    with by_hand([["master"], TRAINER, WORKER], [*endless, *ONE_EACH], tmp_path) as (
        master,
        trainer,
        worker,
    ):
        master.await_step()
        worker.process.kill()
        stopped, told = master.wait(STOP_SECONDS), trainer.wait(STOP_SECONDS)
    assert (stopped.code, told.code) == (75, 75)
    pid = worker.process.pid
    pattern = rf"lost worker 0 \(host \S+, pid {pid}\) {DOING}; its log may have the cause"
    assert re.fullmatch(f"hybrid master: {pattern}", last_line(stopped))
    assert re.fullmatch(f"hybrid trainer 0: stopped by the master: {pattern}", last_line(told))


def test_roles_by_hand_stop_with_their_master(endless: list[str], tmp_path: Path) -> None:
    with by_hand([["master"], TRAINER, WORKER], [*endless, *ONE_EACH], tmp_path) as (master, *others):
        master.await_step()
        master.process.kill()
        assert master.wait(STOP_SECONDS).code == -signal.SIGKILL
        for command, name in zip(others, ("trainer 0", "worker 0"), strict=True):
            ended = command.wait(STOP_SECONDS)
            assert ended.code == 75
            assert last_line(ended).startswith(f"hybrid {name}: the master went away: ")


def test_nothing_outlives_a_launcher_that_was_killed(endless: list[str], tmp_path: Path) -> None:
    # Its ports are to be seen from here.
    run_folder = settings(run={"folder": "run"}, cluster={"namespace": "off"})
    shared_memory = set(Path("/dev/shm").iterdir())
    with started(["launch", *endless, *run_folder, *ONE_EACH], tmp_path) as command:
        command.await_step()
        networks = {os.stat(f"/proc/{pid}/ns/net").st_ino for pid in ("self", command.role("trainer 0").pid)}
        assert len(networks) == 1
        with pytest.raises(
            SystemExit, match=r"^hybrid launch: run.folder = '.+': is in use by another launch"
        ):
            main(["launch", "--resume", str(tmp_path / "run")])
        config = (tmp_path / "run/config.toml").read_text()
        assert 'master = "127.0.0.1"\n' in config, "the next start takes another"
        worker = command.role("worker 0")
        files = [Path(os.readlink(file)).name for file in Path(f"/proc/{worker.pid}/fd").iterdir()]
        assert ".lock" in files, "a role that is still there keeps others out"
        worker.suspend()
        ports = {port for process in command.processes() for port in listening(process.net_connections())}
        command.process.kill()
        assert command.wait(STOP_SECONDS, left_seconds=1.0).code == -signal.SIGKILL
    assert ports
    assert eventually(lambda: not ports & listening(psutil.net_connections()), 1.0)
    assert set(Path("/dev/shm").iterdir()) <= shared_memory
    once = ["--set", "train.epochs=1"]
    said = output_of(["launch", "--resume", "auto", *endless, *run_folder, *once], tmp_path)
    assert said.startswith("resuming run\n")


def test_the_master_names_who_is_missing_and_who_came_twice(tiny: list[str], tmp_path: Path) -> None:
    master = ["master", *settings(cluster={"start_timeout_seconds": 4}, run={"folder": "run"})]
    with by_hand([master, TRAINER, TRAINER], [*tiny, *ONE_EACH], tmp_path) as commands:
        endings = [command.wait() for command in commands]
    assert [ended.code for ended in endings] == [75, 75, 75]
    reason = "missing after 4 s (cluster.start_timeout_seconds): worker 0; started twice: trainer 0\n"
    assert endings[0].stderr == f"hybrid master: {reason}"
    assert sorted(ended.stderr for ended in endings[1:]) == [
        f"hybrid trainer 0: stopped by the master: {reason}",
        "hybrid trainer 0: trainer 0 is already taken in this cluster: was it started twice?\n",
    ]
    assert not (tmp_path / "run").exists()


def test_a_role_has_what_its_own_host_is_to_have(tiny: list[str], tmp_path: Path) -> None:
    """Elsewhere, with the master's address, the secret, its name, and a GPU that is not there."""
    port, secret = free_port(), fresh_secret(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    address = ["--master", f"localhost:{port}", *secret]
    roles = [
        ["master", *tiny, *ONE_EACH, *settings(cluster={"master": f"127.0.0.1:{port}"}), *secret],
        [*TRAINER, *address, *settings(dense={"device": "cuda:77"})],
        [*WORKER, *address],
    ]
    with ExitStack() as stack:
        commands = [stack.enter_context(started(role, tmp_path / "elsewhere")) for role in roles]
        endings = [command.wait() for command in commands]
    assert [ended.code for ended in endings] == [1, 1, 1]
    why = r"dense.device = 'cuda:77': this machine has \d GPU\(s\)"
    has_ended = rf"trainer 0 \(host \S+, pid \d+\) has ended: {why}"
    for ended, words in zip(
        endings,
        (f"master: {has_ended}", f"trainer 0: {why}", f"worker 0: stopped by the master: {has_ended}"),
        strict=True,
    ):
        assert re.fullmatch(f"hybrid {words}", last_line(ended)), ended.stderr


@pytest.mark.parametrize("command", ["launch", "master"])
def test_a_port_in_use(command: str, tiny: list[str], tmp_path: Path) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        cluster = {"master": f"127.0.0.1:{port}", "namespace": "off"}
        overrides = settings(cluster=cluster, run={"folder": "run"})
        ended = run([command, *tiny, *overrides, *fresh_secret(tmp_path)], tmp_path)
    assert ended.code == 1
    assert ended.stderr == (
        f"hybrid {command}: cluster.master = {port}: Address already in use; choose another\n"
    )
    assert not (tmp_path / "run").exists()
