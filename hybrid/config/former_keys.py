"""Former keys and values of configurations: what to write instead, and the translation of stored ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hybrid.config.call import Signatures
from hybrid.config.table_sections import INITIALIZERS, TABLE_OPTIMIZERS
from hybrid.errors import ConfigError

Values = dict[str, Any]
Sections = dict[str, Values]

_AUTOMATIC = "is chosen by the program now; leave it out"
_OPTIMIZER = 'is an argument of optimizer now, as in optimizer = "{}"'
# Keys as ``tables.pooled_by``, for the section [tables.NAME] of any name.
_ADVICE = {
    **dict.fromkeys(
        (
            *("cluster.transport", "cluster.carrier", "cluster.combine", "cluster.stop_timeout_seconds"),
            *("data.checksum", "data.prefetch_batches", "data.synthetic_test_rows"),
            *("embedding.pooled_by", "tables.pooled_by"),
            *("dense.remote_worker", "dense.bucket_mb", "dense.all_reduce"),
        ),
        _AUTOMATIC,
    ),
    "cluster.rpc_timeout_seconds": "is now cluster.timeout_seconds",
    "cluster.step_timeout_seconds": "is now cluster.timeout_seconds",
    "embedding.eps": _OPTIMIZER.format("adagrad(eps = 1e-8)"),
    "embedding.momentum": _OPTIMIZER.format("momentum(momentum = 0.9)"),
    "embedding.beta1": _OPTIMIZER.format("adam(betas = [0.9, 0.999])"),
    "embedding.beta2": _OPTIMIZER.format("adam(betas = [0.9, 0.999])"),
    "embedding.weight_decay": _OPTIMIZER.format("adagrad(weight_decay = 1e-4)"),
    "embedding.all_rows": _OPTIMIZER.format("adam(all_rows = true)"),
    "embedding.ftrl_beta": _OPTIMIZER.format("ftrl(beta = 1.0)"),
    "embedding.ftrl_l1": _OPTIMIZER.format("ftrl(l1 = 0.1)"),
    "tables.all_rows": _OPTIMIZER.format("adam(all_rows = true)"),
    "tables.init_scale": 'is an argument of init now, as in init = "normal(0.01)"',
}
_SPELLINGS = {
    ("data.numeric_scaling", "standardise"): "standardize",
    ("columns.numeric_scaling", "standardise"): "standardize",
    ("columns.too_many_ids", "bad_row"): "invalid_row",
}


def advice(section: str, name: str) -> str | None:
    """What to write instead of a former key; None for any other name."""
    return _ADVICE.get(_key(section, name))


def advice_on_value(section: str, name: str, value: object) -> str | None:
    """What to write instead of a former value of a key; None for any other value."""
    new = _SPELLINGS.get((_key(section, name), value)) if isinstance(value, str) else None
    return None if new is None else f"is now spelled {new!r}"


def translate(sections: Sections, is_key: Callable[[str, str], bool]) -> None:
    """Replace former keys and values of a stored configuration by those of today, in place.

    Args:
        is_key: whether a section has a key today.

    Raises:
        ConfigError: a value cannot be translated.
    """
    _translate_optimizers(sections)
    for section, values in sections.items():
        if "rpc_timeout_seconds" in values:
            values["timeout_seconds"] = values.pop("rpc_timeout_seconds")
        _into_call(values, "init", "uniform", INITIALIZERS, {"init_scale": "scale"})
        for name, value in list(values.items()):
            if isinstance(value, str):
                values[name] = _SPELLINGS.get((_key(section, name), value), value)
            if _key(section, name) in _ADVICE and not is_key(section, name):
                del values[name]


def _translate_optimizers(sections: Sections) -> None:
    """Give each optimizer its arguments, which tables took from [embedding]."""
    embedding = sections.setdefault("embedding", {})
    betas = [embedding.pop("beta1", 0.9), embedding.pop("beta2", 0.999)]
    shared: Values = {"betas": betas}
    shared |= {"beta": embedding.pop("ftrl_beta", 1.0), "l1": embedding.pop("ftrl_l1", 0.0)}
    for name in ("eps", "momentum", "weight_decay", "all_rows"):
        if name in embedding:
            shared[name] = embedding.pop(name)
    default = embedding.get("optimizer", "adagrad")
    for section, values in sections.items():
        if section.startswith("tables.") and not values.get("frozen"):
            own = {key: values.pop(key) for key in ("all_rows",) if key in values}
            if own or "optimizer" in values:
                values["optimizer"] = _call(
                    TABLE_OPTIMIZERS, values.get("optimizer", default), {**shared, **own}
                )
    embedding["optimizer"] = _call(TABLE_OPTIMIZERS, default, shared)


def _into_call(
    values: Values, key: str, default: str, signatures: Signatures, arguments: Mapping[str, str]
) -> None:
    """Move former keys into the value of ``key``, as arguments of the name there."""
    given = {argument: values.pop(former) for former, argument in arguments.items() if former in values}
    if given:
        values[key] = _call(signatures, values.get(key, default), given)


def _call(signatures: Signatures, name: object, arguments: Mapping[str, Any]) -> Any:
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
