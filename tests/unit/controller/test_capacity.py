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
    """Bytes free by limit; and the limits of each worker. All hosts have the same name."""
    limits: dict[str, Any] = {"of": ["a", "b"], "a": 0, "b": 0, "all": 1 << 50}

    def ping(role: Role, timeout_seconds: float) -> FakePing:
        free = {name: limits[name] for name in limits["of"][role.index]}
        return FakePing(ProcessStatus("host", free))

    monkeypatch.setattr("hybrid.transport.ping", ping)
    return limits


@pytest.mark.parametrize(
    ("of", "names"),
    [
        (["a", "b"], "worker 0"),
        (["a", "a"], "worker 0, worker 1"),
        ([["all", "a"], ["all", "b"]], "worker 0"),
        ([["all", "a"], ["all", "b", "a"]], "worker 0, worker 1"),
    ],
    ids=["two hosts", "one host", "two containers of a host", "nested groups of a host"],
)
def test_tables_that_exceed_a_limit_are_reported(free: dict[str, Any], of: list[Any], names: str) -> None:
    needed = BYTES[0] if names == "worker 0" else sum(BYTES)
    free |= {"of": of, "a": needed - 1, "b": 1 << 40}
    message = memory_shortage(PLACEMENT, WORKERS)
    assert message is not None
    assert re.match(f"{re.escape(names)} on host: tables need .* the largest table is c with", message)
    free["a"] = needed
    assert memory_shortage(PLACEMENT, WORKERS) is None
    assert memory_shortage(PLACEMENT, WORKERS, 0.8) is not None
