"""A role that is frozen while torch connects them: the others say so in time, though torch hears nothing."""

import os
import re
import signal
import threading
from contextlib import ExitStack
from multiprocessing.connection import Connection
from socket import socket
from unittest import mock

import psutil
from support.cluster import small_config
from support.commands import eventually
from support.fork_context import fork_context

from hybrid.config import RunConfig
from hybrid.errors import ClusterError
from hybrid.security.secret import Secret
from hybrid.topology import MASTER, Role, RoleKind
from hybrid.transport.rpc import rpc_group
from workers.rendezvous.bootstrap import join, lead
from workers.rendezvous.master_address import MasterAddress, listen

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
    said: Connection,
) -> None:
    """Join a cluster and say why that failed; one that freezes does so before all are connected."""

    def freeze(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)
        # Another thread takes the signal, and this one runs on until it does: on busy cores, long enough to
        # close what torch listens on.
        threading.Event().wait()

    with ExitStack() as stack:
        if is_freezing:
            stack.enter_context(mock.patch.object(rpc_group, "greet", freeze))
        try:
            with (
                join(role, listener, secret)
                if isinstance(listener, MasterAddress)
                else lead(config, secret, listener)
            ):
                said.send("joined")
        except ClusterError as error:
            said.send(str(error))


def endings(frozen: Role) -> dict[Role, str]:
    """What the others of a cluster of one trainer and one worker say once this role is frozen."""
    context = fork_context()
    secret, processes, said = Secret.fresh(), {}, {}
    with listen("127.0.0.1", 0) as listener:
        config = small_config(
            cluster={
                "trainers": 1,
                "workers": 1,
                "heartbeat_timeout_seconds": HEARTBEAT_SECONDS,
            }
        )
        address = MasterAddress(*listener.getsockname())
        for role in config.cluster.topology.roles:
            said[role], theirs = context.Pipe()
            rest = (config, secret, listener if role == MASTER else address, theirs)
            processes[role] = context.Process(target=take_part, args=(role, role == frozen, *rest))
            processes[role].start()
            theirs.close()
    try:
        victim = psutil.Process(processes[frozen].pid)
        assert eventually(lambda: victim.status() == psutil.STATUS_STOPPED, START_SECONDS)
        others = {role: each for role, each in said.items() if role != frozen}
        assert all(each.poll(HEARTBEAT_SECONDS + 1) for each in others.values())
        return {role: each.recv() for role, each in others.items()}
    finally:
        for process in processes.values():
            process.kill()
            process.join(START_SECONDS)


def test_a_worker() -> None:
    said = endings(WORKER)
    assert re.fullmatch(rf"worker 0 \(host \S+, pid \d+\) {SILENCE}", said[MASTER])
    assert said[TRAINER] == f"stopped by the master: {said[MASTER]}"


def test_the_master() -> None:
    for words in endings(MASTER).values():
        assert re.fullmatch(f"the master {SILENCE}", words)
