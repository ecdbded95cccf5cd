"""Table specifications from the configuration and the data set."""

import os
from collections.abc import Mapping
from dataclasses import replace

from hybrid.config import ColumnSection, RunConfig, TableSection
from hybrid.config.data_sections import UNPOOLED
from hybrid.config.resolved_columns import sequence_length
from hybrid.config.table_sections import table_optimizer, table_placement
from hybrid.config.validation import table_of_column
from hybrid.dense.net_builder import extra_columns
from hybrid.embedding.placement import Placement, place
from hybrid.embedding.pretrained_by_position import absolute, shape_of
from hybrid.embedding.table_spec import OptimizerSpec, Pooling, TableSpec
from hybrid.errors import ConfigError
from hybrid.input_spec import FeatureSpec, InputSpec
from hybrid.storage.remote_path import is_url

_SPEC_FIELDS = {"beta": "ftrl_beta", "l1": "ftrl_l1"}  # arguments whose field has another name


def table_specs(config: RunConfig, input_spec: InputSpec, extra_columns: int = 0) -> tuple[TableSpec, ...]:
    """Return one table per sparse feature, or per [tables.NAME] section that lists several.

    Args:
        extra_columns: columns beyond ``embedding.dim`` that the dense net needs in every table.

    Raises:
        ConfigError: a [tables.NAME] section has no feature, two sections list one feature, a section has the
            name of a feature that it does not list, or a feature with one id per sample is a sequence.
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
    return tuple(_table_spec(config, name, specs, extra_columns) for name, specs in readers.items())


def _table_spec(config: RunConfig, name: str, features: list[FeatureSpec], extra_columns: int) -> TableSpec:
    section = config.tables.get(name, TableSection())
    shared = config.embedding
    placement = table_placement(shared, section)
    num_rows = max(f.num_rows for f in features)
    pooling = Pooling(shared.pooling)
    poolings = tuple(_pooling(config, feature, pooling) for feature in features)
    sequences = tuple(_sequence(config, feature) for feature in features)
    optimizer = OptimizerSpec("frozen", 0.0)
    if not section.frozen:
        call = table_optimizer(shared, section)
        arguments = {_SPEC_FIELDS.get(name, name): value for name, value in call.arguments.items()}
        optimizer = OptimizerSpec(call.name, section.learning_rate or shared.learning_rate, **arguments)
    return TableSpec(
        name=name,
        num_rows=num_rows,
        dim=(section.dim or shared.dim) + extra_columns,
        pooling=pooling,
        features=tuple(f.name for f in features),
        optimizer=optimizer,
        # The scale of DLRM (Naumov et al. 2019).
        init_scale=section.initializer.arguments.get("scale") or num_rows**-0.5,
        placement=placement.name,
        pooled_by=placement["pooled_by"],
        workers=placement["workers"],
        bytes_per_value=8 if config.train.dtype == "float64" else 4,
        initial=absolute(section.initial) if section.initial else "",
        init=section.initializer.name,
        poolings=poolings if {*poolings} != {pooling} else (),
        sequences=sequences if any(sequences) else (),
    )


def _pooling(config: RunConfig, feature: FeatureSpec, of_table: Pooling) -> Pooling:
    """Return the pooling of a feature; raise ConfigError if weighted ids rule it out."""
    own = config.columns.get(feature.name, ColumnSection()).pooling
    if own == UNPOOLED:
        return of_table  # which a sequence does not use
    found = Pooling(own or of_table)
    if feature.weighted and found is Pooling.MAX:
        rule = f"must be sum or mean, since the ids of column {feature.name} have weights"
        raise ConfigError(
            f"columns.{feature.name}.pooling" if own else "embedding.pooling", rule, found.value
        )
    return found


def _sequence(config: RunConfig, feature: FeatureSpec) -> int:
    """Return the largest length of a sequence, else 0; raise ConfigError for one id per sample."""
    length = sequence_length(feature.name, config.columns.get(feature.name, ColumnSection()))
    if length and not feature.multi_hot:
        rule = "needs a column of several ids: set its multi_hot_separator, or leave pooling out"
        raise ConfigError(f"columns.{feature.name}.pooling", rule, UNPOOLED)
    return length


def _with_rows(table: TableSpec, data_source: str | None) -> TableSpec:
    """Return ``table`` with what its pretrained rows need; raise ConfigError if they do not fit."""
    if not table.initial:
        return table
    key = f"tables.{table.name}.initial"
    found = table.initial if is_url(table.initial) else os.path.relpath(table.initial)
    if table.initial.endswith(".parquet"):
        if len(table.features) > 1:
            rule = "must not be Parquet, whose rows are found by value, for a table of several columns"
            raise ConfigError(key, rule, found)
        return replace(table, keys=data_source or "")
    shape = shape_of(table.initial)
    if shape != (table.num_rows, table.dim):
        rule = (
            f"must have {table.num_rows} rows of {table.dim}, as the table has, not {shape[0]} of {shape[1]}"
        )
        raise ConfigError(key, rule, found)
    return table


def place_tables(
    config: RunConfig,
    input_spec: InputSpec,
    ids_per_sample: Mapping[str, float],
    data_source: str | None = None,
) -> tuple[tuple[TableSpec, ...], Placement]:
    """Return the tables of a run and their placement on workers.

    Args:
        ids_per_sample: mean number of ids of the multi-hot features, which their traffic depends on.
        data_source: the location of the prepared data, if there is any.

    Raises:
        ConfigError: see :func:`table_specs`, or pretrained rows do not fit their table.
        DataError: pretrained rows cannot be read.
    """
    tables = table_specs(config, input_spec, extra_columns(config.dense.net_call.name))
    tables = tuple(_with_rows(table, data_source) for table in tables)
    known = ids_per_sample, samples_of_lookup(config), wire_bytes_per_value(config)
    return tables, place(tables, config.cluster.workers, *known)


def samples_of_lookup(config: RunConfig) -> float:
    """Return the mean number of samples in a lookup of a trainer."""
    return config.train.batch_size / config.cluster.trainers / config.train.micro_batches


def wire_bytes_per_value(config: RunConfig) -> int | None:
    """Return the bytes of a sent value in training; None for those of the rows."""
    return 2 if config.embedding.wire_dtype == "bfloat16" else None
