"""Ways between hosts are tried before torch takes them, and two who do not reach each other are named."""

import json
import re
import socket
import threading
import time
from collections.abc import Set
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import HashStore

from hybrid.errors import ClusterError
from hybrid.topology import MASTER, Role, RoleKind
from workers.rendezvous.bootstrap import check_connections
from workers.rendezvous.interrupt import StoppedError

TRAINER, WORKER = Role(RoleKind.TRAINER), Role(RoleKind.WORKER)
ROLES = (MASTER, TRAINER, WORKER)
SECONDS = 5.0
CONNECT = socket.create_connection


def outcomes(
    monkeypatch: pytest.MonkeyPatch,
    networks: str,
    closed: Set[tuple[Role, Role]] = frozenset(),
    error: OSError | None = None,
) -> tuple[dict[Role, BaseException | None], int]:
    """What each role comes to, and how often one has tried to connect.

    Args:
        networks: a letter for each role.
        closed: ways, from one role to another.
        error: what comes of those.
    """
    store, own, tries = HashStore(), threading.local(), list[Role]()
    hosts = {str(role): (f"host {n}", n) for role, n in zip(ROLES, networks, strict=True)}
    store.set("hosts", json.dumps(hosts))

    def connect(there: tuple[str, int], *args: Any, **kwargs: Any) -> socket.socket:
        tries.append(own.role)
        for role, other in closed:
            if role == own.role and json.loads(store.get(f"address/{other}"))[1] == there[1]:
                assert error is not None
                raise error
        time.sleep(0.05)  # so that another one's failure comes first
        return CONNECT(there, *args, **kwargs)

    def run(role: Role) -> None:
        own.role = role
        check_connections(role, store, "lo", SECONDS)

    monkeypatch.setattr(socket, "create_connection", connect)
    with ThreadPoolExecutor(len(ROLES)) as threads:
        ended = {role: threads.submit(run, role) for role in ROLES}
        return {role: each.exception(SECONDS) for role, each in ended.items()}, len(tries)


def test_all_pairs_of_hosts_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcomes(monkeypatch, "abc") == (dict.fromkeys(ROLES), 6)


def test_roles_of_one_host_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcomes(monkeypatch, "aab") == (dict.fromkeys(ROLES), 4)


def test_nothing_is_tried_on_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcomes(monkeypatch, "aaa") == (dict.fromkeys(ROLES), 0)


@pytest.mark.parametrize(
    ("error", "words"),
    [(TimeoutError("timed out"), "timed out"), (OSError(113, "No route to host"), "No route to host")],
)
def test_a_blocked_pair_is_named_with_its_port(
    error: OSError, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nobody else is: until all have tried, those who have failed can be reached."""
    found, _ = outcomes(monkeypatch, "abc", {(TRAINER, WORKER)}, error)
    where = r"worker 0 on host host c at 127\.0\.0\.1:\d+"
    said = rf"trainer 0 on host host b cannot reach {where} \({words}\); is there a firewall between them\? "
    assert all(re.match(said, str(found[role])) for role in (MASTER, TRAINER)), found
    assert type(found[MASTER]) is ClusterError
    assert all(isinstance(found[role], StoppedError) for role in (TRAINER, WORKER)), "the master knows"
    assert str(found[WORKER]) == f"stopped by the master: {found[MASTER]}"


def test_both_ends_of_a_blocked_pair_report_it(monkeypatch: pytest.MonkeyPatch) -> None:
    both = {(TRAINER, WORKER), (WORKER, TRAINER)}
    found, _ = outcomes(monkeypatch, "abc", both, TimeoutError("timed out"))
    assert re.match("worker 0 on host host c cannot reach trainer 0 on host host b at ", str(found[WORKER]))
    assert str(found[MASTER]) == str(found[TRAINER])
