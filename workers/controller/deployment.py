"""What a job has on the roles of a cluster: the master creates it there, and keeps a stub of each object."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from hybrid import transport
from hybrid.checkpoint.checkpoint_files import Files
from hybrid.config import RunConfig
from hybrid.embedding.placement import Placement
from hybrid.embedding.worker.table_shards import TableShards
from hybrid.engine.model_builder import Blueprint, host_remote_net
from hybrid.primitives.step_timings import Span
from hybrid.protocol.update_rules import UpdateRules
from hybrid.server.hosted_module import Hosted
from hybrid.storage.remote_path import StoragePath
from hybrid.topology import Role, RoleKind, Topology
from workers.controller.job_messages import Job
from workers.controller.remote_trainer import Trainer
from workers.controller.trainer_script import Script

# Filling, writing and reading whole tables, and making trainers.
BULK_TIMEOUT_SECONDS = 3600.0


def local_constructors(settings: Sequence[str]) -> list[partial[Any]]:
    """Return constructors of the objects to which a role adds its own settings; see :func:`with_own`."""
    classes: tuple[Callable[..., Any], ...] = (Script, Trainer)
    return [partial(each, settings=settings) for each in classes]


class Called(Protocol):
    """What every object of a job has: a trainer, the tables of a worker, a remote net."""

    def record(self, steps: range) -> None: ...

    def take_spans(self) -> list[Span]: ...

    def write(self, folder: StoragePath) -> Files: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Deployment:
    """The stubs of a job.

    Attributes:
        trainers: in the order of their index.
        tables: by worker, of those that hold rows.
        remote_net: the remote dense net, or None.
    """

    trainers: Sequence[transport.Remote[Trainer]]
    tables: dict[int, transport.RemoteTables]
    remote_net: transport.RemoteNet | None

    @property
    def hosted(self) -> list[transport.RemoteHosted[Hosted]]:
        """All that workers update: their tables, and the remote net where there is one."""
        return [*self.tables.values(), *([self.remote_net] if self.remote_net else [])]

    @property
    def everything(self) -> list[transport.Remote[Called]]:
        return [*self.trainers, *self.hosted]

    def settle(self, meanwhile: Callable[[], object]) -> None:
        """Return once the gradients of all steps are with the workers; updates may be under way.

        Args:
            meanwhile: called every now and then.
        """
        transport.gather([trainer.call(Trainer.settle) for trainer in self.trainers], meanwhile)


def deploy(
    topology: Topology,
    blueprint: Blueprint,
    placement: Placement,
    rules: UpdateRules,
    data_source: str | None,
) -> Deployment:
    """Create everything that a job needs on the roles of ``topology``; see :class:`Job`."""
    tables = deploy_tables(topology, blueprint.config, placement, rules)
    remote_net = _create_remote_net(blueprint, rules)
    job = Job(blueprint, placement, rules, tables, remote_net, data_source)
    bulk = BULK_TIMEOUT_SECONDS
    trainers = [transport.create(r, Trainer, r.index, job, timeout_seconds=bulk) for r in topology.trainers]
    return Deployment(transport.gather(trainers), tables, remote_net)


def deploy_tables(
    topology: Topology, config: RunConfig, placement: Placement, rules: UpdateRules
) -> dict[int, transport.RemoteTables]:
    """Create the tables of a placement, and fill them with their initial rows."""
    holders = table_holders(topology, placement)
    tables = {role.index: _create_tables(role, config, placement, rules) for role in holders}
    seed, bulk = config.run.seed, BULK_TIMEOUT_SECONDS
    transport.gather([t.call(TableShards.initialise, seed, timeout_seconds=bulk) for t in tables.values()])
    return tables


def table_holders(topology: Topology, placement: Placement) -> list[Role]:
    """The workers that hold rows."""
    return [worker for worker in topology.workers if placement.of_worker(worker.index)]


def _create_tables(
    role: Role, config: RunConfig, placement: Placement, rules: UpdateRules
) -> transport.RemoteTables:
    dtype = getattr(torch, config.train.dtype)
    wire_dtype = None if config.embedding.wire_dtype == "rows" else torch.bfloat16
    module = transport.create_module(role, TableShards, placement, role.index, rules, dtype, wire_dtype)
    return transport.RemoteTables(role, module)


def _create_remote_net(blueprint: Blueprint, rules: UpdateRules) -> transport.RemoteNet | None:
    dense = blueprint.config.dense
    if not dense.remote_mlp:
        return None
    role = Role(RoleKind.WORKER, 0)
    return transport.RemoteNet(role, transport.create_module(role, host_remote_net, blueprint, rules))
