"""Whether the workers' hosts have the memory for tables, and for copies of them."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hybrid import transport
from hybrid.embedding.placement import Placement, Shard
from hybrid.errors import HybridError
from hybrid.topology import Role

PING_TIMEOUT_SECONDS = 10.0
# Of the free memory: the rest is left to everybody else on the host.
_SHARE_FOR_COPIES = 0.8


class _Need(NamedTuple):
    """What a host holds, or would hold."""

    host: str
    roles: list[Role]
    shards: list[Shard]
    available_bytes: int

    @property
    def num_bytes(self) -> int:
        return sum(shard.num_bytes for shard in self.shards)


def check_memory(placement: Placement, holders: Sequence[Role]) -> None:
    """Refuse tables that the workers' hosts have no memory for, before anything is allocated.

    Raises:
        HybridError: naming the host, its workers and the largest table on them.
    """
    for need in _needs(placement, holders):
        if need.num_bytes > need.available_bytes:
            largest = max(need.shards, key=lambda s: s.num_bytes)
            names = ", ".join(str(role) for role in need.roles)
            raise HybridError(
                f"{names} on {need.host}: tables need {_gib(need.num_bytes)}, "
                f"{_gib(need.available_bytes)} of memory are free; the largest is {largest.table.name} with "
                f"{_gib(largest.num_bytes)}: use fewer rows, a smaller embedding.dim, or more hosts"
            )


def has_memory_for_copies(placement: Placement, holders: Sequence[Role]) -> bool:
    """Whether every worker can hold a second copy of its tables for a while."""
    needs = _needs(placement, holders)
    return all(need.num_bytes <= _SHARE_FOR_COPIES * need.available_bytes for need in needs)


def _needs(placement: Placement, holders: Sequence[Role]) -> Iterator[_Need]:
    vitals = dict(
        zip(
            holders, transport.gather([transport.ping(r, PING_TIMEOUT_SECONDS) for r in holders]), strict=True
        )
    )
    by_host: dict[str, list[Role]] = defaultdict(list)
    for role, vital in vitals.items():
        by_host[vital.host].append(role)
    for host, roles in by_host.items():
        shards = [s for role in roles for s in placement.of_worker(role.index)]
        yield _Need(host, roles, shards, min(vitals[role].available_bytes for role in roles))


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB"
