"""A role that freezes while torch connects the roles: the others report it within the heartbeat timeout."""

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
from support.fork_context import fork_context, forked_process

from hybrid.config import RunConfig
from hybrid.errors import ClusterError
from hybrid.security.secret import Secret
from hybrid.topology import MASTER, Role, RoleKind
from hybrid.transport import stubs
from workers.rendezvous.bootstrap import join, lead
from workers.rendezvous.host_setup import MasterAddress, listen

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
