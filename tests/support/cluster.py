"""Clusters for tests: every role a forked process, kept alive between cases.

A case is a function that runs in the master's process, with the cluster as its first argument::

    cluster.run(losses_of, config, 20)      # def losses_of(cluster: JoinedCluster, config, steps): ...
"""

import dataclasses
import faulthandler
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import BytesIO
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from socket import socket
from typing import Any, Concatenate, ParamSpec, TypeVar
from unittest.mock import patch

import torch
from support import fake_gpu
from support.fork_context import STOP_SECONDS, fork_context, forked_process

from hybrid.config import RunConfig
from hybrid.security.secret import Secret
from hybrid.topology import MASTER, Role, RoleKind, Topology
from hybrid.transport import LostError
from workers.cluster_task import ScriptTask
from workers.console import TerminalView
from workers.controller.script_job import ScriptJob
from workers.rendezvous.bootstrap import JoinedCluster, announce_stop, lead, serve
from workers.rendezvous.host_setup import MasterAddress, listen
from workers.rendezvous.interrupt import LostRoleError

P = ParamSpec("P")
T = TypeVar("T")

_MOST_CLUSTERS = 3
CASE_SECONDS = 100.0  # torch.compile takes 50 s if both cores have other work
SMALL = RunConfig()
SMALL = SMALL.replace(
    data=dataclasses.replace(SMALL.data, synthetic_rows=3000),
    train=dataclasses.replace(SMALL.train, batch_size=128),
    dense=dataclasses.replace(SMALL.dense, optimizer="SGD", learning_rate=0.1, device="cpu"),
)


def small_config(**sections: dict[str, Any]) -> RunConfig:
    """The small configuration with some keys replaced, by section."""
    return SMALL.replace(
        **{name: dataclasses.replace(getattr(SMALL, name), **keys) for name, keys in sections.items()}
    )


class LocalTopology(Topology):
    """A trainer and a worker in the master's process."""

    @property
    def trainers(self) -> tuple[Role, ...]:
        return (MASTER,)

    @property
    def workers(self) -> tuple[Role, ...]:
        return (MASTER,)


def run_script(
    cluster: JoinedCluster, /, script: str, *arguments: object, device: str = "cpu", **train: Any
) -> None:
    """Run a script with a custom loop, in float64; a case.

    Args:
        train: keys of section [train].
    """
    topology = cluster.topology
    sizes = {"trainers": topology.num_trainers, "workers": topology.num_workers}
    config = small_config(cluster=sizes, dense={"device": device}, train={"dtype": "float64", **train})
    with TerminalView() as view:
        job = ScriptJob(config, ScriptTask(script, tuple(map(str, arguments))))
        job.run(topology, Path, view)


class CaseError(Exception):
    """An exception that a case raised in the master's process; the text begins with its type."""


@dataclass
class RunningCluster:
    """A cluster whose master runs the functions that it receives.

    Attributes:
        is_lost: whether a case did not end, or lost a role; further cases would fail.
    """

    master: Connection
    processes: list[BaseProcess]
    is_lost: bool = False

    def run(self, case: Callable[Concatenate[JoinedCluster, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``case(cluster, *args)`` in the master's process; return its result."""
        self.is_lost = True
        self.master.send((case, args, kwargs))
        assert self.master.poll(CASE_SECONDS), f"{case.__name__} did not end within {CASE_SECONDS} s"
        raised, result, has_lost_role = torch.load(BytesIO(self.master.recv_bytes()), weights_only=False)
        self.is_lost = has_lost_role or not all(process.is_alive() for process in self.processes)
        if raised:
            raise CaseError(result)
        return result  # type: ignore[no-any-return]


def _serve(
    role: Role,
    config: RunConfig,
    secret: Secret,
    listener: socket | MasterAddress,
    cases: Connection | None,
    has_own_host: bool,
) -> None:
    faulthandler.enable()
    if role.kind is RoleKind.TRAINER and config.dense.device == fake_gpu.NAME:
        fake_gpu.register()
    if has_own_host:
        patch("hybrid.shared_memory.shared_slots.host_id", lambda: str(role)).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if isinstance(listener, MasterAddress):
        serve(role, listener, secret)
    else:
        assert cases is not None
        with lead(config, secret, listener) as cluster:
            while (sent := cases.recv()) is not None:
                # A connection would pass each tensor in its own shared memory, which takes longer.
                torch.save(_run(cluster, *sent), result := BytesIO())
                cases.send_bytes(result.getbuffer())
            announce_stop(cluster)


def _run(cluster: JoinedCluster, case: Callable[..., Any], args: Any, kwargs: Any) -> tuple[bool, Any, bool]:
    try:
        return False, case(cluster, *args, **kwargs), False
    except Exception as error:  # raised again in the process of the test
        text = f"{type(error).__name__}: {error}\n\n{traceback.format_exc()}"
        return True, text, isinstance(error, LostRoleError | LostError)


@contextmanager
def running_cluster(config: RunConfig, has_many_hosts: bool = False) -> Iterator[RunningCluster]:
    """Run a cluster for the length of a ``with`` block; at its end, every role must stop without an error.

    A cluster that was lost is killed instead.

    Args:
        has_many_hosts: whether trainers act as if each had its own host, so that they share no memory.
    """
    ours, theirs = fork_context().Pipe()
    secret, processes = Secret.fresh(), list[BaseProcess]()
    with ExitStack() as stack:
        with listen("127.0.0.1", 0) as listener:
            address = MasterAddress(*listener.getsockname())
            for role in config.cluster.topology.roles:
                extra = (listener, theirs) if role == MASTER else (address, None)
                started = forked_process(_serve, role, config, secret, *extra, has_many_hosts, name=str(role))
                processes.append(stack.enter_context(started))
        theirs.close()  # else the end of the master would not end a wait for it
        cluster = RunningCluster(ours, processes)
        yield cluster
        if not cluster.is_lost:
            ours.send(None)
            for process in processes:
                process.join(STOP_SECONDS)
            assert {p.name: p.exitcode for p in processes} == {p.name: 0 for p in processes}


class Clusters:
    """Provides a running cluster of a given shape; keeps the three that were needed last."""

    def __init__(self) -> None:
        self._running: dict[tuple[int, int, str, bool], tuple[ExitStack, RunningCluster]] = {}

    def get(
        self, trainers: int, workers: int, device: str = "cpu", has_many_hosts: bool = False
    ) -> RunningCluster:
        """Return a cluster with these numbers of trainers and workers; gradients are on ``device``."""
        shape = (trainers, workers, device, has_many_hosts)
        if shape in self._running:
            stack, cluster = self._running.pop(shape)
            if not cluster.is_lost:
                self._running[shape] = stack, cluster  # now the last
                return cluster
            stack.close()
        if len(self._running) == _MOST_CLUSTERS:
            self._running.pop(next(iter(self._running)))[0].close()
        config = small_config(cluster={"trainers": trainers, "workers": workers}, dense={"device": device})
        stack = ExitStack()
        cluster = stack.enter_context(running_cluster(config, has_many_hosts))
        self._running[shape] = stack, cluster
        return cluster

    def close(self) -> None:
        """Stop the running clusters."""
        for stack, _ in self._running.values():
            stack.close()
