"""Optimizers of dense nets: all classes of ``torch.optim`` except SparseAdam and LBFGS."""

import inspect
import math
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import groupby
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from hybrid.config import DenseGroupSection
from hybrid.errors import CheckpointError, ConfigError, first_line
from hybrid.storage.remote_path import StoragePath
from hybrid.updates.update_rules import Schedule

_OptimizerClass: TypeAlias = Callable[..., torch.optim.Optimizer]

_CANNOT_STEP = {
    "SparseAdam": "takes sparse gradients only; take Adam",
    "LBFGS": "evaluates the loss several times in a step, which is not supported; take another class",
}
_REFUSED_OPTIONS = {
    "lr": "is dense.learning_rate",
    "maximize": "would raise the loss that the tables lower; leave it out",
}
_REMOTE = "remote."  # prefix of the names of the remote net's parameters


def make_optimizer(
    net: nn.Module,
    name: str,
    learning_rate: float,
    options: Sequence[str] = (),
    sections: Mapping[str, DenseGroupSection] = MappingProxyType({}),
    *,
    is_remote: bool = False,
) -> torch.optim.Optimizer:
    """Create an optimizer of a net from the name of a class in ``torch.optim``.

    Args:
        options: further arguments of the class as TOML, such as ``momentum = 0.9``; a list becomes a tuple.
        sections: the sections [dense_groups.NAME] by NAME; each sets options of some parameters.
        is_remote: whether ``net`` is the remote net. Sections name its parameters with the prefix "remote.".

    Raises:
        ConfigError: the class does not exist, cannot train these parameters, or refuses an option; a section
            names a parameter that does not exist, or two sections name the same parameter.
    """
    cls = _optimizer_class(name)
    parameters = dict(net.named_parameters())
    like = next(iter(parameters.values()), torch.ones(0))
    arguments = _arguments(cls, name, options, "dense.optimizer", {}, like)
    settings: dict[str | None, dict[str, Any]] = {None: {}}
    for section, group in sections.items():
        key = f"dense_groups.{section}.optimizer_options"
        differing = _arguments(cls, name, group.other_options, key, arguments, like)
        rate = learning_rate if group.learning_rate is None else group.learning_rate
        settings[section] = {**differing, "lr": rate}
    section_of = _sections_by_parameter(parameters, sections, is_remote)
    # torch's groups are in the order of the parameters, by which state is stored.
    groups = [
        {"params": [parameters[each] for each in run], **settings[section]}
        for section, run in groupby(parameters, key=section_of.get)
    ]
    try:
        return cls(groups, lr=learning_rate, **arguments)
    except (ValueError, RuntimeError) as error:
        rule = f"cannot train this net; take another class ({first_line(error)})"
        raise ConfigError("dense.optimizer", rule, name) from error


def _sections_by_parameter(
    names: Iterable[str], sections: Mapping[str, DenseGroupSection], is_remote: bool
) -> dict[str, str]:
    prefix = _REMOTE if is_remote else ""
    members = {f"{prefix}{name}": name for name in names}
    section_of: dict[str, str] = {}
    for section, group in sections.items():
        key = f"dense_groups.{section}.parameters"
        for pattern in group.parameters:
            matched = [member for member in members if fnmatchcase(member, pattern)]
            if not matched and pattern.startswith(_REMOTE) == is_remote:
                rule = f"names no parameter; there are {', '.join(members)}"
                raise ConfigError(key, rule, pattern)
            for member in matched:
                other = section_of.setdefault(members[member], section)
                if other != section:
                    rule = f"must leave out {member}, which dense_groups.{other} names"
                    raise ConfigError(key, rule, pattern)
    return section_of


def _optimizer_class(name: str) -> _OptimizerClass:
    if name in _CANNOT_STEP:
        raise ConfigError("dense.optimizer", _CANNOT_STEP[name], name)
    base = torch.optim.Optimizer
    classes: dict[str, _OptimizerClass] = {
        each: cls
        for each, cls in sorted(vars(torch.optim).items())
        if isinstance(cls, type) and issubclass(cls, base) and cls is not base and each not in _CANNOT_STEP
    }
    if name not in classes:
        rule = f"is not a class of torch.optim; choose from {', '.join(classes)}"
        raise ConfigError("dense.optimizer", rule, name)
    return classes[name]


