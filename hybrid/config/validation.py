"""The rules between keys of a configuration.

:func:`check_rules` checks all of them. Callers with values from elsewhere check single rules again.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence

from hybrid.config.data_sections import ColumnSection, DataSection
from hybrid.config.resolved_columns import columns_of, sequence_length
from hybrid.config.sections import (
    NETS,
    DenseSection,
    ProfileSection,
    RunConfig,
    ScheduleSection,
    tasks_of,
)
from hybrid.config.table_sections import TableSection, check_all_rows, table_placement
from hybrid.config.task_sections import TaskSection, check_tasks
from hybrid.errors import ConfigError
from hybrid.storage.remote_path import is_url

SCHEDULES_THAT_END = ("cosine", "polynomial", "one_cycle")
_OF_WHOLE_MATRICES = ("Adafactor", "Muon")


def check_rules(config: RunConfig) -> None:
    """Raise ConfigError if keys contradict each other."""
    _check_data(config)
    _check_dense(config)
    check_tasks(config.all_tasks, config.data.group, config.checkpoint.keep_best)
    _check_train(config)
    for name, table in config.tables.items():
        check_workers(name, table_placement(config.embedding, table)["workers"], config.cluster.workers)
        for key in ("optimizer", "learning_rate"):
            if table.frozen and (value := getattr(table, key)) is not None:
                raise ConfigError(f"tables.{name}.{key}", "is not read of a table that is frozen", value)
        if table.initial and not table.initial.endswith(".parquet") and table.init != "uniform":
            rule = "leave init out: there are no random rows beside those of this file"
            raise ConfigError(f"tables.{name}.initial", rule, table.initial)
    check_all_rows(config.embedding, config.tables, config.train.update)
    table_of_column(config.tables)
    check_schedule(config.schedule, config.schedule.steps or None)
    if config.train.max_steps:
        recorded_steps(config.profile, 0, config.train.max_steps)


def recorded_steps(profile: ProfileSection, steps_before: int, total_steps: int) -> range:
    """Return the recorded steps of a run that starts or resumes after ``steps_before`` steps.

    Raises:
        ConfigError: the run takes fewer steps.
    """
    first = steps_before + profile.first_step
    if profile.count and first + profile.count > total_steps:
        rule = f"must be within the {total_steps - steps_before} steps that the run takes"
        raise ConfigError("profile.steps", rule, profile.steps)
    return range(first, first + profile.count)


def _check_data(config: RunConfig) -> None:
    data = config.data
    if data.format != "synthetic" and not data.path:
        raise ConfigError("data.path", f"must name the input files, since data.format is {data.format}")
    if data.format in ("csv", "parquet"):
        if not config.tasks and not data.label:
            raise ConfigError("data.label", "must name the label column", data.label)
        if not data.sparse:
            raise ConfigError("data.sparse", "must name at least one categorical column")
        check_columns(data, config.columns, config.tasks)
    if data.weighted_metrics and not data.weight:
        raise ConfigError("data.weighted_metrics", "needs data.weight, the column of the weights", True)
    if data.split != "random" and (data.format == "synthetic" or data.test_path):
        rule = "must be random where the test rows are given: by data.test_path, or in the built-in click log"
        raise ConfigError("data.split", rule, data.split)
    check_fields(data)
    if data.shuffle_lanes and config.has_ranking_loss:
        rule = "must not have lanes if a loss is a ranking loss, which are shuffled whole"
        raise ConfigError("data.shuffle", rule, data.shuffle)
    if is_url(data.cache_folder) and config.has_ranking_loss:
        rule = "must be a folder where a loss is a ranking loss: whole groups are read from files"
        raise ConfigError("data.cache_folder", rule, data.cache_folder)
    if data.format == "synthetic":
        for name, section in config.columns.items():
            # These two apply to batches of the caller, too.
            if dataclasses.replace(section, pooling=None, max_ids=0) != ColumnSection():
                rule = "is not read where data.format is synthetic, but for pooling and max_ids"
                raise ConfigError(f"columns.{name}", rule)
            sequence_length(name, section)
    elif data.format != "criteo":  # which may leave the names of its columns to the format
        columns_of(data, config.columns)


def check_columns(
    data: DataSection, columns: Mapping[str, ColumnSection], tasks: Mapping[str, TaskSection]
) -> None:
    """Raise ConfigError if a column is named twice, or the model reads a label."""
    labels = [task.label for task in tasks_of(tasks, data).values()]
    for name in ("dense", "sparse"):
        listed = getattr(data, name)
        _refuse_labels(f"data.{name}", listed, labels)
        if len(set(listed)) < len(listed):
            raise ConfigError(f"data.{name}", "must name each column once", listed)
    for name, section in columns.items():
        _refuse_labels(f"columns.{name}.source", section.source, labels)
    if data.weight in labels:
        raise ConfigError("data.weight", "must not be a label column", data.weight)


def _refuse_labels(key: str, names: Sequence[str], labels: Sequence[str]) -> None:
    if shared := [label for label in labels if label in names]:
        raise ConfigError(key, "must not hold the label column", shared[0])


def check_fields(data: DataSection, value_of: Callable[[str], object] = str) -> None:
    """Raise ConfigError if the delimiter is invalid, or a label means both 1 and 0.

    Args:
        value_of: the value of a label.
    """
    if len(data.delimiter) != 1:
        raise ConfigError("data.delimiter", "must be one character", data.delimiter)
    positive = {value_of(label) for label in data.positive_labels}
    if shared := [label for label in data.negative_labels if value_of(label) in positive]:
        rule = "must not share values with data.positive_labels"
        raise ConfigError("data.negative_labels", rule, min(shared))


def _check_dense(config: RunConfig) -> None:
    dense = config.dense
    check_device(dense)
    for name in ("bottom_mlp", "top_mlp", "remote_mlp"):
        units = getattr(dense, name)
        if min(units, default=1) < 1:
            raise ConfigError(f"dense.{name}", "must hold integers of at least 1", units)
    for name, group in config.dense_groups.items():
        key = f"dense_groups.{name}.parameters"
        if not group.parameters:
            raise ConfigError(key, "must name parameters", group.parameters)
        try:
            is_rate = group.learning_rate is None or 0 < group.learning_rate < math.inf
        except ValueError:
            is_rate = False
        if not is_rate:
            rule = "lr must be a finite number, above 0"
            raise ConfigError(f"dense_groups.{name}.optimizer_options", rule, group.optimizer_options)
        for pattern in group.parameters:
            if pattern.startswith("remote.") and not config.dense.remote_mlp:
                raise ConfigError(key, "must name parameters, and there is no dense.remote_mlp", pattern)
    if dense.tensor_size:
        _check_tensor(dense, config.cluster.trainers)
    elif dense.tensor_plan:
        rule = "needs dense.tensor_size, the number of trainers that split a net"
        raise ConfigError("dense.tensor_plan", rule, dense.tensor_plan)


def check_device(dense: DenseSection) -> None:
    """Raise ConfigError if ``dense.device`` names no device, or several that are not definite."""
    form = r"cpu|cuda:(0|[1-9][0-9]*)"
    if not dense.devices and not re.fullmatch(rf"auto|cuda|{form}", dense.device):
        raise ConfigError("dense.device", "must be auto, cpu, cuda or cuda:N", dense.device)
    if not all(re.fullmatch(form, device) for device in dense.devices):
        raise ConfigError("dense.device", "must hold cpu and cuda:N, such as cuda:0,cuda:1", dense.device)


def _check_tensor(dense: DenseSection, trainers: int) -> None:
    if dense.devices:
        raise ConfigError("dense.device", "must be one device with dense.tensor_size", dense.device)
    if trainers % dense.tensor_size:
        rule = f"must divide cluster.trainers, which is {trainers}"
        raise ConfigError("dense.tensor_size", rule, dense.tensor_size)
    if dense.net not in NETS and not dense.tensor_plan:
        rule = 'must say how the layers of a custom net are split, such as "head.0 = colwise_gathered"'
        raise ConfigError("dense.tensor_plan", rule, dense.tensor_plan)
    if dense.compile != "none":
        raise ConfigError("dense.compile", "must be none with dense.tensor_size", dense.compile)
    if dense.optimizer_name in _OF_WHOLE_MATRICES:
        rule = "needs whole matrices, and with dense.tensor_size each trainer has a slice"
        raise ConfigError("dense.optimizer", rule, dense.optimizer)


def _check_train(config: RunConfig) -> None:
    train = config.train
    if train.update == "async":
        rule = "needs train.update = sync or pipelined, whose steps all trainers take together"
        if train.clip_norm is not None:
            raise ConfigError("train.clip_norm", rule, train.clip_norm)
        if train.non_finite == "skip":
            raise ConfigError("train.non_finite", rule, train.non_finite)
    if not train.patience:
        return
    if config.checkpoint.keep_best == "none":
        rule = "must name a metric where train.patience ends the run by it"
        raise ConfigError("checkpoint.keep_best", rule, "none")
    if not config.data.test_path and not config.data.test_fraction:
        rule = "needs test rows to evaluate on: set data.test_path, or data.test_fraction above 0"
        raise ConfigError("train.patience", rule, train.patience)


def check_workers(table: str, workers: Sequence[int], num_workers: int) -> None:
    """Raise ConfigError if a table may be placed on a worker that does not exist."""
    for index in workers:
        if not 0 <= index < num_workers:
            rule = f"must hold worker indices from 0 to {num_workers - 1}"
            raise ConfigError(f"tables.{table}.placement", rule, index)


def table_of_column(tables: Mapping[str, TableSection]) -> dict[str, str]:
    """Return the table of each column that a section [tables.NAME] lists; ConfigError if two list one."""
    owner: dict[str, str] = {}
    for name, table in tables.items():
        for column in table.features or (name,):
            if column in owner:
                rule = f"must not hold a column that tables.{owner[column]} reads already"
                raise ConfigError(f"tables.{name}.features", rule, column)
            owner[column] = name
    return owner


def check_schedule(section: ScheduleSection, end: int | None) -> None:
    """Raise ConfigError if the warm-up takes the whole schedule.

    Args:
        end: the steps of the whole schedule; None if unknown.
    """
    if end is None or section.call.name not in SCHEDULES_THAT_END:
        return
    if section.warmup_steps and section.warmup_steps >= end:
        rule = f"warmup_steps must be less than the steps of the whole schedule, {end}"
        raise ConfigError("schedule.kind", rule, section.kind)
