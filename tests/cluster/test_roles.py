"""Processes of a cluster: where calls run, sockets, the trainers' process group, ended and frozen roles."""

import os
import re
import signal
import threading
from contextlib import ExitStack
from multiprocessing.connection import Connection
from multiprocessing.queues import SimpleQueue
from socket import socket
from typing import Any, TypeAlias
from unittest import mock

import psutil
import pytest
import torch.distributed as dist
from comparison.cases.hybrid_trainer import get_training_examples, train
from support.cluster import Clusters, small_config
from support.commands import eventually
from support.fork_context import STOP_SECONDS, fork_context, forked_process
from torch.distributed import rpc

from hybrid import transport
from hybrid.config import RunConfig
from hybrid.errors import ClusterError, HybridError
from hybrid.security.secret import Secret
from hybrid.topology import MASTER, Role, RoleKind
from hybrid.transport import stubs
from workers.rendezvous.bootstrap import JoinedCluster, announce_stop, join, lead, serve
from workers.rendezvous.host_setup import MasterAddress, listen

SECONDS = 10.0

# Rank in the trainers' group and its size; None for roles outside the group.
Membership: TypeAlias = tuple[int, int] | None


class Place:
    """An object in a role's process that reports the process."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def name_and_pid(self) -> tuple[str, int]:
        return rpc.get_worker_info().name, os.getpid()

    def membership(self) -> Membership:
        return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None

    def await_word(self) -> bool:
        return self._event.wait(SECONDS)

    def give_word(self) -> None:
        self._event.set()


def places(cluster: JoinedCluster) -> dict[Role, transport.Remote[Place]]:
    """Create one object on every role, including the master."""
    creating = [transport.create(role, Place, timeout_seconds=SECONDS) for role in cluster.topology.roles]
    return dict(zip(cluster.topology.roles, transport.gather(creating), strict=True))


def whereabouts(cluster: JoinedCluster) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return, by RPC name, the process that runs a call and the process of the role."""
    pids = {MASTER: os.getpid()} | {role: member.pid for role, member in cluster.members.items()}
    answered = transport.gather([place.call(Place.name_and_pid) for place in places(cluster).values()])
    return dict(answered), {role.rpc_name: pid for role, pid in pids.items()}


def test_a_method_runs_on_the_process_that_owns_the_object(clusters: Clusters) -> None:
    answered, pids = clusters.get(2, 2).run(whereabouts)
    assert answered == pids
    assert len(set(pids.values())) == 5


def word_and_answer(cluster: JoinedCluster) -> bool:
    """Let one call wait on its owner for the effect of a second call."""
    place: transport.Remote[Place] = transport.create(
        cluster.topology.workers[0], Place, timeout_seconds=SECONDS
    ).wait()
    waiting = place.call(Place.await_word)
    place.call(Place.give_word).wait()
    answer: bool = waiting.wait()
    return answer


def test_a_call_does_not_wait_for_its_answer(clusters: Clusters) -> None:
    assert clusters.get(2, 2).run(word_and_answer)


def addresses(cluster: JoinedCluster) -> dict[str, tuple[set[str], int]]:
    """Return addresses and number of listening sockets of each role, the master first."""
    found = {}
    pids = {"master": os.getpid()} | {str(role): member.pid for role, member in cluster.members.items()}
    for name, pid in pids.items():
        connections = psutil.Process(pid).net_connections("inet")
        listening = [each for each in connections if each.status == psutil.CONN_LISTEN]
        found[name] = {each.laddr.ip for each in connections}, len(listening)
    return found


def test_roles_use_loopback_and_only_the_rendezvous_listens(clusters: Clusters) -> None:
    """By default, torch listens on a dozen ports per role, and on every interface for its store."""
    found = clusters.get(2, 2).run(addresses)
    assert {name: listening for name, (_, listening) in found.items()} == {
        "master": 1,
        **dict.fromkeys(["trainer 0", "trainer 1", "worker 0", "worker 1"], 0),
    }
    for of_role, _ in found.values():
        assert of_role
        assert of_role <= {"127.0.0.1", "::1"}