def _arguments(
    cls: _OptimizerClass,
    name: str,
    options: Sequence[str],
    option_key: str,
    common: Mapping[str, object],
    like: Tensor,
) -> dict[str, object]:
    """Parse ``options`` (TOML) to keyword arguments of ``cls``; ConfigError for ``option_key`` if invalid.

    Test them, together with ``common``, in a step of a parameter with the device and dtype of ``like``.
    """
    try:
        values = tomllib.loads("\n".join(options))
    except tomllib.TOMLDecodeError as error:
        rule = f'must be arguments such as "momentum = 0.9", each given once ({error})'
        raise ConfigError(option_key, rule, list(options)) from error
    defaults = {key: parameter.default for key, parameter in inspect.signature(cls).parameters.items()}
    valid = [key for key in defaults if key != "params" and key not in _REFUSED_OPTIONS]
    arguments: dict[str, object] = {}
    for key, value in values.items():
        if key in defaults and key in _REFUSED_OPTIONS:
            raise ConfigError(option_key, f"{key} {_REFUSED_OPTIONS[key]}", list(options))
        if key not in valid:
            rule = f"{key} is not an argument of torch.optim.{name}; choose from {', '.join(valid)}"
            raise ConfigError(option_key, rule, list(options))
        if isinstance(defaults[key], bool) and not isinstance(value, bool):
            raise ConfigError(option_key, f"{key} must be true or false", list(options))
        arguments[key] = tuple(value) if isinstance(value, list) else value
    if arguments:
        # Several classes check their arguments only in a step.
        probe = nn.Parameter(like.new_ones(2, 2))
        probe.grad = torch.ones_like(probe)
        try:
            cls([probe], **{**common, **arguments}).step()
        except (AssertionError, IndexError, RuntimeError, TypeError, ValueError) as error:
            rule = f"torch.optim.{name} refuses this: {first_line(error)}"
            raise ConfigError(option_key, rule, list(options)) from error
    return arguments


class DenseOptimizer:
    """A ``torch.optim`` optimizer whose caller passes the gradients, with scheduled learning rates."""

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: Schedule) -> None:
        self.optimizer = optimizer
        self._schedule = schedule
        self._rates = [group["lr"] for group in optimizer.param_groups]

    def step(self, step: int, gradients: Mapping[Tensor, Tensor], scale: float = 1.0) -> None:
        """Update parameters by their gradients times ``scale``, at the learning rates of ``step``."""
        factor = self._schedule.factor(step)
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
            for parameter in group["params"]:
                gradient = gradients.get(parameter)
                parameter.grad = gradient if gradient is None or scale == 1.0 else gradient * scale
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def load(self, state: dict[int, dict[str, Tensor]], folder: StoragePath) -> None:
        """Load optimizer state by parameter index; if it does not fit, a CheckpointError names ``folder``."""
        parameters = [each for group in self.optimizer.param_groups for each in group["params"]]
        for index, values in state.items():
            # State is a scalar, or has the elements, rows or columns of its parameter.
            if index >= len(parameters) or not all(
                value.dim() == 0
                or (
                    value.dim() == parameters[index].dim()
                    and all(n in (1, m) for n, m in zip(value.shape, parameters[index].shape, strict=True))
                )
                for value in values.values()
            ):
                raise CheckpointError(f"{folder}: is of another model: optimizer state {index} does not fit")
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})


def squared_norm(gradients: Iterable[Tensor]) -> float:
    """Return the sum of the squares of all elements of all ``gradients``; 0 without gradients."""
    detached = [gradient.detach() for gradient in gradients]
    if not detached:
        return 0.0
    total = float(torch.stack([torch.linalg.vector_norm(each) for each in detached]).double().square().sum())
    if math.isfinite(total):
        return total
    # Squares of large finite values overflow in lower precision.
    norms = [torch.linalg.vector_norm(each, dtype=torch.float64) for each in detached]
    return float(torch.stack(norms).square().sum())
