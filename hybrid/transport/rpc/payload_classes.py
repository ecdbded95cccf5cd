"""The classes of this package whose values travel between roles: all of them only hold data."""

from collections.abc import Callable
from typing import Any

from hybrid import config
from hybrid.batch import Batch, SparseFeatures
from hybrid.config.sections import NAMED_TYPES, SECTION_TYPES
from hybrid.embedding.bags import Bags
from hybrid.embedding.placement import Placement, Shard
from hybrid.embedding.table_spec import OptimizerSpec, Pooling, TableSpec
from hybrid.input_spec import FeatureSpec, InputSpec
from hybrid.metrics import Predictions
from hybrid.primitives.step_timings import Span
from hybrid.protocol.learning_rate_schedule import Schedule
from hybrid.protocol.ticket import Purpose, Ticket
from hybrid.protocol.update_rules import Staleness, UpdateMode, UpdateRules
from hybrid.storage.remote_path import RemotePath
from hybrid.topology import Role, RoleKind, Topology
from hybrid.transport.rpc.call_failure import Failure
from hybrid.transport.rpc.endpoints import Vitals, create_module
from hybrid.transport.rpc.stubs import ModuleRef, RemoteNet, RemoteTables
from hybrid.user_code.function_names import OwnFunction, OwnValue

DATA: tuple[Callable[..., Any], ...] = (
    *(config.RunConfig, *NAMED_TYPES.values(), *SECTION_TYPES.values()),
    *(Batch, SparseFeatures, FeatureSpec, InputSpec, Predictions),
    *(Bags, Placement, Shard, OptimizerSpec, Pooling, TableSpec),
    *(Ticket, Purpose, UpdateMode, UpdateRules, Schedule, Staleness, Span),
    *(RemotePath, Role, RoleKind, Topology, Vitals, Failure, OwnFunction, OwnValue),
    *(ModuleRef, RemoteNet, RemoteTables, create_module),
)
