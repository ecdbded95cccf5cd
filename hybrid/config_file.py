"""Reading a configuration: TOML file and ``--set`` overrides in, a checked ``RunConfig`` out.

``python -m hybrid.config_file`` prints the reference of every key, kept as docs/config.md.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from hybrid.config import TABLE_OPTIMIZERS, RunConfig, TableSection
from hybrid.config_rules import check_rules
from hybrid.errors import ConfigError

_NOT_PART_OF_THE_RESULT = (
    "run.folder",
    "run.name",
    "cluster.master_port",
    "cluster.interface",
    "cluster.secret_file",
    "cluster.heartbeat_timeout_seconds",
    "cluster.max_restarts",
    "checkpoint.every_steps",
    "checkpoint.every_minutes",
    "checkpoint.keep_last",
    "checkpoint.keep_best",
    "profile.steps",
    "profile.first_step",
)
# A key in so many parts that the parser, which takes the square of their number in memory, is not to see it.
_DEEP_KEY = re.compile(r"""(?<![\w-])(?:(?:[\w-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){64}""")
_KINDS: dict[Any, str] = {bool: "true or false", int: "an integer", float: "a finite number", str: "text"}
_LISTS: dict[Any, str] = {int: "a list of integers", str: "a list of text"}


@dataclass(frozen=True)
class Key:
    """One key of a section: its type and the rule its value must keep."""

    name: str
    kind: Any
    is_list: bool
    default: Any
    meaning: str
    minimum: float | None
    maximum: float | None
    above: float | None
    choices: tuple[str, ...]

    @classmethod
    def of(cls, field: dataclasses.Field[Any], hint: Any) -> Key:
        is_list = get_origin(hint) is tuple
        kind = get_args(hint)[0] if get_args(hint) else hint  # tuple[T, ...] and T | None
        return cls(field.name, kind, is_list, field.default, **field.metadata)

    @property
    def rule(self) -> str:
        """What a value must be, in words, for example ``an integer, at least 1``."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        kind = _LISTS[self.kind] if self.is_list else _KINDS[self.kind]
        bounds = [
            f"{words} {bound:g}"
            for words, bound in (("above", self.above), ("at least", self.minimum), ("at most", self.maximum))
            if bound is not None
        ]
        return ", ".join([kind, *bounds])

    def read(self, value: Any) -> Any:
        """``value`` as this key holds it: TOML lists become tuples and integers floats where due."""
        if self.is_list:
            if isinstance(value, list):
                return tuple(value)
            lone = type(value) is self.kind and "," not in str(value)
            return (value,) if lone else value
        whole = self.kind is float and type(value) is int and abs(value) <= sys.float_info.max
        return float(value) if whole else value

    def parse(self, text: str) -> Any:
        """The value that ``--set`` gives as ``text``: TOML, or the text itself."""
        try:
            document = tomllib.loads(f"value = {text}")
        except ValueError:
            return text
        value = document.pop("value")
        is_toml = not document and (self.kind is not str or isinstance(value, str | list))
        return value if is_toml else text

    def check(self, dotted: str, value: Any) -> None:
        """ConfigError where ``value`` breaks the rule of this key."""
        elements = value if self.is_list else (value,)
        if not isinstance(elements, tuple) or not all(self._accepts(element) for element in elements):
            raise ConfigError(dotted, f"must be {self.rule}", value)

    def _accepts(self, value: Any) -> bool:
        if type(value) is not self.kind and not (self.kind is float and type(value) is int):
            return False  # type(), since a bool is an instance of int
        if self.choices:
            return value in self.choices
        if self.kind not in (int, float):
            return True
        return (
            abs(value) <= sys.float_info.max  # False for NaN and infinity
            and (self.above is None or value > self.above)
            and (self.minimum is None or value >= self.minimum)
            and (self.maximum is None or value <= self.maximum)
        )


def _keys(section: Any) -> dict[str, Key]:
    hints = get_type_hints(section)
    return {field.name: Key.of(field, hints[field.name]) for field in dataclasses.fields(section)}


_SECTION_TYPES: dict[str, Any] = {
    name: hint for name, hint in get_type_hints(RunConfig).items() if dataclasses.is_dataclass(hint)
}
_SECTIONS = {name: _keys(section) for name, section in _SECTION_TYPES.items()}
_TABLE = _keys(TableSection)
_ANY_TABLE = ("tables.NAME", _TABLE)
_ELSEWHERE_CUTOFF = 0.75  # how much alike names of different sections must be, from 0 to 1
_ALL = "hybrid config --describe lists all"


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a configuration, apply overrides, check every rule.

    Args:
        path: TOML file; None for all defaults. Relative paths inside it stay relative to the
            current folder.
        overrides: ``section.key=value`` or ``tables.NAME.key=value``, later ones winning. A value is
            TOML; text keys take it unquoted too; one value makes a list of one.

    Raises:
        ConfigError: the file cannot be read, or a key or value breaks a rule.
    """
    sections = {} if path is None else _read_sections(path)
    for text in overrides:
        dotted, equals, value = text.partition("=")
        section, _, name = dotted.strip().rpartition(".")  # a table's name may hold dots of its own
        if not equals or (not section and name in _SECTIONS):
            raise ConfigError(f"--set {text}", "must be section.key=value")
        sections.setdefault(section, {})[name] = _find(section, name).parse(value)
    plain = {name: _build(cls, name, sections.pop(name, {})) for name, cls in _SECTION_TYPES.items()}
    tables = {
        section.removeprefix("tables."): _build(TableSection, section, values)
        for section, values in sections.items()
    }
    config = RunConfig(**plain, tables=tables)
    validate(config)
    return config


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")
        if _DEEP_KEY.search(text):
            raise RecursionError
        return tomllib.loads(text)
    except OSError as error:
        raise ConfigError(str(path), f"cannot read the configuration: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), f"is not UTF-8 text (byte {error.start})") from error
    except RecursionError as error:
        raise ConfigError(str(path), "is nested too deeply for a configuration") from error
    except ValueError as error:
        raise ConfigError(str(path), f"is not valid TOML: {error}") from error


def _read_sections(path: Path) -> dict[str, dict[str, Any]]:
    """The sections of a file, of which every key is one; where one is not, the error names the file."""
    try:
        sections = _by_section(_read_toml(path))
        for section, values in sections.items():
            for name in values:
                _find(section, name)
    except UnknownKeyError as error:
        raise ConfigError(f"{path}: {error.key}", error.rule) from error
    return sections


def _by_section(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The sections of a TOML document by name; each table is a section ``tables.NAME``."""
    sections = {}
    for section, values in document.items():
        if section not in _SECTIONS and section != "tables":
            if not isinstance(values, dict):
                raise _unknown("", section)
            raise _unknown(section, next(iter(values), ""))
        if not isinstance(values, dict):
            raise ConfigError(section, f"must be a section: a line [{section}] with its keys below", values)
        if section == "tables":
            for table, table_values in values.items():
                if not isinstance(table_values, dict):
                    raise _unknown(section, table)
                sections[f"tables.{table}"] = table_values
        else:
            sections[section] = values
    return sections


def _build(section_type: Any, section: str, values: dict[str, Any]) -> Any:
    return section_type(**{name: _find(section, name).read(value) for name, value in values.items()})


def _find(section: str, name: str) -> Key:
    keys = _TABLE if section.startswith("tables.") else _SECTIONS.get(section, {})
    if name not in keys:
        raise _unknown(section, name)
    return keys[name]


class UnknownKeyError(ConfigError):
    """There is no such key, or no such section."""


def _unknown(section: str, name: str) -> UnknownKeyError:
    if not name and section not in _SECTIONS:
        return UnknownKeyError(f"[{section}]", f"no such section; {_did_you_mean_section(section)}")
    dotted = ".".join(part for part in (section, name) if part)
    nearest = _nearest_key(section, name)
    if nearest is None:
        known = section in _SECTIONS or section.startswith("tables.")
        what = "key" if known or not section else f"section [{section}], and no such key elsewhere"
        return UnknownKeyError(dotted, f"is not supported: there is no such {what}; {_ALL}")
    return UnknownKeyError(dotted, f"no such key; did you mean {nearest}?")


def _did_you_mean_section(section: str) -> str:
    nearest = difflib.get_close_matches(section, (*_SECTIONS, "tables.NAME"), n=1)
    return f"did you mean [{nearest[0]}]?" if nearest else _ALL


def _nearest_key(section: str, name: str) -> str | None:
    """The key that may be meant: one of this name, nearly so in its section, or nearly so elsewhere."""
    own = _TABLE if section.startswith("tables.") else _SECTIONS.get(section, {})
    everywhere = [(section, own)] if section.startswith("tables.") else [*_SECTIONS.items(), _ANY_TABLE]
    dotted = [f"{heading}.{key}" for heading, keys in everywhere for key in keys]
    names = [name]
    if not any(key.endswith(f".{name}") for key in dotted):
        if near := difflib.get_close_matches(name, own, n=1):
            return f"{section}.{near[0]}"
        every_name = {key.rpartition(".")[2] for key in dotted}
        names = difflib.get_close_matches(name, every_name, n=1, cutoff=_ELSEWHERE_CUTOFF)
    found = [key for key in dotted if key.rpartition(".")[2] in names]
    by_section = difflib.get_close_matches(f"{section}.{name}", found, n=1, cutoff=0.0)
    return by_section[0] if by_section else None


def _items(config: RunConfig) -> Iterator[tuple[str, str, Key, Any]]:
    """Section, name, key and value of all of ``config``; keys that are off or left out are not there."""
    for section, keys in _SECTIONS.items():
        for name, key in keys.items():
            if (value := getattr(getattr(config, section), name)) is not None:
                yield section, name, key, value
    for table, values in config.tables.items():
        for name, key in _TABLE.items():
            if (value := getattr(values, name)) is not None:
                yield f"tables.{table}", name, key, value


def validate(config: RunConfig) -> None:
    """ConfigError where a value breaks its own rule or one that ties several keys together."""
    for section, name, key, value in _items(config):
        if key.choices == TABLE_OPTIMIZERS and value not in TABLE_OPTIMIZERS:
            rule = f"must be {key.rule}; tables have only these, dense.optimizer takes classes of torch.optim"
            raise ConfigError(f"{section}.{name}", rule, value)
        key.check(f"{section}.{name}", value)
    check_rules(config)


def to_toml(config: RunConfig) -> str:
    """The whole configuration as TOML text that ``load_config`` reads back equal."""
    blocks: dict[str, list[str]] = {name: [f"[{name}]"] for name in _SECTIONS}
    for table in config.tables:
        blocks[f"tables.{table}"] = [f"[tables.{_toml_value(table)}]"]
    for section, name, _, value in _items(config):
        blocks[section].append(f"{name} = {_toml_value(value)}")
    return "\n\n".join("\n".join(lines) for lines in blocks.values()) + "\n"


def _toml_value(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(_toml_value(element) for element in value)}]"
    # JSON's strings, numbers and booleans are TOML's, but for DEL, which TOML wants escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def decisive_values(config: RunConfig) -> dict[str, Any]:
    """Every key that a run's result depends on, by dotted name, with its value as JSON holds it.

    Folder, name, port and network interface are left out: they may differ from host to host. So is what
    is recorded: trainers and workers learn that from the master.
    """
    values = {f"{section}.{name}": key.read(value) for section, name, key, value in _items(config)}
    for dotted in _NOT_PART_OF_THE_RESULT:
        del values[dotted]
    return {dotted: list(value) if isinstance(value, tuple) else value for dotted, value in values.items()}


def describe() -> str:
    """Every key with its default, rule and meaning, as Markdown tables by section."""
    lines = [
        "# Configuration",
        "",
        "A configuration is a TOML file of the sections below; every key has a default. On the command",
        "line `--set section.key=value` overrides one. This page is written by",
        "`python -m hybrid.config_file > docs/config.md`.",
    ]
    sections = [(name, _SECTION_TYPES[name], keys) for name, keys in _SECTIONS.items()]
    for name, section, keys in [*sections, ("tables.NAME", TableSection, _TABLE)]:
        lines += ["", f"## [{name}]", "", section.__doc__ or "", ""]
        lines += ["| key | default | must be | meaning |", "|---|---|---|---|"]
        absent = "off" if name in _SECTIONS else "as [embedding]"
        lines += [_describe_key(key, absent) for key in keys.values()]
    return "\n".join(lines) + "\n"


def _describe_key(key: Key, absent: str) -> str:
    default = absent if key.default is None else f"`{_toml_value(key.default)}`"
    cells = [f"`{key.name}`", default, key.rule, key.meaning]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


if __name__ == "__main__":
    print(describe(), end="")
