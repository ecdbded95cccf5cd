"""Agents of torchrun on two hosts, with the command of docs/clusters.md: roles and agents are killed."""

import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from chaos_run.run_comparison import differences
from support.commands import Command, code_block, eventually, output_of, settings
from support.host_roles import Progress, process_on, started_at
from support.hosts import Host, Switch
from support.namespaces import needs_hosts

pytestmark = [needs_hosts, pytest.mark.long]

SECONDS = 300.0
COUNTS = {"trainers": 2, "workers": 3}
MASTER, TRAINER, WORKER = 0, 2, 4  # ranks


@pytest.fixture(scope="module")
def job(tiny: list[str]) -> list[str]:
    """Settings of a run of 192 steps, without its folder."""
    start = {"start_timeout_seconds": 250}
    return [*tiny, *settings(train={"epochs": 12}, checkpoint={"every_steps": 5}, cluster=start)]


@pytest.fixture(scope="module")
def whole(job: list[str], shared: Path) -> Path:
    """An uninterrupted run of the job."""
    run = shared / "whole"
    output_of(["launch", *job, *settings(run={"folder": run}, cluster=COUNTS)], shared)
    return run


class Agents:
    """An agent on each of two hosts; the first has the rendezvous.

    Args:
        hosts: all hosts; a killed one is restarted with the shared folder.
        job: settings of the run.
    """

    def __init__(
        self, hosts: list[Host], switch: Switch, shared: Path, job: list[str], stack: ExitStack
    ) -> None:
        self.started: list[Command] = []  # all agents, also ended ones
        self._hosts, self._switch, self._shared, self._stack = hosts, switch, shared, stack
        text = code_block("docs/clusters.md", "", "torchrun --nnodes").replace("\\\n", " ")
        words = shlex.split(text.replace("node0", hosts[0].name).replace("--config clicks.toml", ""))
        end = words.index("hybrid")
        self._before, self._role = words[:end], [*words[end + 1 :], *job]
        self._running = [self._start(host) for host in hosts[:2]]

    def _start(self, host: Host) -> Command:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        agent = started_at(host, self._role, {"PATH": path}, before=self._before)
        self.started.append(self._stack.enter_context(agent))
        return self.started[-1]

    def start(self, number: int) -> None:
        """Start an agent again by the same command."""
        self._running[number] = self._start(self._hosts[number])

    def role(self, rank: int) -> psutil.Process:
        """Return the process of a role on any host."""
        return process_on(self._hosts, lambda process: process.environ().get("RANK") == str(rank))

    def kill(self, number: int) -> None:
        """Kill an agent, which ends its roles."""
        host = self._hosts[number]
        process_on([host], lambda process: "torchrun" in " ".join(process.cmdline()[:2])).kill()
        assert eventually(lambda: not host.processes(), SECONDS)

    def wait(self, number: int) -> int:
        """Wait for the end of an agent; return its exit code."""
        return self._running[number].wait(SECONDS).code


Start = Callable[[Path], Agents]


@pytest.fixture
def start(hosts: list[Host], switch: Switch, shared: Path, job: list[str]) -> Iterator[Start]:
    """A function that starts agents for a run in a folder."""
    with ExitStack() as stack:
        yield lambda run: Agents(hosts, switch, shared, [*job, *settings(run={"folder": run})], stack)


def check_end(agents: Agents, whole: Path, run: Path, hosts: list[Host]) -> None:
    """Check that both agents succeed and that the run has the bits of an uninterrupted one."""
    assert [agents.wait(number) for number in (0, 1)] == [0, 0]
    assert differences(whole, run) == []
    assert eventually(lambda: not any(host.processes() for host in hosts), SECONDS)


def test_killed_roles_are_restarted(start: Start, hosts: list[Host], whole: Path, shared: Path) -> None:
    """The agents restart all roles each time."""
    run = shared / "roles"
    agents = start(run)
    progress = Progress(run, agents.started)
    for rank in (WORKER, TRAINER, MASTER):
        progress.await_checkpoint()
        agents.role(rank).kill()
    progress.await_checkpoint()
    check_end(agents, whole, run, hosts)


def test_killed_agent_of_the_endpoint(start: Start, hosts: list[Host], whole: Path, shared: Path) -> None:
    """The other agent ends by itself, and both are started again."""
    run = shared / "endpoint"
    agents = start(run)
    progress = Progress(run, agents.started)
    progress.await_checkpoint()
    agents.kill(0)
    assert agents.wait(1) == 1
    agents.start(0)
    agents.start(1)
    progress.await_checkpoint()
    check_end(agents, whole, run, hosts)
