"""The roles of a cluster, with their ranks and RPC names.

Ranks are laid out as::

    rank 0          master
    rank 1 .. T     trainer 0 .. T-1
    rank T+1 .. T+W worker 0 .. W-1
"""

import os
from dataclasses import dataclass
from enum import StrEnum


class RoleKind(StrEnum):
    """The three kinds of process in a cluster."""

    MASTER = "master"
    TRAINER = "trainer"
    WORKER = "worker"


@dataclass(frozen=True, order=True, slots=True)
class Role:
    """A process of the cluster: its kind, and its index among the processes of this kind."""

    kind: RoleKind
    index: int = 0

    @property
    def rpc_name(self) -> str:
        """The name under which RPC knows this process, such as ``trainer1``."""
        return str(self).replace(" ", "")

    def __str__(self) -> str:
        return self.kind if self.kind is RoleKind.MASTER else f"{self.kind} {self.index}"


MASTER = Role(RoleKind.MASTER)


@dataclass(frozen=True, slots=True)
class Topology:
    """The shape of a cluster: one master, ``num_trainers`` trainers, ``num_workers`` workers."""

    num_trainers: int
    num_workers: int

    @property
    def world_size(self) -> int:
        return 1 + self.num_trainers + self.num_workers

    @property
    def trainers(self) -> tuple[Role, ...]:
        return tuple(Role(RoleKind.TRAINER, i) for i in range(self.num_trainers))

    @property
    def workers(self) -> tuple[Role, ...]:
        return tuple(Role(RoleKind.WORKER, i) for i in range(self.num_workers))

    @property
    def roles(self) -> tuple[Role, ...]:
        """Every role, in the order of ranks."""
        return (MASTER, *self.trainers, *self.workers)

    def partners(self, role: Role) -> tuple[Role, ...]:
        """Return the roles that ``role`` calls by RPC.

        The master calls all roles. Each trainer calls the master and all workers, each worker the master and
        all trainers.
        """
        if role.kind is RoleKind.MASTER:
            return self.roles
        return MASTER, *(self.workers if role.kind is RoleKind.TRAINER else self.trainers)

    def rank(self, role: Role) -> int:
        """Return the rank; ValueError if the cluster has no such role."""
        return self.roles.index(role)

    def __str__(self) -> str:
        return f"1 master, {self.num_trainers} trainer(s), {self.num_workers} worker(s)"


def polls_shared_memory(world_size: int) -> bool:
    """Return whether RPC uses shared memory within a host: if ``world_size`` is at most the number of cores.

    TensorPipe polls shared memory all the time. With more roles than cores, this delays roles that compute.
    """
    return world_size <= (os.cpu_count() or 1)
