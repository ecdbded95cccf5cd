"""Agents of torchrun on two hosts, by the command that docs/clusters.md has: who is killed, and the end."""

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

pytestmark = [needs_hosts, pytest.mark.long, pytest.mark.timeout(1000)]

SECONDS = 300.0
COUNTS = {"trainers": 2, "workers": 3}
MASTER, TRAINER, WORKER = 0, 2, 4  # ranks


@pytest.fixture(scope="module")
def job(tiny: list[str]) -> list[str]:
    """Settings of a run of 192 steps, without its folder."""
    return [
        *tiny,
        *settings(
            train={"epochs": 12}, checkpoint={"every_steps": 5}, cluster={"start_timeout_seconds": 250}
        ),
    ]


@pytest.fixture(scope="module")
def whole(job: list[str], shared: Path) -> Path:
    """A run of it that nobody disturbs."""
    run = shared / "whole"
    output_of(["launch", *job, *settings(run={"folder": run}, cluster=COUNTS)], shared)
    return run


class Agents:
    """An agent on each of two hosts; the rendezvous is at the first one's.

    Args:
        hosts: all that there are; one that was killed comes back, with the folder that they share.
        job: settings of the run.
    """

    def __init__(
        self, hosts: list[Host], switch: Switch, shared: Path, job: list[str], stack: ExitStack
    ) -> None:
        self.started: list[Command] = []  # all that ever were
        self._hosts, self._switch, self._shared, self._stack = hosts, switch, shared, stack
        text = code_block("docs/clusters.md", "", "torchrun --nnodes").replace("\\\n", " ")
        words = shlex.split(text.replace("node0", hosts[0].name).replace("--config clicks.toml", ""))
        end = words.index("hybrid")
        self._before, self._role = ["env", *words[:end]], [*words[end + 1 :], *job]
        self._running = [self._start(host) for host in hosts[:2]]

    def _start(self, host: Host) -> Command:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        agent = started_at(host, self._role, {"PATH": path}, before=self._before)
        self.started.append(self._stack.enter_context(agent))
        return self.started[-1]

    def start(self, number: int) -> None:
        """Start one again, by the same command."""
        self._running[number] = self._start(self._hosts[number])

    def role(self, rank: int) -> psutil.Process:
        """The process of a role, wherever it is."""
        return process_on(self._hosts, lambda process: process.environ().get("RANK") == str(rank))

    def kill(self, number: int) -> None:
        """Kill an agent, with which its roles end."""
        host = self._hosts[number]
        process_on([host], lambda process: "torchrun" in " ".join(process.cmdline()[:2])).kill()
        assert eventually(lambda: not host.processes(), SECONDS)

    def kill_host(self, number: int) -> None:
        """Kill a host, which comes back."""
        self._hosts[number].kill()
        self._hosts[number] = self._switch.host(self._shared, number=number)

    def wait(self, number: int) -> int:
        """The exit code of one that ends by itself."""
        return self._running[number].wait(SECONDS).code


Start = Callable[[Path], Agents]


@pytest.fixture
def start(hosts: list[Host], switch: Switch, shared: Path, job: list[str]) -> Iterator[Start]:
    """Starts agents for a run in a folder."""
    with ExitStack() as stack:
        yield lambda run: Agents(hosts, switch, shared, [*job, *settings(run={"folder": run})], stack)


def check_end(agents: Agents, whole: Path, run: Path, hosts: list[Host]) -> None:
    """See that both agents end in peace, with a run that nobody can tell from one undisturbed."""
    assert [agents.wait(number) for number in (0, 1)] == [0, 0]
    assert differences(whole, run) == []
    assert eventually(lambda: not any(host.processes() for host in hosts), SECONDS)


def test_roles_that_are_killed(start: Start, hosts: list[Host], whole: Path, shared: Path) -> None:
    """The agents start all again, each time."""
    run = shared / "roles"
    agents = start(run)
    progress = Progress(run, agents.started)
    for rank in (WORKER, TRAINER, MASTER):
        progress.await_checkpoint()
        agents.role(rank).kill()
    progress.await_checkpoint()
    check_end(agents, whole, run, hosts)


@pytest.mark.parametrize("kill", [Agents.kill, Agents.kill_host], ids=["agent", "host"])
def test_an_agent_and_a_host_that_is_not_the_endpoint(
    kill: Callable[[Agents, int], None], start: Start, hosts: list[Host], whole: Path, shared: Path
) -> None:
    """The other agent waits for one that is started there again."""
    run = shared / f"elsewhere-{kill.__name__}"
    agents = start(run)
    progress = Progress(run, agents.started)
    progress.await_checkpoint()
    kill(agents, 1)
    agents.start(1)
    progress.await_checkpoint()
    check_end(agents, whole, run, hosts)


@pytest.mark.parametrize("kill", [Agents.kill, Agents.kill_host], ids=["agent", "host"])
def test_an_agent_and_a_host_that_is_the_endpoint(
    kill: Callable[[Agents, int], None], start: Start, hosts: list[Host], whole: Path, shared: Path
) -> None:
    """The other agent ends by itself, and both are started again."""
    run = shared / f"endpoint-{kill.__name__}"
    agents = start(run)
    progress = Progress(run, agents.started)
    progress.await_checkpoint()
    kill(agents, 0)
    assert agents.wait(1) == 1
    agents.start(0)
    agents.start(1)
    progress.await_checkpoint()
    check_end(agents, whole, run, hosts)
