"""Configurations as text: TOML files, ``--set`` overrides, the page of all keys, and their JSON schema."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from hybrid.config.key import Key, key_lines, parse_toml, toml_value
from hybrid.config.sections import NAMED_KEYS, NAMED_TYPES, SECTION_KEYS, SECTION_TYPES, RunConfig
from hybrid.config.validation import check_rules
from hybrid.errors import ConfigError, most_similar
from hybrid.storage.files import read_bytes
from hybrid.storage.remote_path import StoragePath

CONFIG_FILE = "config.toml"  # in the folder of a run, and in each of its checkpoints
_ANY_NAME = {f"{kind}.NAME": keys for kind, keys in NAMED_KEYS.items()}
_HINT = "hybrid config --describe lists all keys"
# Defaults on the reference page for keys whose default is None.
_ABSENT = {"tables.NAME": "as [embedding]", "columns.NAME": "as [data]", "dense_groups.NAME": "as [dense]"}
_JSON_TYPES: dict[Any, str] = {bool: "boolean", int: "integer", float: "number", str: "string"}
_JSON_LIMITS = {"minimum": "minimum", "maximum": "maximum", "above": "exclusiveMinimum"}


def load_config(
    path: StoragePath | None, overrides: Sequence[str] = (), *, is_stored: bool = False
) -> RunConfig:
    """Read a configuration, apply overrides, and check every rule.

    Args:
        path: TOML file; None for all defaults. Relative paths in the file are relative to the current folder.
        overrides: ``section.key=value``; a section may be ``tables.NAME``. The last override of a key wins. A
            value is TOML. Text needs no quotes, and a list of one value no brackets.
        is_stored: whether the program wrote the file. If so, an unknown key means that versions differ.

    Raises:
        ConfigError: the file cannot be read, or a key or value breaks a rule. The message names the file, and
            the line of a key in it, unless an override has set the key.
    """
    text, sections = ("", {}) if path is None else _read_sections(path, is_stored)
    settings = [_parse_override(each) for each in overrides]
    for section, name, value in settings:
        key = _find(section, name)
        sections.setdefault(section, {})[name] = key.convert(key.parse(value))
    try:
        return _create_config(sections)
    except ConfigError as error:
        if path is None or error.key in (f"{section}.{name}" for section, name, _ in settings):
            raise
        raise _add_location(path, text, error) from error


def read_toml_text(text: str) -> RunConfig:
    """Return the configuration in a text from :func:`to_toml`; ConfigError if a key or value is invalid."""
    return _create_config(_by_section(parse_toml(text)))


def apply_settings(config: RunConfig, settings: Sequence[str]) -> RunConfig:
    """Apply a role's ``--set`` texts; ConfigError if one is invalid, or only the master may set its key."""
    for text in settings:
        section, name, value = _parse_override(text)
        key = _find(section, name)
        if not key.is_by_host:
            raise ConfigError(f"{section}.{name}", "is decided by the master; set it there")
        config = config.replace_value(section, name, key.convert(key.parse(value)))
    if settings:
        validate(config)
    return config


def select_role_settings(settings: Sequence[str]) -> list[str]:
    """Return those ``--set`` texts whose keys may differ between roles; ConfigError if a key is unknown."""
    return [text for text in settings if _find(*_parse_override(text)[:2]).is_by_host]


def _parse_override(text: str) -> tuple[str, str, str]:
    dotted, equals, value = text.partition("=")
    section, _, name = dotted.strip().rpartition(".")  # a table's name may contain dots
    if not equals or (not section and name in SECTION_KEYS):
        raise ConfigError(f"--set {text}", "must be section.key=value")
    return section, name, value


def _create_config(sections: dict[str, dict[str, Any]]) -> RunConfig:
    built: dict[str, Any] = {kind: {} for kind in NAMED_TYPES}
    for section, values in sections.items():
        kind, dot, name = section.partition(".")
        if dot:
            built[kind][name] = NAMED_TYPES[kind](**values)
        else:
            built[kind] = SECTION_TYPES[kind](**values)
    config = RunConfig(**built)
    validate(config)
    return config


