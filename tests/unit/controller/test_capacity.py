"""Whether hosts have the memory for tables, and for copies of them."""

import re
from typing import Any

import pytest
from support.shards import specs

from hybrid.embedding.placement import place
from hybrid.topology import Role, RoleKind
from hybrid.transport import ProcessStatus
from workers.controller.deployment import memory_shortage

WORKERS = [Role(RoleKind.WORKER, index) for index in range(2)]
PLACEMENT = place(specs("row"), 2)
BYTES = [sum(shard.num_bytes for shard in PLACEMENT.of_worker(index)) for index in range(2)]


class FakePing:
    def __init__(self, vitals: ProcessStatus) -> None:
        self._vitals = vitals

    def done(self, wait_seconds: float = 0.0) -> bool:
        return True

    def wait(self) -> ProcessStatus:
        return self._vitals


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Bytes free on each host; and which host each worker is on."""
    hosts: dict[str, Any] = {"of": ["a", "b"], "a": 0, "b": 0}

    def ping(role: Role, timeout_seconds: float) -> FakePing:
        host = hosts["of"][role.index]
        return FakePing(ProcessStatus(host, 1, hosts[host], 0, 0, 0, 0))

    monkeypatch.setattr("hybrid.transport.ping", ping)
    return hosts


@pytest.mark.parametrize("of", [["a", "b"], ["a", "a"]], ids=["two hosts", "one host"])
def test_tables_that_do_not_fit_a_host_are_reported(free: dict[str, Any], of: list[str]) -> None:
    needed = BYTES[0] if of[1] == "b" else sum(BYTES)
    free |= {"of": of, "a": needed - 1, "b": 1 << 40}
    names = "worker 0" if of[1] == "b" else "worker 0, worker 1"
    message = memory_shortage(PLACEMENT, WORKERS)
    assert message is not None
    assert re.match(f"{re.escape(names)} on a: tables need .* the largest table is c with", message)
    free["a"] = needed
    assert memory_shortage(PLACEMENT, WORKERS) is None
    assert memory_shortage(PLACEMENT, WORKERS, 0.8) is not None
