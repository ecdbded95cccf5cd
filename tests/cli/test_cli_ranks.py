"""One command for every process of a job, as a scheduler starts it, and starts it again."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
from chaos_run.run_comparison import differences
from support.commands import (
    ONE_EACH,
    ROOT,
    Command,
    Ended,
    eventually,
    free_port,
    fresh_secret,
    output_of,
    settings,
    started,
)

from workers.cli import main
from workers.launching.scheduler_rank import TORCHRUN

SECONDS = 10.0
STEPS = settings(train={"max_steps": 30, "epochs": 9, "eval_every_steps": 15}, checkpoint={"every_steps": 3})
RUN = settings(run={"folder": "run"})


@contextmanager
def job(arguments: list[str], folder: Path) -> Iterator[list[Command]]:
    """The processes of a job: one and the same command, and a rank each."""
    common = ["role", *arguments, "--resume", "auto", "--master", f"127.0.0.1:{free_port()}"]
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                started(
                    common, folder, variables={"RANK": str(rank), "WORLD_SIZE": "3"}
                )  # as torchrun has it
            )
            for rank in range(3)
        ]


def endings(arguments: list[str], folder: Path) -> list[Ended]:
    """How they end."""
    with job(arguments, folder) as commands:
        return [command.wait() for command in commands]


@pytest.mark.long
def test_the_same_command_goes_on_until_the_run_is_over(tiny: list[str], tmp_path: Path) -> None:
    """After a kill it ends as one that nobody disturbed; after its end it says so, and so does every role."""
    secret = fresh_secret(tmp_path)
    counts = ["--trainers", "1", "--workers", "1"]
    arguments = [*tiny, *STEPS, *RUN, *counts, *secret]
    with job(arguments, tmp_path) as (master, *others):
        master.await_step(4)
        others[1].process.kill()
        assert [command.wait(SECONDS).code for command in (master, others[0])] == [75, 75]
    again = endings(arguments, tmp_path)
    assert [(each.code, each.stderr) for each in again] == [(0, "")] * 3
    assert again[0].stdout.startswith("resuming run\n")
    output_of(["launch", *tiny, *STEPS, *ONE_EACH, *settings(run={"folder": "whole"})], tmp_path)
    assert differences(tmp_path / "whole", tmp_path / "run") == []
    result = (tmp_path / "run/result.json").read_bytes()
    over = endings(arguments, tmp_path)
    said = "run has finished; raise train.epochs to go on, or start a run of another name\n"
    assert [(each.code, each.stderr) for each in over] == [(0, "")] * 3
    assert over[0].stdout == said
    for name, ended in zip(("trainer 0", "worker 0"), over[1:], strict=True):
        assert ended.stdout.endswith(f"\nhybrid {name}: {said}")
    assert (tmp_path / "run/result.json").read_bytes() == result


def test_a_launch_of_a_run_that_is_over_does_nothing(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/result.json").write_text("{}")
    with pytest.raises(SystemExit):
        main(["config", "--set", "no.key=1"])
    capsys.readouterr()
    main(["config", *tiny])
    (tmp_path / "run/config.toml").write_text(capsys.readouterr().out)
    main(["launch", "--resume", "auto", *tiny, *RUN])
    assert capsys.readouterr().out.startswith("run has finished; ")
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"config.toml", "result.json"}


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (
            {},
            "role: needs RANK and WORLD_SIZE, or SLURM_PROCID of srun, and none is set; start",
        ),
        (
            {"RANK": "1", "WORLD_SIZE": "2"},
            "role: RANK and WORLD_SIZE say 1 of 2, but 1 master, 2",
        ),
    ],
    ids=["no rank", "a rank once a node"],
)
def test_a_process_that_is_not_told_who_it_is_is_refused(
    variables: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as end:
        main(["role", "--master", "node0"])
    assert str(end.value.code).startswith(f"hybrid role: {said}")


@pytest.mark.parametrize("rank", range(2))
def test_no_rank_reads_the_secret_file_of_another_users_run(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "5")
    (tmp_path / "config.toml").write_text('[cluster]\nsecret_file = "/srv/secret"\n')
    with pytest.raises(SystemExit, match=r"cluster.secret_file = '/srv/secret': .*--trust-code"):
        main(["role", "--resume", str(tmp_path), "--master", "127.0.0.1"])


def test_without_the_masters_address_a_role_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "node0")  # of whoever
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    with pytest.raises(SystemExit, match=r"^hybrid worker 1: --master: must be given: HOST or HOST:PORT"):
        main(["worker"])


# A starter, and a role that has come as far as to import torch.
STARTER = """
import os, sys, time
from unittest import mock
if os.fork() == 0:
    from workers import cli
    from workers.commands import role_commands
    def wait():
        print(os.getpid(), flush=True)
        time.sleep(60)
    with mock.patch.object(role_commands, "importing_torch", wait):
        cli.main(["worker", "--index", "0", "--master", "127.0.0.1", *sys.argv[1:]])
os.wait()
"""


@pytest.mark.parametrize(("variable", "ends"), [(TORCHRUN, True), ("SLURM_STEP_ID", True), ("NOBODY", False)])
def test_a_role_of_a_scheduler_ends_with_its_starter(variable: str, ends: bool, tmp_path: Path) -> None:
    """By hand it goes on, as one does that was started by nohup."""
    command = [sys.executable, "-c", STARTER, *fresh_secret(tmp_path)]
    starter = subprocess.Popen(command, cwd=ROOT, env={variable: "1"}, stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    role = psutil.Process(int(starter.stdout.readline()))
    try:
        starter.send_signal(signal.SIGKILL)
        starter.wait(SECONDS)
        if ends:
            assert eventually(lambda: not role.is_running() or role.status() == "zombie", SECONDS)
        else:
            assert role.is_running()
    finally:
        if role.is_running():
            role.kill()
        starter.stdout.close()
