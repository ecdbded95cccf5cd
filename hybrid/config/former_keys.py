"""Former keys and values of configurations: what to write instead, and the translation of stored ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Sections = dict[str, dict[str, Any]]

# Measured or derived today. Dots as in [tables.NAME]: ``tables.pooled_by`` is of every table.
_AUTOMATIC = (
    *("cluster.transport", "cluster.carrier", "cluster.combine", "cluster.stop_timeout_seconds"),
    *("data.checksum", "data.prefetch_batches", "data.synthetic_test_rows"),
    *("embedding.pooled_by", "tables.pooled_by"),
    *("dense.remote_worker", "dense.bucket_mb", "dense.all_reduce"),
)
_RENAMED = {
    "cluster.rpc_timeout_seconds": "timeout_seconds",
    "cluster.step_timeout_seconds": "timeout_seconds",
}
_SPELLINGS = {
    ("data.numeric_scaling", "standardise"): "standardize",
    ("columns.numeric_scaling", "standardise"): "standardize",
    ("columns.too_many_ids", "bad_row"): "invalid_row",
}


def advice(section: str, name: str) -> str | None:
    """What to write instead of a key that there was; None if there was none."""
    key = _key(section, name)
    if key in _AUTOMATIC:
        return "is chosen by the program now; leave it out"
    if key in _RENAMED:
        return f"is now {section}.{_RENAMED[key]}"
    return None


def advice_on_value(section: str, name: str, value: object) -> str | None:
    """What to write instead of a value that the key had once; None if there was none."""
    new = _SPELLINGS.get((_key(section, name), value)) if isinstance(value, str) else None
    return None if new is None else f"is now spelled {new!r}"


def translate(sections: Sections, is_key: Callable[[str, str], bool]) -> None:
    """Replace former keys and values of a stored configuration by those of today, in place.

    Args:
        is_key: whether a section has a key today.
    """
    for section, values in sections.items():
        for name in list(values):
            key, value = _key(section, name), values[name]
            if key in _AUTOMATIC and not is_key(section, name):
                del values[name]
            elif key in _RENAMED:
                values.setdefault(_RENAMED[key], values.pop(name))
            elif isinstance(value, str):
                values[name] = _SPELLINGS.get((key, value), value)


def _key(section: str, name: str) -> str:
    """The key of every section of its kind: ``tables.dim`` of ``tables.user.dim``."""
    return f"{section.partition('.')[0]}.{name}"
