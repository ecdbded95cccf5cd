"""The page docs/config.md, which ``hybrid config --describe`` prints."""

from hybrid.config.key import Key, toml_value
from hybrid.config.sections import NAMED_KEYS, NAMED_TYPES, SECTION_KEYS, SECTION_TYPES

# The value of a missing key.
_ABSENT = {"tables.NAME": "as [embedding]", "columns.NAME": "as [data]", "dense_groups.NAME": "as [dense]"}


def describe() -> str:
    """Return every key with its default, rule and meaning, as Markdown tables by section."""
    lines = [
        "# Configuration",
        "",
        "A configuration is a TOML file of these sections. Every key has a default. On the command line,",
        "`--set section.key=value` overrides one. A role may have its own value of keys marked *by host*;",
        "the master decides all others. `hybrid config --describe > docs/config.md` writes this page.",
        "",
        "Some values are names with arguments, such as `adam(betas = [0.9, 0.99])`. Arguments are TOML. The",
        "first may be given without its name, as in `hash(1000)`. Quote such a value in a shell.",
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
