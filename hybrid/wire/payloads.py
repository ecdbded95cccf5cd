"""The classes of this package whose values travel between roles: all of them only hold data."""

from collections.abc import Callable
from typing import Any

from hybrid import config
from hybrid.batch import Batch, SparseFeatures
from hybrid.clock import Span
from hybrid.config.sections import NAMED_TYPES, SECTION_TYPES
from hybrid.embedding.bags import Bags
from hybrid.embedding.placement import Placement, Shard
from hybrid.embedding.spec import OptimizerSpec, Pooling, TableSpec
from hybrid.input_spec import FeatureSpec, InputSpec
from hybrid.metrics import Predictions
from hybrid.own_code.names import OwnFunction, OwnValue
from hybrid.steps.rules import Staleness, UpdateMode, UpdateRules
from hybrid.steps.schedule import Schedule
from hybrid.steps.ticket import Purpose, Ticket
from hybrid.storage.places import RemotePath
from hybrid.topology import Role, RoleKind, Topology
from hybrid.wire.calls import Vitals, create_module
from hybrid.wire.failure import Failure
from hybrid.wire.stubs import ModuleRef, RemoteNet, RemoteTables

DATA: tuple[Callable[..., Any], ...] = (
    *(config.RunConfig, *NAMED_TYPES.values(), *SECTION_TYPES.values()),
    *(Batch, SparseFeatures, FeatureSpec, InputSpec, Predictions),
    *(Bags, Placement, Shard, OptimizerSpec, Pooling, TableSpec),
    *(Ticket, Purpose, UpdateMode, UpdateRules, Schedule, Staleness, Span),
    *(RemotePath, Role, RoleKind, Topology, Vitals, Failure, OwnFunction, OwnValue),
    *(ModuleRef, RemoteNet, RemoteTables, create_module),
)
