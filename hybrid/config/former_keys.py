"""Former keys and values of configurations: what to write instead, and the translation of stored ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybrid.config.data_sections import (
    KIND_CALLS,
    SCALING_CALLS,
    SHUFFLE_CALLS,
    SPLIT_CALLS,
    VOCABULARY_CALLS,
)
from hybrid.config.key import CallSignatures
from hybrid.config.sections import NET_CALLS, SCHEDULE_CALLS
from hybrid.config.table_sections import INITIALIZERS, PLACEMENT_CALLS, TABLE_OPTIMIZERS
from hybrid.config.task_sections import LOSS_CALLS, RANKING_CALLS, TYPE_CALLS
from hybrid.errors import ConfigError

Values = dict[str, Any]
Sections = dict[str, Values]

_AUTOMATIC = "is chosen by the program now; leave it out"
# Keys as ``tables.pooled_by``, for the section [tables.NAME] of any name.
_ADVICE = {
    **dict.fromkeys(
        (
            *("cluster.transport", "cluster.carrier", "cluster.combine", "cluster.stop_timeout_seconds"),
            *("data.checksum", "data.prefetch_batches", "data.synthetic_test_rows"),
            *("dense.remote_worker", "dense.bucket_mb", "dense.all_reduce", "dense.matmul"),
        ),
        _AUTOMATIC,
    ),
    "dense.parallel": "follows from dense.device (cuda:0,cuda:1 for replicas) and dense.tensor_size",
    "dense.devices": "is now dense.device, such as cuda:0,cuda:1",
    "profile.first_step": "is the second number of profile.steps now, such as [5, 10]",
    "tables.workers": 'is an argument of placement now, as in placement = "row(workers = [0, 1])"',
    **dict.fromkeys(
        ("embedding.pooled_by", "tables.pooled_by"),
        "is an argument of placement now, as in placement = \"auto(pooled_by = 'trainers')\"",
    ),
    "cluster.master_address": "is now cluster.master, as HOST or HOST:PORT",
    "cluster.master_port": "is now part of cluster.master, as HOST:PORT",
    "dense.optimizer_options": 'is part of optimizer now, as in optimizer = "SGD(momentum = 0.9)"',
    "dense_groups.learning_rate": 'is one of optimizer_options now: "lr = 0.001"',
    "tables.pooling": "is now pooling in the sections [columns.NAME] of the table's columns",
    "tasks.kind": 'is now type, as in type = "regression"',
    "tasks.classes": 'is an argument of type now, as in type = "classes(5)"',
    "cluster.rpc_timeout_seconds": "is now cluster.timeout_seconds",
    "cluster.step_timeout_seconds": "is now cluster.timeout_seconds",
    "data.bad_rows": "is now data.max_invalid_fraction, where 0 stops at the first invalid row",
    "data.max_bad_fraction": "is now data.max_invalid_fraction",
    "data.split_column": 'is an argument of split now, as in split = "time(when)"',
    "data.shuffle_lanes": 'is an argument of shuffle now, as in shuffle = "lanes(64)"',
    **{
        f"{section}.{name}": text
        for section in ("data", "columns")
        for name, text in (
            ("numeric_transform", 'is now numeric_scaling = "standardize(log = true)"'),
            ("vocabulary_min_count", 'is an argument of vocabulary now, as in vocabulary = "build(4)"'),
            ("hash_rows", 'is an argument of vocabulary now, as in vocabulary = "hash(100000)"'),
        )
    },
    "columns.bounds": 'is an argument of kind now, as in kind = "buckets(18, 65)"',
    "columns.quantiles": 'is now a kind, as in kind = "quantiles(10)"',
    "columns.weight_separator": 'is an argument of kind now, as in kind = "weighted(:)"',
}
_OF_OPTIMIZERS = {
    **{name: name for name in ("eps", "momentum", "weight_decay", "all_rows")},
    "beta1": "betas",
    "beta2": "betas",
    "ftrl_beta": "beta",
    "ftrl_l1": "l1",
}
# By section: a key with its default and its signatures, and the former keys that are its arguments now.
_ARGUMENTS: dict[str, dict[str, tuple[str, CallSignatures, dict[str, str]]]] = {
    "schedule": {
        "kind": ("constant", SCHEDULE_CALLS, {name: name for name in SCHEDULE_CALLS.argument_names})
    },
    "dense": {"net": ("dlrm", NET_CALLS, {name: name for name in NET_CALLS.argument_names})},
    "embedding": {"optimizer": ("adagrad", TABLE_OPTIMIZERS, _OF_OPTIMIZERS)},
    "tables": {
        "init": ("uniform", INITIALIZERS, {"init_scale": "scale"}),
        "optimizer": ("adagrad", TABLE_OPTIMIZERS, {"all_rows": "all_rows"}),
    },
    "tasks": {
        "loss": ("", LOSS_CALLS, {"focal_gamma": "gamma", "huber_delta": "delta"}),
        "ranking_loss": ("", RANKING_CALLS, {"ranking_share": "fraction"}),
    },
}
_SPELLINGS = {
    ("data.numeric_scaling", "standardise"): "standardize",
    ("columns.numeric_scaling", "standardise"): "standardize",
    ("columns.too_many_ids", "bad_row"): "invalid_row",
    ("data.shuffle", "true"): "rows",
    ("data.shuffle", "false"): "none",
}


def advice(section: str, name: str) -> str | None:
    """What to write instead of a former key; None for any other name."""
    for key, (_, signatures, arguments) in _ARGUMENTS.get(section.partition(".")[0], {}).items():
        if name in arguments:
            return f'is an argument of {key} now: write {key} = "{signatures.example(arguments[name])}"'
    return _ADVICE.get(_key(section, name))


def advice_on_value(section: str, name: str, value: object) -> str | None:
    """What to write instead of a former value of a key; None for any other value."""
    text = str(value).lower() if isinstance(value, bool) else value
    new = _SPELLINGS.get((_key(section, name), text)) if isinstance(text, str) else None
    return None if new is None else f"is now spelled {new!r}"


def translate(sections: Sections) -> None:
    """Replace former keys and values of a stored configuration by those of today, in place.

    Raises:
        ConfigError: a value cannot be translated.
    """
    _translate_data(sections)
    _translate_tables(sections)
    dense, cluster = sections.setdefault("dense", {}), sections.setdefault("cluster", {})
    if options := dense.pop("optimizer_options", []):
        dense["optimizer"] = f"{dense.get('optimizer', 'Adam')}({', '.join(map(str, options))})"
    if "master_address" in cluster or "master_port" in cluster:
        host, port = cluster.pop("master_address", "127.0.0.1"), cluster.pop("master_port", 0)
        host = f"[{host}]" if ":" in str(host) else host
        cluster.setdefault("master", f"{host}:{port}" if port else host)
    if dense.get("parallel", "tensor") != "tensor":
        dense.pop("tensor_size", None)
    if devices := dense.pop("devices", []):
        dense["device"] = ",".join(map(str, devices))
    if isinstance(steps := sections.get("profile", {}).get("steps"), int):
        first = sections["profile"].pop("first_step", 10)
        sections["profile"]["steps"] = [steps, first] if steps else []
    for section, values in sections.items():
        if section.startswith("tasks.") and "kind" in values:
            values["type"] = _call(TYPE_CALLS, values.pop("kind"), {"count": values.pop("classes", None)})
        if section.startswith("dense_groups.") and "learning_rate" in values:
            rate = f"lr = {values.pop('learning_rate')}"
            values["optimizer_options"] = [rate, *values.get("optimizer_options", [])]
        if "rpc_timeout_seconds" in values:
            values["timeout_seconds"] = values.pop("rpc_timeout_seconds")
        for key, (default, signatures, arguments) in _ARGUMENTS.get(section.partition(".")[0], {}).items():
            given = {new: values.pop(former) for former, new in arguments.items() if former in values}
            if given:
                values[key] = _call(signatures, values.get(key, default), given)
        for name, value in list(values.items()):
            if isinstance(value, str):
                values[name] = _SPELLINGS.get((_key(section, name), value), value)
            if _key(section, name) in _ADVICE:
                del values[name]


def _translate_data(sections: Sections) -> None:
    """Give vocabularies, scalings and kinds of columns their arguments, which columns took from [data]."""
    data = sections.setdefault("data", {})
    names = ("numeric_transform", "numeric_scaling", "vocabulary", "vocabulary_min_count", "hash_rows")
    shared = {"numeric_scaling": "standardize", "vocabulary": "build"}
    shared |= {name: data[name] for name in names if name in data}
    for section, values in sections.items():
        if section == "data" or section.startswith("columns."):
            known = {**shared, **values}
            if "numeric_transform" in values or "numeric_scaling" in values:
                scaling, is_log = known["numeric_scaling"], known.get("numeric_transform") == "log"
                name = "standardize" if scaling == "standardise" else scaling
                values["numeric_scaling"] = _call(SCALING_CALLS, name, {"log": is_log})
            arguments = {"min_count": known.get("vocabulary_min_count", 1)}
            if "hash_rows" in known:
                arguments["rows"] = known["hash_rows"]
            if values.get("kind") == "cross" and "rows" in arguments:
                values["vocabulary"] = _call(VOCABULARY_CALLS, "hash", arguments)
            elif {"vocabulary", "vocabulary_min_count", "hash_rows"} & values.keys():
                values["vocabulary"] = _call(VOCABULARY_CALLS, known["vocabulary"], arguments)
            _pop(values, "numeric_transform", "vocabulary_min_count", "hash_rows")
            quantiles, bounds = values.pop("quantiles", 0), values.pop("bounds", ())
            given = {"bounds": bounds, "separator": values.pop("weight_separator", ":")}
            if values.get("kind") == "buckets" and quantiles:
                values["kind"] = _call(KIND_CALLS, "quantiles", {"buckets": quantiles})
            elif "kind" in values:
                values["kind"] = _call(KIND_CALLS, values["kind"], given)
    if data.pop("bad_rows", "skip") == "fail":
        data["max_invalid_fraction"] = 0.0
    if "max_bad_fraction" in data:
        data.setdefault("max_invalid_fraction", data.pop("max_bad_fraction"))
    if column := data.pop("split_column", ""):
        data["split"] = _call(SPLIT_CALLS, data.get("split"), {"column": column})
    if isinstance(data.get("shuffle"), bool):
        lanes = data.pop("shuffle_lanes", 0)
        shuffled = _call(SHUFFLE_CALLS, "lanes", {"lanes": lanes}) if lanes else "rows"
        data["shuffle"] = shuffled if data["shuffle"] else "none"


def _translate_tables(sections: Sections) -> None:
    """Give optimizers and placements their arguments, partly from [embedding], and columns their pooling."""
    embedding = sections.setdefault("embedding", {})
    shared: Values = {"betas": [embedding.pop("beta1", 0.9), embedding.pop("beta2", 0.999)]}
    shared |= {"beta": embedding.pop("ftrl_beta", 1.0), "l1": embedding.pop("ftrl_l1", 0.0)}
    shared |= _pop(embedding, "eps", "momentum", "weight_decay", "all_rows")
    pooled_by = _pop(embedding, "pooled_by")
    optimizer, placement = embedding.get("optimizer", "adagrad"), embedding.get("placement", "auto")
    for section, values in list(sections.items()):
        if not section.startswith("tables."):
            continue
        if not values.get("frozen") and (values.keys() & {"all_rows", "optimizer"}):
            own = {**shared, **_pop(values, "all_rows")}
            values["optimizer"] = _call(TABLE_OPTIMIZERS, values.get("optimizer", optimizer), own)
        own = _pop(values, "pooled_by", "workers")
        if any(own.values()) or "placement" in values:
            name = values.get("placement", placement)
            values["placement"] = _call(PLACEMENT_CALLS, name, {**pooled_by, **own})
        if "pooling" in values:
            pooling = values.pop("pooling")
            for name in values.get("features") or [section.partition(".")[2]]:
                sections.setdefault(f"columns.{name}", {}).setdefault("pooling", pooling)
    embedding["optimizer"] = _call(TABLE_OPTIMIZERS, optimizer, shared)
    if pooled_by:
        embedding["placement"] = _call(PLACEMENT_CALLS, placement, pooled_by)


def _pop(values: Values, *names: str) -> Values:
    """Remove the keys that a section has, and return them."""
    return {name: values.pop(name) for name in names if name in values}


def _call(signatures: CallSignatures, name: object, arguments: Mapping[str, Any]) -> Any:
    """A name with its arguments; what is already a call, or no name, as it is."""
    if name not in signatures.names:
        return name
    try:
        return signatures.text(str(name), arguments)
    except TypeError as error:
        raise ConfigError(str(name), "has arguments that are not of the right type", arguments) from error


def _key(section: str, name: str) -> str:
    """The key of every section of its kind: ``tables.dim`` of ``tables.user.dim``."""
    return f"{section.partition('.')[0]}.{name}"
