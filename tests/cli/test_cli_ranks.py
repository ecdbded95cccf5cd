"""``hybrid role``: one command for every process of a job, which a scheduler starts and restarts."""

import re
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
from workers.cli.commands import TORCHRUN

SECONDS = 10.0
STEPS = settings(train={"max_steps": 30, "epochs": 9, "eval_every_steps": 15}, checkpoint={"every_steps": 3})
RUN = settings(run={"folder": "run"})
COUNTS = ["--trainers", "1", "--workers", "1"]
# At step 2, the first start waits until one of its roles is killed.
SCRIPT = """
import sys, threading
from pathlib import Path
import torch
from torch import nn
import hybrid

cluster = hybrid.connect()
table = hybrid.Embedding(5, 2, ids="id", optimizer=hybrid.Adagrad(lr=0.1))
model = cluster.distribute(nn.Sequential(table, nn.Linear(2, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
cluster.resume(sys.argv[1], optimizer, every_steps=1)
waiting = Path("waiting")
for _ in cluster.epochs(2):
    for batch in cluster.batches({"id": torch.arange(8) % 5}, size=4):
        if cluster.step == 2 and not waiting.exists():
            waiting.touch()
            threading.Event().wait()
        optimizer.zero_grad()
        cluster.backward((model(batch["id"]).view(-1) - 1) ** 2)
        optimizer.step()
        cluster.print("step", cluster.step)
"""


@contextmanager
def job(arguments: list[str], folder: Path) -> Iterator[list[Command]]:
    """Start the processes of a job: the same command with different ranks, as torchrun does."""
    common = ["role", "--resume", "auto", "--master", f"127.0.0.1:{free_port()}", *arguments]
    with ExitStack() as stack:
        yield [
            stack.enter_context(started(common, folder, variables={"RANK": str(rank), "WORLD_SIZE": "3"}))
            for rank in range(3)
        ]


def endings(arguments: list[str], folder: Path) -> list[Ended]:
    """Run the processes of a job to their end."""
    with job(arguments, folder) as commands:
        return [command.wait() for command in commands]


@pytest.mark.long
def test_same_command_resumes_a_run_until_it_has_finished(tiny: list[str], tmp_path: Path) -> None:
    """A killed run ends with the bits of an uninterrupted one; every role reports the end of the run."""
    secret = fresh_secret(tmp_path)
    arguments = [*tiny, *STEPS, *RUN, *COUNTS, *secret]
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
    finished = over[0].stdout
    assert [(each.code, each.stderr) for each in over] == [(0, "")] * 3
    assert finished.startswith("run has finished; ")
    for name, ended in zip(("trainer 0", "worker 0"), over[1:], strict=True):
        assert ended.stdout.endswith(f"\nhybrid {name}: {finished}")
    assert (tmp_path / "run/result.json").read_bytes() == result


def test_same_command_resumes_a_custom_loop_until_it_has_finished(tmp_path: Path) -> None:
    """A configured run, which the same command without a script would resume, has no effect."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.toml").write_text("[embedding]\ndim = 12\n")
    (tmp_path / "train.py").write_text(SCRIPT)
    script = ["--script", "train.py", "--", "saved"]
    arguments = [*RUN, *COUNTS, *fresh_secret(tmp_path), *script]
    with job(arguments, tmp_path) as (master, trainer, worker):
        assert eventually((tmp_path / "waiting").exists), master.stderr
        trainer.process.kill()
        assert [command.wait(SECONDS).code for command in (master, worker)] == [75, 75]
    for steps in (["step 3", "step 4"], []):
        again = endings(arguments, tmp_path)
        assert [(each.code, each.stderr) for each in again] == [(0, "")] * 3
        assert re.findall(r"^step \d+$", again[1].stdout, re.MULTILINE) == steps
    output_of(["run", "train.py", *COUNTS, "--", "whole"], tmp_path)
    assert differences(tmp_path / "whole", tmp_path / "saved") == []


@pytest.mark.parametrize("rank", range(2))
def test_another_users_secret_is_ignored(rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "5")
    (tmp_path / "config.toml").write_text('[cluster]\nsecret_file = "/srv/secret"\n')
    with pytest.raises(SystemExit, match=r"cluster.secret_file = '/srv/secret': .*--trust-code"):
        main(["role", "--resume", str(tmp_path), "--master", "127.0.0.1"])


def test_host_without_the_configuration_needs_only_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    file = ["--config", "missing.toml", *settings(data={"format": "csv"})]  # which needs keys of the file
    with pytest.raises(SystemExit, match=r"cluster\.secret_file: must be set"):
        main(["role", "--master", "127.0.0.1", *COUNTS, *file])


# A process that starts a role, which waits where it would import torch.
STARTER = """
import os, sys, time
from unittest import mock
if os.fork() == 0:
    from workers import cli
    from workers.cli import commands
    def wait():
        print(os.getpid(), flush=True)
        time.sleep(60)
    with mock.patch.object(commands, "importing_torch", wait):
        cli.main(["worker", "--index", "0", "--master", "127.0.0.1", *sys.argv[1:]])
os.wait()
"""


@pytest.mark.parametrize(
    ("variable", "ends"), [(TORCHRUN, True), ("SLURM_STEP_ID", True), ("NO_SCHEDULER", False)]
)
def test_role_of_a_scheduler_ends_with_its_parent(variable: str, ends: bool, tmp_path: Path) -> None:
    """A role that was started by hand continues, as under nohup."""
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
