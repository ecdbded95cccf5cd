"""Whether hosts have the memory for tables, and for copies of them."""

import re
from typing import Any

import pytest
from support.shards import specs

from hybrid.embedding.placement import place
from hybrid.errors import HybridError
from hybrid.topology import Role, RoleKind
from hybrid.transport import Vitals
from workers.controller.deployment import check_memory, has_memory_for_copies

WORKERS = [Role(RoleKind.WORKER, index) for index in range(2)]
PLACEMENT = place(specs("row"), 2)
BYTES = [sum(shard.num_bytes for shard in PLACEMENT.of_worker(index)) for index in range(2)]


class FakePing:
    def __init__(self, vitals: Vitals) -> None:
        self._vitals = vitals

    def done(self, wait_seconds: float = 0.0) -> bool:
        return True

    def wait(self) -> Vitals:
        return self._vitals


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Bytes free on each host; and which host each worker is on."""
    hosts: dict[str, Any] = {"of": ["a", "b"], "a": 0, "b": 0}

    def ping(role: Role, timeout_seconds: float) -> FakePing:
        host = hosts["of"][role.index]
        return FakePing(Vitals(host, 1, hosts[host], 0, 0, 0, 0))

    monkeypatch.setattr("hybrid.transport.ping", ping)
    return hosts


def test_tables_that_fit_are_taken(free: dict[str, Any]) -> None:
    free |= {"a": BYTES[0], "b": BYTES[1]}
    check_memory(PLACEMENT, WORKERS)


@pytest.mark.parametrize("of", [["a", "b"], ["a", "a"]], ids=["two hosts", "one host"])
def test_tables_of_a_host_that_do_not_fit_are_refused(free: dict[str, Any], of: list[str]) -> None:
    needed = BYTES[0] if of[1] == "b" else sum(BYTES)
    free |= {"of": of, "a": needed - 1, "b": 1 << 40}
    names = "worker 0" if of[1] == "b" else "worker 0, worker 1"
    with pytest.raises(HybridError, match=f"^{re.escape(names)} on a: tables need .* the largest is c with"):
        check_memory(PLACEMENT, WORKERS)


@pytest.mark.parametrize(("share", "fits"), [(1.0, False), (1.24, False), (1.26, True)])
@pytest.mark.parametrize("host", ["a", "b"])
def test_copies_leave_some_memory_free_on_every_host(
    free: dict[str, Any], host: str, share: float, fits: bool
) -> None:
    free |= {"a": 1 << 40, "b": 1 << 40}
    free[host] = int(share * BYTES["ab".index(host)]) + 1
    assert has_memory_for_copies(PLACEMENT, WORKERS) is fits