def _add_location(path: StoragePath, text: str, error: ConfigError) -> ConfigError:
    lines, key = key_lines(text), error.key.strip("[]")
    line = lines.get(key, lines.get(key.rpartition(".")[0]))
    place = path if line is None else f"{path}:{line}"
    return ConfigError(f"{place}: {error.key}", error.rule, error.value)


def _read_sections(path: StoragePath, is_stored: bool) -> tuple[str, dict[str, dict[str, Any]]]:
    try:
        # A file that the user names may be a FIFO. A file in a run folder must not block.
        content = path.read_bytes() if isinstance(path, Path) and not is_stored else read_bytes(path)
        text = content.decode("utf-8-sig")
        document = parse_toml(text)
    except OSError as error:
        raise ConfigError(str(path), f"cannot read the configuration: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), f"is not UTF-8 text (byte {error.start})") from error
    except RecursionError as error:
        raise ConfigError(str(path), "is nested too deeply for a configuration") from error
    except ValueError as error:
        raise ConfigError(str(path), f"is not valid TOML: {error}") from error
    try:
        return text, _by_section(document)
    except ConfigError as error:
        if is_stored:
            rule = f"an earlier version wrote it ({error.key}); this one can neither resume nor load it"
            raise ConfigError(str(path), rule) from error
        raise _add_location(path, text, error) from error


def _by_section(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Map each section, such as ``run`` or ``tables.NAME``, to its converted values by key."""
    sections = {}
    for section, values in document.items():
        if section not in SECTION_KEYS | NAMED_KEYS:
            if not isinstance(values, dict):
                raise _unknown_key("", section)
            raise _unknown_key(section, next(iter(values), ""))
        if not isinstance(values, dict):
            raise ConfigError(section, f"must be a section: a line [{section}] with its keys below", values)
        if section in SECTION_KEYS:
            sections[section] = _convert(section, values)
            continue
        for name, named_values in values.items():
            if not isinstance(named_values, dict):
                raise _unknown_key(section, name)
            sections[f"{section}.{name}"] = _convert(f"{section}.{name}", named_values)
    return sections


def _convert(section: str, values: dict[str, Any]) -> dict[str, Any]:
    return {name: _find(section, name).convert(value) for name, value in values.items()}


def _find(section: str, name: str) -> Key:
    kind, dot, _ = section.partition(".")
    keys = (NAMED_KEYS if dot else SECTION_KEYS).get(kind, {})
    if name not in keys:
        raise _unknown_key(section, name, keys)
    return keys[name]


def _unknown_key(section: str, name: str, known: Mapping[str, Key] = {}) -> ConfigError:
    """Return an error for the unknown key ``name``, or if ``name`` is empty, for an unknown section."""
    if not name and section not in SECTION_KEYS:
        near = most_similar(section, (*SECTION_KEYS, *_ANY_NAME))
        hint = f"did you mean [{near}]?" if near else _HINT
        return ConfigError(f"[{section}]", f"no such section; {hint}")
    hint = _HINT
    sections = {section: known} if known and section not in SECTION_KEYS else SECTION_KEYS | _ANY_NAME
    if key := most_similar(name, chain.from_iterable(sections.values())):
        headings = [heading for heading, keys in sections.items() if key in keys]
        hint = f"did you mean {most_similar(section, headings) or headings[0]}.{key}?"
    return ConfigError(".".join(filter(None, (section, name))), f"no such key; {hint}")


def key_values(config: RunConfig) -> Iterator[tuple[str, str, Key, Any]]:
    """Yield section, name, key and value of each key whose value is not None."""
    sections = [(section, getattr(config, section), keys) for section, keys in SECTION_KEYS.items()]
    for kind, keys in NAMED_KEYS.items():
        sections += [(f"{kind}.{name}", values, keys) for name, values in getattr(config, kind).items()]
    for section, values, keys in sections:
        for name, key in keys.items():
            if (value := getattr(values, name)) is not None:
                yield section, name, key, value


def validate(config: RunConfig) -> None:
    """Raise ConfigError if a value breaks the rule of its key, or a rule between keys."""
    for section, name, key, value in key_values(config):
        key.check(f"{section}.{name}", value)
    check_rules(config)


def to_toml(config: RunConfig) -> str:
    """Return the configuration as a text from which :func:`read_toml_text` reads an equal configuration."""
    blocks: dict[str, list[str]] = {name: [f"[{name}]"] for name in SECTION_KEYS}
    for kind in NAMED_KEYS:
        for name in getattr(config, kind):
            blocks[f"{kind}.{name}"] = [f"[{kind}.{toml_value(name)}]"]
    for section, name, _, value in key_values(config):
        blocks[section].append(f"{name} = {toml_value(value)}")
    return "\n\n".join("\n".join(lines) for lines in blocks.values()) + "\n"


def fixed_values(config: RunConfig) -> dict[str, Any]:
    """Map each key that a resumed run must keep to its value, without arguments if these may change."""
    values: dict[str, Any] = {}
    for section, name, key, value in key_values(config):
        if key.is_name_fixed:
            values[f"{section}.{name}"] = value.partition("(")[0]
        elif key.is_fixed:
            converted = key.convert(value)
            values[f"{section}.{name}"] = list(converted) if isinstance(converted, tuple) else converted
    return values


def describe() -> str:
    """Return every key with its default, rule and meaning, as Markdown tables by section."""
    lines = [
        "# Configuration",
        "",
        "A configuration is a TOML file of these sections. Every key has a default. On the command line,",
        "`--set section.key=value` overrides a key. Keys marked *by host* may differ between roles; the",
        "master decides all other keys. `hybrid config --describe > docs/config.md` writes this page.",
        "",
        "Some values are names with arguments, such as `adam(betas = [0.9, 0.99])`. Arguments are TOML. The",
        "name of the first argument may be left out, as in `hash(1000)`. Quote such a value in a shell.",
    ]
    sections = [(name, SECTION_TYPES[name], keys) for name, keys in SECTION_KEYS.items()]
    sections += [(f"{kind}.NAME", NAMED_TYPES[kind], keys) for kind, keys in NAMED_KEYS.items()]
    for name, section, keys in sections:
        lines += ["", f"## [{name}]", "", section.__doc__ or "", ""]
        lines += ["| key | default | must be | meaning |", "|---|---|---|---|"]
        absent = _ABSENT.get(name, "off")
        for key in keys.values():
            default = key.absent or absent if key.default is None else f"`{toml_value(key.default)}`"
            meaning = f"{key.meaning} (*by host*)" if key.is_by_host else key.meaning
            rule = key.rule if key.signatures is None else key.signatures.forms
            cells = [f"`{key.name}`", default, rule, meaning]
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def json_schema() -> str:
    """Return the JSON schema of configuration files for editors: keys, types and limits of values."""
    sections = {name: _section_schema(SECTION_TYPES[name], keys) for name, keys in SECTION_KEYS.items()}
    named = {
        kind: {"type": "object", "additionalProperties": _section_schema(NAMED_TYPES[kind], keys)}
        for kind, keys in NAMED_KEYS.items()
    }
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", **_object_schema(sections | named)}
    return json.dumps(schema, indent=1) + "\n"


def _section_schema(section: Any, keys: dict[str, Key]) -> dict[str, Any]:
    return {
        "description": section.__doc__,
        **_object_schema({name: _key_schema(key) for name, key in keys.items()}),
    }


def _object_schema(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _key_schema(key: Key) -> dict[str, Any]:
    types = [_JSON_TYPES[key.kind], *(["number", "boolean"] if key.takes_numbers else [])]
    value: dict[str, Any] = {"type": types if key.takes_numbers else types[0]}
    limits = {name: getattr(key, field) for field, name in _JSON_LIMITS.items()}
    value |= {name: limit for name, limit in limits.items() if limit is not None}
    if key.choices:
        value["enum"] = list(key.choices)
    if key.signatures is not None:
        names = "|".join(map(re.escape, key.signatures.names))
        value["pattern"] = rf"^\s*({names})\s*(\(.*\))?\s*$|:"
    if key.is_list:
        value = {"anyOf": [{"type": "array", "items": value}, value]}
    default = {} if key.default is None else {"default": key.default}
    return value | default | {"description": f"{key.meaning} Must be {key.rule}."}