def live(
    role: Role,
    config: RunConfig,
    secret: Secret,
    reports: SimpleQueue[Any],
    clusters: list[tuple[socket | MasterAddress, bool]],
) -> None:
    """Run a role in clusters, one after another, some of which fail.

    Of each cluster, the master reports the process groups and the result of two steps. Each role that stops
    without an error reports whether it still has a process group.
    """
    for listener, should_fail in clusters:
        try:
            if not isinstance(listener, MasterAddress):
                with lead(config, secret, listener) as cluster:
                    members = transport.gather([p.call(Place.membership) for p in places(cluster).values()])
                    examples = get_training_examples(4)[: config.cluster.trainers]  # these do not cancel
                    trained = train(cluster, "outside", [[each] for each in examples], 2)
                    reports.put((members, trained.weight.tolist()))
                    if should_fail:
                        raise ClusterError("expected")
                    announce_stop(cluster)
            else:
                serve(role, listener, secret)
            reports.put(dist.is_initialized())
        except HybridError:
            assert should_fail


@pytest.mark.parametrize("reused", ["master trainer worker", pytest.param("trainer", marks=pytest.mark.long)])
def test_a_process_can_be_in_several_clusters(reused: str) -> None:
    """The second cluster fails; roles of the other kinds are new processes in each cluster."""
    reports: SimpleQueue[Any] = fork_context().SimpleQueue()
    config, secret = small_config(cluster={"trainers": 2, "workers": 1}), Secret.fresh()
    with ExitStack() as stack:
        processes = []
        listeners = [stack.enter_context(listen("127.0.0.1", 0)) for _ in range(3)]
        for role in config.cluster.topology.roles:
            ends = [each if role == MASTER else MasterAddress(*each.getsockname()) for each in listeners]
            clusters = list(zip(ends, [False, True, False], strict=True))
            for part in [clusters] if role.kind in reused else [[each] for each in clusters]:
                started = forked_process(live, role, config, secret, reports, part, name=str(role))
                processes.append(stack.enter_context(started))
        for listener in listeners:
            listener.close()
        for process in processes:
            process.join(STOP_SECONDS)
        assert {process.exitcode for process in processes} == {0}
    received = [reports.get() for _ in range(11) if not reports.empty()]
    results = [each for each in received if isinstance(each, tuple)]
    assert results == [([None, (0, 2), (1, 2), None], results[0][1])] * 3
    assert received.count(False) == 2 * 4


START_SECONDS = 20.0
HEARTBEAT_SECONDS = 1.0
TRAINER, WORKER = Role(RoleKind.TRAINER), Role(RoleKind.WORKER)
SILENCE = r"is frozen: no heartbeat for 1 s \(cluster.heartbeat_timeout_seconds\)"


def take_part(
    role: Role,
    is_freezing: bool,
    config: RunConfig,
    secret: Secret,
    listener: socket | MasterAddress,
    reports: Connection,
) -> None:
    """Join a cluster and send the error; or freeze before all roles are connected."""

    def freeze(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)
        # Another thread receives the signal. Until then, this thread must not close torch's listening socket.
        threading.Event().wait()

    with ExitStack() as stack:
        if is_freezing:
            stack.enter_context(mock.patch.object(stubs, "open_connection", freeze))
        try:
            with (
                join(role, listener, secret)
                if isinstance(listener, MasterAddress)
                else lead(config, secret, listener)
            ):
                reports.send("joined")
        except ClusterError as error:
            reports.send(str(error))


def endings(frozen: Role) -> dict[Role, str]:
    """Freeze one role of a cluster of three; return the errors of the other roles."""
    secret, processes, reports = Secret.fresh(), {}, {}
    cluster = {"trainers": 1, "workers": 1, "heartbeat_timeout_seconds": HEARTBEAT_SECONDS}
    config = small_config(cluster=cluster)
    with ExitStack() as stack, listen("127.0.0.1", 0) as listener:
        address = MasterAddress(*listener.getsockname())
        for role in config.cluster.topology.roles:
            reports[role], theirs = fork_context().Pipe()
            rest = (config, secret, listener if role == MASTER else address, theirs)
            process = forked_process(take_part, role, role == frozen, *rest)
            processes[role] = stack.enter_context(process)
            theirs.close()
        listener.close()
        victim = psutil.Process(processes[frozen].pid)
        assert eventually(lambda: victim.status() == psutil.STATUS_STOPPED, START_SECONDS)
        others = {role: each for role, each in reports.items() if role != frozen}
        assert all(each.poll(HEARTBEAT_SECONDS + 1) for each in others.values())
        return {role: each.recv() for role, each in others.items()}


def test_frozen_worker_is_reported() -> None:
    errors = endings(WORKER)
    assert re.fullmatch(rf"worker 0 \(host \S+, pid \d+\) {SILENCE}", errors[MASTER])
    assert errors[TRAINER] == f"stopped by the master: {errors[MASTER]}"


def test_frozen_master_is_reported() -> None:
    for error in endings(MASTER).values():
        assert re.fullmatch(f"the master {SILENCE}", error)
