"""The rules between keys of a configuration.

:func:`check_rules` needs the configuration only. Other functions also check values of data or of a model.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter

from hybrid.config.data_sections import (
    GROW,
    VALIDATION,
    ColumnSection,
    DataSection,
    column_growth,
    columns_of,
    matches_path,
    sequence_length,
)
from hybrid.config.key import Call
from hybrid.config.sections import NETS, ProfileSection, RunConfig, ScheduleSection, tasks_of
from hybrid.config.table_sections import (
    INITIAL_CALLS,
    TABLE_OPTIMIZERS,
    TableSection,
    table_optimizer,
    table_placement,
)
from hybrid.config.task_sections import TaskSection, check_tasks
from hybrid.errors import ConfigError

FINITE_SCHEDULES = ("cosine", "polynomial", "one_cycle")
_GPU = "(cuda|xpu|npu)"  # names of torch for accelerators; NVIDIA and AMD GPUs are "cuda"
_DEVICE = rf"(cpu|{_GPU}:(0|[1-9][0-9]*))"


def check_rules(config: RunConfig) -> None:
    """Raise ConfigError if keys contradict each other, or a required key is missing."""
    _check_data(config)
    _check_dense(config)
    check_tasks(config.all_tasks, config.data.group, config.checkpoint.keep_best)
    _check_retrieval(config)
    _check_train(config)
    deltas = config.checkpoint.delta_call
    if deltas.name != "none" and not any(deltas.arguments.values()):
        raise ConfigError("checkpoint.deltas", "must name steps or seconds above 0", config.checkpoint.deltas)
    has_times = config.data.is_topic or config.data.time_column
    if deltas.arguments.get("event_seconds") and not has_times:
        rule = "event_seconds needs a stream with times: set data.stream = files(time = 'column')"
        raise ConfigError("checkpoint.deltas", rule, config.checkpoint.deltas)
    for name, table in config.tables.items():
        check_workers(name, table_placement(config.embedding, table)["workers"], config.cluster.workers)
        for key in ("optimizer", "learning_rate"):
            if table.frozen and (value := getattr(table, key)) is not None:
                raise ConfigError(f"tables.{name}.{key}", "must not be set for a frozen table", value)
        _check_initial(f"tables.{name}.initial", table)
    owner = table_of_column(config.tables)
    columns_of_table: dict[str, list[str]] = {}
    for column in dict.fromkeys((*config.data.sparse, *owner)):
        columns_of_table.setdefault(owner.get(column, column), []).append(column)
    for name, columns in columns_of_table.items():
        table_growth(config, name, columns)
    check_schedule(config.schedule, config.schedule.steps or None)
    if config.train.max_steps:
        recorded_steps(config.profile, 0, config.train.max_steps)


def _check_initial(key: str, table: TableSection) -> None:
    call = INITIAL_CALLS.parse(key, table.initial)
    if call.name == "positions" and table.init != "uniform":
        raise ConfigError(key, "has all rows of the table, so init must not be set", table.initial)
    if re.search(r"\.(npy|safetensors)(#|$)", call.name):
        rule = "has rows without values; name the run, or the exported folder, which has both"
        by_position = f"positions({table.initial}) if the file has the rows of this table in order"
        raise ConfigError(key, f"{rule}, or write {by_position}", table.initial)


def recorded_steps(profile: ProfileSection, steps_before: int, total_steps: int) -> range:
    """Return the steps to profile after step ``steps_before``; ConfigError if ``total_steps`` is too low."""
    first = steps_before + profile.first_step
    if profile.count and first + profile.count > total_steps:
        rule = f"must be within the {total_steps - steps_before} steps that the run takes"
        raise ConfigError("profile.steps", rule, profile.steps)
    return range(first, first + profile.count)


def _check_data(config: RunConfig) -> None:
    data = config.data
    if data.format != "synthetic" and not data.path and not data.is_topic:
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
        rule = "must be random if data.test_path is set, and for the synthetic click log, which has test rows"
        raise ConfigError("data.split", rule, data.split)
    if data.format == "synthetic" and (data.paths[VALIDATION] or any(each.column for each in data.holdouts)):
        rule = "must be random or none for the synthetic click log"
        raise ConfigError("data.validation", rule, data.validation)
    if data.format == "synthetic" and data.joins:
        raise ConfigError("data.joins", "must be empty for the synthetic click log", data.joins)
    if data.format == "synthetic" and data.vocabulary_call.name == GROW:
        raise ConfigError("data.vocabulary", "must not be grow for the synthetic click log", data.vocabulary)
    check_fields(data)
    if data.is_stream:
        _check_stream(config)
    if data.shuffle_lanes and config.has_ranking_loss:
        rule = "must not have lanes if a task has a ranking loss, since groups are shuffled as a whole"
        raise ConfigError("data.shuffle", rule, data.shuffle)
    if data.format == "synthetic":
        for name, section in config.columns.items():
            # Pooling and max_ids also apply to batches that user code provides.
            if dataclasses.replace(section, pooling=None, max_ids=0) != ColumnSection():
                rule = "must have no keys except pooling and max_ids if data.format is synthetic"
                raise ConfigError(f"columns.{name}", rule)
            sequence_length(name, section)
    elif data.format != "criteo":  # criteo files have default columns
        columns_of(data, config.columns)


def _check_stream(config: RunConfig) -> None:
    data, train = config.data, config.train
    for key, is_wrong, needed in (
        ("data.format", data.format not in ("csv", "criteo"), "csv or criteo"),
        ("data.path", data.path, "empty"),
        ("data.columns", data.format == "csv" and not data.columns, "the fields of a row"),
    ):
        if data.is_topic and is_wrong:
            rule = f"must be {needed}, since data.stream reads a topic"
            raise ConfigError(key, rule, attrgetter(key)(config))
    rule = "since data.stream reads rows once, in order"
    lanes = data.stream_call.arguments.get("lanes", config.cluster.trainers)  # a topic has partitions
    for key, is_refused, needed in (
        ("data.format", data.format == "synthetic", "must be that of files"),
        ("data.split", data.split not in ("random", "none"), "must be none"),
        ("data.test_path", data.test_path, "must be empty"),
        ("data.validation", data.validation != "none", "must be none"),
        ("data.shuffle", data.shuffle_lanes, "must be rows or none"),
        ("train.epochs", train.epochs > 1, "must be 1"),
        ("train.patience", train.patience, "must be 0"),
        ("train.eval_every_steps", train.eval_every_steps, "must be 0"),
        ("cluster.trainers", config.cluster.trainers > lanes, f"must be at most the {lanes} lanes"),
    ):
        if is_refused:
            raise ConfigError(key, f"{needed}, {rule}", attrgetter(key)(config))
    until = data.stream_call.arguments.get("until")
    if until and not any(matches_path(each, until) for each in data.path):
        raise ConfigError("data.stream", "must have an `until` that data.path matches", data.stream)
    if config.has_ranking_loss:
        name = next(name for name, task in config.tasks.items() if task.ranking_loss)
        raise ConfigError(f"tasks.{name}.ranking_loss", f"needs complete groups: must be none, {rule}")
    if config.schedule.call.name in FINITE_SCHEDULES and not (config.schedule.steps or train.max_steps):
        raise ConfigError("schedule.kind", f"needs its steps, {rule}", config.schedule.kind)
    if data.format == "criteo" and data.vocabulary_call.name == "build":
        raise ConfigError("data.vocabulary", f"must be hash or grow, {rule}", data.vocabulary)
    for column in columns_of(data, config.columns)[1]:
        if column.has_vocabulary:
            section = config.columns.get(column.name)
            key = f"columns.{column.name}" if section and section.vocabulary else "data"
            raise ConfigError(f"{key}.vocabulary", f"must be hash or grow, {rule}", "build")


def check_columns(
    data: DataSection, columns: Mapping[str, ColumnSection], tasks: Mapping[str, TaskSection]
) -> None:
    """Raise ConfigError if a key names a column twice, or a label (except items) is an input or weight."""
    labels = [task.label for task in tasks_of(tasks, data).values() if not task.is_item_label]
    sources = {f"columns.{name}.source": section.source for name, section in columns.items()}
    for key, names in {"data.dense": data.dense, "data.sparse": data.sparse, **sources}.items():
        if shared := [label for label in labels if label in names]:
            raise ConfigError(key, "must not hold the label column", shared[0])
        if len(set(names)) < len(names):
            raise ConfigError(key, "must name each column once", names)
    if data.weight in labels:
        raise ConfigError("data.weight", "must not be a label column", data.weight)


def check_fields(data: DataSection, value_of: Callable[[str], object] = str) -> None:
    """Raise ConfigError if ``delimiter``, ``missing``, ``positive_labels`` or ``negative_labels`` is invalid.

    No value may be in both lists of labels. ``value_of`` maps equal labels, such as 1 and 1.0, to one value.
    """
    is_wide = len(data.delimiter) == 1 and not data.delimiter.isascii()  # pyarrow requires one byte
    if not data.delimiter or is_wide or {*data.delimiter} & {*'"\r\n\0'}:
        rule = "must be an ASCII character, or several characters, without quotes, line breaks and NUL"
        raise ConfigError("data.delimiter", rule, data.delimiter)
    for name in ("missing", "positive_labels", "negative_labels"):
        for text in getattr(data, name):
            if text != text.strip():
                rule = "must hold texts without surrounding blanks, which are removed from fields"
                raise ConfigError(f"data.{name}", rule, text)
    positive = {value_of(label) for label in data.positive_labels}
    if shared := [label for label in data.negative_labels if value_of(label) in positive]:
        rule = "must not share values with data.positive_labels"
        raise ConfigError("data.negative_labels", rule, min(shared))


def _check_dense(config: RunConfig) -> None:
    dense = config.dense
    if not re.fullmatch(rf"auto|{_GPU}|{_DEVICE}(\s*,\s*{_DEVICE})*", dense.device):
        rule = "must be auto, cpu, cuda, cuda:N, or several such as cuda:0,cuda:1"
        raise ConfigError("dense.device", rule, dense.device)
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
                raise ConfigError(key, "names the remote net, but dense.remote_mlp is empty", pattern)
    if dense.compile != "none" and dense.parallel != "none":
        key = "several devices in dense.device" if dense.parallel == "replicas" else "dense.tensor_size"
        raise ConfigError("dense.compile", f"must be none with {key}", dense.compile)
    if dense.optimizer_call[0] in ("Adafactor", "Muon") and dense.tensor_size:
        rule = "needs whole matrices, but with dense.tensor_size each trainer has a slice of them"
        raise ConfigError("dense.optimizer", rule, dense.optimizer)
    if dense.tensor_plan and not dense.tensor_size:
        rule = "needs dense.tensor_size, the number of trainers that split a net"
        raise ConfigError("dense.tensor_plan", rule, dense.tensor_plan)
    if dense.tensor_size and dense.devices:
        raise ConfigError("dense.device", "must be one device with dense.tensor_size", dense.device)
    if dense.tensor_size and config.cluster.trainers % dense.tensor_size:
        rule = f"must divide cluster.trainers, which is {config.cluster.trainers}"
        raise ConfigError("dense.tensor_size", rule, dense.tensor_size)
    if dense.tensor_size and dense.net_call.name not in NETS and not dense.tensor_plan:
        rule = 'must say how the layers of a custom net are split, such as "head.0 = colwise_gathered"'
        raise ConfigError("dense.tensor_plan", rule, dense.tensor_plan)


def _check_retrieval(config: RunConfig) -> None:
    task = config.retrieval
    if task is None:
        if config.dense.net_call.name == "two_towers":
            raise ConfigError("dense.net", "needs a task of type retrieval", config.dense.net)
        return
    name = next(iter(config.tasks))
    if len(config.tasks) > 1:
        raise ConfigError("tasks", "must hold one task only if its type is retrieval", [*config.tasks])
    if config.data.sparse and task.item not in config.data.sparse:
        raise ConfigError(f"tasks.{name}.type", "item must be a column of data.sparse", task.item)
    has_other_net = config.dense.net_call.name in NETS and config.dense.net_call.name != "two_towers"
    for key, is_refused, rule in (
        ("dense.net", has_other_net, "must be two_towers, or your function"),
        ("data.format", config.data.format == "synthetic", "must be of files: synthetic rows lack choices"),
        ("data.stream", config.data.is_stream, "must be none: the items of a stream are not known"),
        ("train.micro_batches", config.train.micro_batches > 1, "must be 1: a loss compares all samples"),
        ("dense.remote_mlp", config.dense.remote_mlp, "must be empty: towers have no common remote net"),
        ("dense.ddp", config.dense.ddp == "none", "must be outside or inside: all trainers share the towers"),
    ):
        if is_refused:
            raise ConfigError(key, f"{rule} (retrieval)", attrgetter(key)(config))


def _check_train(config: RunConfig) -> None:
    train = config.train
    if train.update == "async":
        rule = "needs train.update = sync or lookahead, so that all trainers take the same step"
        if train.clip_norm is not None:
            raise ConfigError("train.clip_norm", rule, train.clip_norm)
        if train.non_finite == "skip":
            raise ConfigError("train.non_finite", rule, train.non_finite)
        optimizers = {f"tables.{name}.optimizer": table.optimizer for name, table in config.tables.items()}
        for key, text in {"embedding.optimizer": config.embedding.optimizer, **optimizers}.items():
            if text and TABLE_OPTIMIZERS.parse(key, text).arguments.get("all_rows"):
                raise ConfigError(key, f"all_rows {rule}", text)
    if not train.patience:
        return
    if config.checkpoint.keep_best == "none":
        rule = "must name a metric, since train.patience ends the run by its value"
        raise ConfigError("checkpoint.keep_best", rule, "none")
    if config.data.selection_split != VALIDATION and config.data.split == "none":
        rule = "needs rows to evaluate on: set data.validation, data.test_path or data.split"
        raise ConfigError("train.patience", rule, train.patience)


def check_workers(table: str, workers: Sequence[int], num_workers: int) -> None:
    """Raise ConfigError if a table may be placed on a worker that does not exist."""
    for index in workers:
        if not 0 <= index < num_workers:
            rule = f"must hold worker indices from 0 to {num_workers - 1}"
            raise ConfigError(f"tables.{table}.placement", rule, index)


def table_growth(config: RunConfig, name: str, columns: Sequence[str]) -> Call | None:
    """Return the ``grow`` vocabulary of table ``name``, or None; ConfigError if keys contradict it."""
    calls = [column_growth(config.data, config.columns, each) for each in columns]
    growth = calls[0]
    if any(call != growth for call in calls):
        rule = "must be columns with the same vocabulary, since the table of one of them grows"
        raise ConfigError(f"tables.{name}.features", rule, columns)
    if growth is None:
        return None
    section, shared = config.tables.get(name, TableSection()), config.embedding
    has_all_rows = table_optimizer(shared, section).arguments.get("all_rows")
    pooled_by = table_placement(shared, section)["pooled_by"]
    for key, is_refused, rule in (
        ("initial", section.initial_call.name == "positions", "must not be positions"),
        ("frozen", section.frozen, "must be false"),
        ("optimizer", has_all_rows, "must not have all_rows"),
        ("placement", pooled_by == "workers", "must not be pooled_by workers"),
    ):
        if is_refused:
            own = getattr(section, key)
            dotted = f"tables.{name}.{key}" if own else f"embedding.{key}"
            raise ConfigError(dotted, f"{rule}, since table {name} grows", own or getattr(shared, key))
    return growth


def table_of_column(tables: Mapping[str, TableSection]) -> dict[str, str]:
    """Map each column of the sections [tables.NAME] to NAME; ConfigError if a column has two tables."""
    owner: dict[str, str] = {}
    for name, table in tables.items():
        for column in table.features or (name,):
            if column in owner:
                rule = f"must not hold a column of tables.{owner[column]}"
                raise ConfigError(f"tables.{name}.features", rule, column)
            owner[column] = name
    return owner


def check_schedule(section: ScheduleSection, end: int | None) -> None:
    """Raise ConfigError if the warm-up lasts until ``end``, the last step of the schedule (None: unknown)."""
    if end is None or section.call.name not in FINITE_SCHEDULES:
        return
    if section.warmup_steps and section.warmup_steps >= end:
        rule = f"warmup_steps must be less than the {end} steps of the whole schedule"
        raise ConfigError("schedule.kind", rule, section.kind)
