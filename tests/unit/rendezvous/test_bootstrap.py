"""What a role checks after its registration, before torch starts."""

import json
import re
import resource
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import pytest
from support.commands import eventually
from support.fork_context import fork_context
from torch.distributed import HashStore
from unit.rendezvous.running import ADDRESS, SECONDS, WORKER, open_rendezvous

from hybrid.config import RunConfig
from hybrid.errors import ClusterError, HybridError
from hybrid.security.secret import Secret
from hybrid.topology import MASTER, Role, RoleKind
from workers.rendezvous.bootstrap import check_connections, join
from workers.rendezvous.host_setup import MasterAddress
from workers.rendezvous.interrupt import end_now

START_SECONDS = 60.0
TRAINER = Role(RoleKind.TRAINER)
ROLES = (MASTER, TRAINER, WORKER)
CONNECT = socket.create_connection


def _join(
    address: MasterAddress, secret: Secret, settings: Sequence[str], files: int, pipe: Connection
) -> None:
    if files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    try:
        with join(WORKER, address, secret, settings):
            pipe.send("joined")
    except HybridError as error:
        pipe.send(str(error))
        end_now(1)


@pytest.mark.parametrize(
    ("settings", "files", "message"),
    [
        (["cluster.interface=none0"], 0, "cluster.interface = 'none0': this host has .*"),
        ([], 90, r"a role of .* needs about 156 open files, and 90 are allowed \(ulimit .*"),
        (["train.epochs=2"], 0, "train.epochs: is decided by the master; set it there"),
    ],
    ids=["interface", "open files", "key of the master"],
)
def test_requirement_of_host_is_reported_on_both_sides(settings: list[str], files: int, message: str) -> None:
    context = fork_context()
    pipe, theirs = context.Pipe(duplex=False)
    with open_rendezvous(config=RunConfig()) as opened:
        address = MasterAddress(ADDRESS, opened.port)
        process = context.Process(target=_join, args=(address, opened.secret, settings, files, theirs))
        process.start()
        theirs.close()
        assert pipe.poll(START_SECONDS)
        reported = pipe.recv()
        process.join(SECONDS)
        assert re.fullmatch(message, reported)
        if "decided by the master" not in reported:  # it does not even connect
            assert eventually(lambda: opened.lost, SECONDS)
            name = rf"worker 0 \(host \S+, pid {process.pid}\)"
            assert re.fullmatch(f"{name} has ended: {message}", str(opened.lost[0]))


@pytest.mark.parametrize(("networks", "attempts"), [("abc", 6), ("aab", 4), ("aaa", 0), ("blocked", -1)])
def test_roles_of_different_hosts_connect_or_name_a_blocked_pair(
    networks: str, attempts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, thread, tried = HashStore(), threading.local(), list[Role]()
    store.set_timeout(timedelta(seconds=0.5))
    is_blocked = networks == "blocked"
    hosts = zip(ROLES, "abc" if is_blocked else networks, strict=True)
    store.set("hosts", json.dumps({str(role): (f"host-{network}", network) for role, network in hosts}))

    def connect(address: tuple[str, int], *args: Any, **keywords: Any) -> socket.socket:
        tried.append(thread.role)
        is_blocked_now = is_blocked and thread.role == TRAINER
        if is_blocked_now and json.loads(store.get(f"address/{WORKER}"))[1] == address[1]:
            raise OSError(113, "No route to host")
        return CONNECT(address, *args, **keywords)

    def run(role: Role) -> None:
        thread.role = role
        check_connections(role, store, "lo", SECONDS)

    monkeypatch.setattr(socket, "create_connection", connect)
    with ThreadPoolExecutor(len(ROLES)) as threads:
        ended = {role: threads.submit(run, role) for role in ROLES}
        errors = {role: each.exception(SECONDS) for role, each in ended.items()}
    assert is_blocked or len(tried) == attempts
    if not is_blocked:
        assert errors == dict.fromkeys(ROLES)
        return
    assert isinstance(errors[TRAINER], ClusterError)
    message = r"trainer 0 on host host-b .* worker 0 on host host-c at 127\.0\.0\.1:\d+ .*cluster\.interface"
    assert re.match(message, str(errors[TRAINER]))
    assert errors[MASTER], "no role continues without the others"
    assert errors[WORKER]
