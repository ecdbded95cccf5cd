"""Tables, their placement, and nets from a configuration, for all roles and for predictions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from hybrid.config import ColumnSection, RunConfig, TableSection
from hybrid.config.data_sections import UNPOOLED, sequence_length
from hybrid.config.table_sections import table_optimizer, table_placement
from hybrid.config.validation import table_growth, table_of_column
from hybrid.dense.dense_optimizer import make_optimizer
from hybrid.dense.hosted_net import HostedNet
from hybrid.dense.net_builder import build_dense_net, build_remote_net, extra_columns
from hybrid.embedding.placement import Placement, place
from hybrid.embedding.table_spec import UNLIMITED_ROWS, Growth, OptimizerSpec, Pooling, TableSpec, tables_of
from hybrid.engine.hybrid_model import HybridModel, RemoteStage
from hybrid.errors import ConfigError
from hybrid.input_spec import FeatureSpec, InputSpec
from hybrid.models.dense_net import DenseNet
from hybrid.updates.update_rules import UpdateRules

_SPEC_FIELDS = {"beta": "ftrl_beta", "l1": "ftrl_l1"}  # arguments whose field has another name


def table_specs(config: RunConfig, input_spec: InputSpec) -> tuple[TableSpec, ...]:
    """Return the tables of a run: one per section [tables.NAME], and one per other sparse feature.

    Raises:
        ConfigError: a section names a column that does not exist, or has the name of a column that it does
            not list; two sections list one column; a sequence has one id per sample, or no maximum length;
            weighted ids have the pooling "max"; or a growing table has settings that forbid growth.
    """
    features = {f.name: f for f in input_spec.sparse_features}
    owner = table_of_column(config.tables)
    for name, section in config.tables.items():
        if section.features and name in features and name not in section.features:
            rule = f"must list column {name!r}, or the table be renamed"
            raise ConfigError(f"tables.{name}.features", rule)
        for feature in section.features or (name,):
            if feature not in features:
                raise ConfigError(f"tables.{name}", f"there is no sparse column {feature!r}")
    readers: dict[str, list[FeatureSpec]] = {}
    for feature_spec in input_spec.sparse_features:
        readers.setdefault(owner.get(feature_spec.name, feature_spec.name), []).append(feature_spec)
    return tuple(_table_spec(config, name, specs) for name, specs in readers.items())


def _table_spec(config: RunConfig, name: str, features: list[FeatureSpec]) -> TableSpec:
    section = config.tables.get(name, TableSection())
    shared = config.embedding
    placement = table_placement(shared, section)
    growth_call = table_growth(config, name, [f.name for f in features])
    growth = None if growth_call is None else Growth(**growth_call.arguments)
    num_rows = max(f.num_rows for f in features)
    scaled_rows = num_rows if growth is None else growth.max_rows or UNLIMITED_ROWS
    pooling = Pooling(shared.pooling)
    poolings = tuple(_pooling(config, feature, pooling) for feature in features)
    sequences = tuple(_sequence(config, feature) for feature in features)
    optimizer = OptimizerSpec("frozen", 0.0)
    if not section.frozen:
        call = table_optimizer(shared, section)
        arguments = {_SPEC_FIELDS.get(key, key): value for key, value in call.arguments.items()}
        optimizer = OptimizerSpec(call.name, section.learning_rate or shared.learning_rate, **arguments)
    return TableSpec(
        name=name,
        num_rows=num_rows,
        dim=(section.dim or shared.dim) + extra_columns(config.dense.net_call.name),
        pooling=pooling,
        features=tuple(f.name for f in features),
        optimizer=optimizer,
        # The scale of DLRM (Naumov et al. 2019).
        init_scale=section.initializer.arguments.get("scale") or scaled_rows**-0.5,
        placement=placement.name,
        pooled_by=placement["pooled_by"],
        workers=placement["workers"],
        bytes_per_value=8 if config.train.dtype == "float64" else 4,
        init=section.initializer.name,
        poolings=poolings if {*poolings} != {pooling} else (),
        sequences=sequences if any(sequences) else (),
        growth=growth,
        has_bfloat16_rows=(section.dtype or shared.dtype) == "bfloat16",
    )


def _pooling(config: RunConfig, feature: FeatureSpec, default: Pooling) -> Pooling:
    """Return the pooling of a feature; raise ConfigError if its ids have weights and the pooling is "max"."""
    own = config.columns.get(feature.name, ColumnSection()).pooling
    if own == UNPOOLED:
        return default  # which a sequence does not use
    pooling = Pooling(own or default)
    if feature.weighted and pooling is Pooling.MAX:
        rule = f"must be sum or mean, since the ids of column {feature.name} have weights"
        raise ConfigError(
            f"columns.{feature.name}.pooling" if own else "embedding.pooling", rule, pooling.value
        )
    return pooling


def _sequence(config: RunConfig, feature: FeatureSpec) -> int:
    length = sequence_length(feature.name, config.columns.get(feature.name, ColumnSection()))
    if length and not feature.multi_hot:
        rule = "needs a column of several ids: set its multi_hot_separator, or leave pooling out"
        raise ConfigError(f"columns.{feature.name}.pooling", rule, UNPOOLED)
    return length


def place_configured_tables(
    config: RunConfig, tables: Sequence[TableSpec], ids_per_sample: Mapping[str, float]
) -> Placement:
    """Return the placement of the tables of a run; ConfigError if a table names a worker that does not exist.

    Args:
        ids_per_sample: mean number of ids per sample of each multi-hot feature, to estimate traffic.
    """
    samples, wire_bytes = samples_of_lookup(config), wire_bytes_per_value(config)
    return place(tables, config.cluster.workers, ids_per_sample, samples, wire_bytes)


def samples_of_lookup(config: RunConfig) -> float:
    """Return the mean number of samples in a lookup of a trainer."""
    return config.train.batch_size / config.cluster.trainers / config.train.micro_batches


def wire_bytes_per_value(config: RunConfig) -> int | None:
    """Return the bytes per value (2) if messages round vectors and gradients to bfloat16, else None."""
    return 2 if config.embedding.wire_dtype == "bfloat16" else None


@dataclass(frozen=True, slots=True)
class Blueprint:
    """The specification of the dense nets of a run; every role builds the same nets from it."""

    config: RunConfig
    input_spec: InputSpec
    tables: Sequence[TableSpec]

    @property
    def dtype(self) -> torch.dtype:
        """The type of dense nets, optimizer state, and rows that are not in bfloat16."""
        dtype: torch.dtype = getattr(torch, self.config.train.dtype)
        return dtype

    @property
    def widths(self) -> list[int]:
        """The number of values of each sparse feature in the input of the dense net, in feature order."""
        return [table.width for table in tables_of(self.input_spec, self.tables)]

    @property
    def sequences(self) -> tuple[int, ...]:
        """Indices of the features that are sequences, whose ids are ordered."""
        tables = tables_of(self.input_spec, self.tables)
        return tuple(k for k, table in enumerate(tables) if table.sequence)

    def dense_net(self) -> DenseNet:
        """Build a trainer's net in ``train.dtype``, with the same initial weights in every process."""
        return build_dense_net(self.config, self.input_spec, self.widths).to(self.dtype)

    def remote_net(self) -> nn.Sequential | None:
        """Build the net of ``dense.remote_mlp``; None without this key."""
        if not self.config.dense.remote_mlp:
            return None
        return build_remote_net(self.config, self.input_spec, self.widths).to(self.dtype)

    def model(self, net: DenseNet, remote_net: RemoteStage | None) -> HybridModel:
        """Return the trainer's model of ``net`` and ``remote_net``, in ``train.dtype``."""
        config, name = self.config, self.config.dense.autocast
        autocast = None if name == "none" else getattr(torch, name)
        return HybridModel(net, remote_net, self.dtype, autocast, config.num_outputs)

    def optimizer(self, net: nn.Module, *, is_remote: bool = False) -> torch.optim.Optimizer:
        dense = self.config.dense
        name, options = dense.optimizer_call
        groups = self.config.dense_groups
        return make_optimizer(net, name, dense.learning_rate, options, groups, is_remote=is_remote)


def host_remote_net(blueprint: Blueprint, rules: UpdateRules) -> HostedNet:
    net = blueprint.remote_net()
    assert net is not None, "dense.remote_mlp requires a net"
    return HostedNet(net, blueprint.optimizer(net, is_remote=True), rules)
