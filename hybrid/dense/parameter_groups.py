"""Parameters of dense nets that are trained at rates, and with arguments of the optimizer, of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import nn

from hybrid.config import DenseGroupSection
from hybrid.errors import ConfigError

REMOTE = "remote."  # what the names of the remote net's parameters begin with


class ParameterGroup(NamedTuple):
    """Some parameters of a net that are trained otherwise than the others.

    Attributes:
        learning_rate: None for that of the others.
        options: see :func:`make_optimizer`; those of the others hold beside them.
        key: of the configuration, from which the options are.
    """

    parameters: list[nn.Parameter]
    learning_rate: float | None
    options: tuple[str, ...]
    key: str


def parameter_groups(
    named: Iterable[tuple[str, nn.Parameter]], sections: Mapping[str, DenseGroupSection], *, is_remote: bool
) -> list[ParameterGroup]:
    """The parameters of a net that sections [dense_groups.NAME] name.

    Args:
        named: its parameters, with their names in it.
        is_remote: whether it is the remote net.

    Raises:
        ConfigError: a section names no parameter, or one that another names.
    """
    members = {f"{REMOTE if is_remote else ''}{name}": parameter for name, parameter in named}
    owner: dict[str, str] = {}
    for section, group in sections.items():
        key = f"dense_groups.{section}.parameters"
        for pattern in group.parameters:
            found = [name for name in members if fnmatchcase(name, pattern)]
            if not found and pattern.startswith(REMOTE) == is_remote:
                rule = f"names no parameter; there are {', '.join(members)}"
                raise ConfigError(key, rule, pattern)
            for name in found:
                if owner.setdefault(name, section) != section:
                    rule = f"must leave out {name}, which dense_groups.{owner[name]} names"
                    raise ConfigError(key, rule, pattern)
    return [
        ParameterGroup(
            [members[name] for name, of in owner.items() if of == section],
            group.learning_rate,
            group.optimizer_options,
            f"dense_groups.{section}.optimizer_options",
        )
        for section, group in sections.items()
    ]
