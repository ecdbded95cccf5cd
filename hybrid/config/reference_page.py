"""docs/config.md: every key of a configuration, as ``hybrid config --describe`` prints it."""

from hybrid.config.key import Key
from hybrid.config.sections import NAMED_KEYS, NAMED_TYPES, SECTION_KEYS, SECTION_TYPES
from hybrid.config.toml_values import toml_value

# What a key that is left out comes to.
_ABSENT = {"tables.NAME": "as [embedding]", "columns.NAME": "as [data]", "dense_groups.NAME": "as [dense]"}


def describe() -> str:
    """Every key with its default, rule and meaning, as Markdown tables by section."""
    lines = [
        "# Configuration",
        "",
        "A configuration is a TOML file of the sections below; every key has a default. On the command",
        "line `--set section.key=value` overrides one. Keys marked *by host* may be given to a trainer or a",
        "worker as well, where it is started; it has all others from the master. This page is written by",
        "`hybrid config --describe > docs/config.md`.",
    ]
    sections = [(name, SECTION_TYPES[name], keys) for name, keys in SECTION_KEYS.items()]
    sections += [(f"{kind}.NAME", NAMED_TYPES[kind], keys) for kind, keys in NAMED_KEYS.items()]
    for name, section, keys in sections:
        lines += ["", f"## [{name}]", "", section.__doc__ or "", ""]
        lines += ["| key | default | must be | meaning |", "|---|---|---|---|"]
        absent = _ABSENT.get(name, "off")
        lines += [_describe_key(key, absent) for key in keys.values()]
    return "\n".join(lines) + "\n"


def _describe_key(key: Key, absent: str) -> str:
    default = key.absent or absent if key.default is None else f"`{toml_value(key.default)}`"
    meaning = f"{key.meaning} (*by host*)" if key.is_by_host else key.meaning
    rule = key.rule if key.signatures is None else key.signatures.forms
    cells = [f"`{key.name}`", default, rule, meaning]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
