"""Optimizers of dense nets: any class of ``torch.optim`` that takes dense gradients."""

import difflib
import inspect
import math
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import torch
from torch import Tensor, nn

from hybrid.config import DenseGroupSection
from hybrid.errors import CheckpointError, ConfigError, first_line
from hybrid.protocol.learning_rate_schedule import Schedule
from hybrid.storage.remote_path import StoragePath

_OptimizerClass: TypeAlias = Callable[..., torch.optim.Optimizer]

_CANNOT_STEP = {
    "SparseAdam": "takes sparse gradients only; take Adam",
    "LBFGS": "evaluates the loss several times in a step, which is not supported; take another class",
}
_REFUSED_OPTIONS = {
    "lr": "is dense.learning_rate",
    "maximize": "would raise the loss that the tables lower; leave it out",
    "differentiable": "is for gradients through the step, which training does not compute; leave it out",
    "capturable": "is for CUDA graphs, which are not used; leave it out",
}
_OPTIONS = "dense.optimizer"
_REMOTE = "remote."  # prefix of the names of the remote net's parameters


class ParameterGroup(NamedTuple):
    """Parameters of a net with their own learning rate or options.

    Attributes:
        learning_rate: None for the rate of the other parameters.
        options: see :func:`make_optimizer`; they override the options of the other parameters.
        key: the configuration key of the options.
    """

    parameters: list[nn.Parameter]
    learning_rate: float | None
    options: tuple[str, ...]
    key: str


def parameter_groups(
    named: Iterable[tuple[str, nn.Parameter]], sections: Mapping[str, DenseGroupSection], *, is_remote: bool
) -> list[ParameterGroup]:
    """Return the groups of a net's parameters that sections [dense_groups.NAME] define.

    Args:
        named: the parameters of the net, with their names.
        is_remote: whether it is the remote net.

    Raises:
        ConfigError: a section names no parameter, or two sections name one parameter.
    """
    members = {f"{_REMOTE if is_remote else ''}{name}": parameter for name, parameter in named}
    owner: dict[str, str] = {}
    for section, group in sections.items():
        key = f"dense_groups.{section}.parameters"
        for pattern in group.parameters:
            found = [name for name in members if fnmatchcase(name, pattern)]
            if not found and pattern.startswith(_REMOTE) == is_remote:
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
            group.other_options,
            f"dense_groups.{section}.optimizer_options",
        )
        for section, group in sections.items()
    ]


def make_optimizer(
    parameters: Iterable[nn.Parameter],
    name: str,
    learning_rate: float,
    options: Sequence[str] = (),
    groups: Sequence[ParameterGroup] = (),
) -> torch.optim.Optimizer:
    """Create an optimizer by the name of its class in ``torch.optim``.

    Args:
        options: its other arguments as TOML, such as ``momentum = 0.9``; a list becomes a tuple.
        groups: parameters with their own learning rate or options.

    Raises:
        ConfigError: there is no such class, it cannot train these parameters, or it refuses an option.
    """
    cls = _optimizer_class(name)
    arguments = _arguments(cls, name, options, _OPTIONS)
    parameters = list(parameters)
    like = parameters[0] if parameters else torch.ones(0)
    _try(cls, name, arguments, like, options, _OPTIONS)
    settings: list[dict[str, Any]] = []
    for group in groups:
        own = _arguments(cls, name, group.options, group.key)
        _try(cls, name, {**arguments, **own}, like, group.options, group.key)
        rate = learning_rate if group.learning_rate is None else group.learning_rate
        settings.append({**own, "lr": rate})
    # torch's groups are in the order of the parameters, by which state is stored.
    number_of = {id(each): number for number, group in enumerate(groups) for each in group.parameters}
    runs = groupby(parameters, key=lambda each: number_of.get(id(each)))
    torch_groups = [
        {"params": list(run), **({} if number is None else settings[number])} for number, run in runs
    ]
    try:
        return cls(torch_groups if groups else parameters, lr=learning_rate, **arguments)
    except (ValueError, RuntimeError) as error:
        rule = f"cannot train this net; take another class ({first_line(error)})"
        raise ConfigError("dense.optimizer", rule, name) from error


def _try(
    cls: _OptimizerClass,
    name: str,
    arguments: Mapping[str, object],
    like: Tensor,
    options: Sequence[str],
    key: str,
) -> None:
    """Raise ConfigError if ``cls`` refuses arguments; several classes check them only in a step."""
    if not arguments:
        return
    probe = nn.Parameter(like.new_ones(2, 2))
    probe.grad = torch.ones_like(probe)
    try:
        cls([probe], **arguments).step()
    except (TypeError, ValueError, IndexError, RuntimeError) as error:
        raise ConfigError(
            key, f"torch.optim.{name} refuses this: {first_line(error)}", list(options)
        ) from error


def _optimizer_class(name: str) -> _OptimizerClass:
    cls = getattr(torch.optim, name, None)
    if name in _CANNOT_STEP:
        raise ConfigError("dense.optimizer", _CANNOT_STEP[name], name)
    if _is_optimizer(cls):
        return cls
    classes = (n for n, value in sorted(vars(torch.optim).items()) if _is_optimizer(value))
    names = {n.lower(): n for n in classes if n not in _CANNOT_STEP}
    close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.8)
    hint = f"did you mean {names[close[0]]!r}?" if close else f"choose from {', '.join(names.values())}"
    raise ConfigError("dense.optimizer", f"is not a class of torch.optim; {hint}", name)


def _is_optimizer(cls: object) -> TypeGuard[_OptimizerClass]:
    base = torch.optim.Optimizer
    return isinstance(cls, type) and issubclass(cls, base) and cls is not base


def _arguments(cls: _OptimizerClass, name: str, options: Sequence[str], option_key: str) -> dict[str, object]:
    """Return the options as keyword arguments of ``cls``, with the types of its defaults."""
    defaults = {key: parameter.default for key, parameter in inspect.signature(cls).parameters.items()}
    valid = [key for key in defaults if key != "params" and key not in _REFUSED_OPTIONS]
    arguments: dict[str, object] = {}
    for text in options:
        key, value = _parse(text, option_key)
        if key in defaults and key in _REFUSED_OPTIONS:
            raise ConfigError(option_key, f"{key} {_REFUSED_OPTIONS[key]}", text)
        if key not in valid:
            rule = f"{key} is not an argument of torch.optim.{name}; choose from {', '.join(valid)}"
            raise ConfigError(option_key, rule, text)
        if key in arguments:
            raise ConfigError(option_key, f"must give {key} once", text)
        kind = _kind(defaults[key])
        if kind and kind != _kind(value):
            raise ConfigError(option_key, f"{key} must be {kind}, as its default {defaults[key]} is", text)
        arguments[key] = value
    return arguments


def _parse(text: str, option_key: str) -> tuple[str, object]:
    """Return key and value of one option."""
    try:
        ((key, value),) = tomllib.loads(text).items()
    except ValueError as error:  # of TOML, or of other than one key
        raise ConfigError(option_key, 'must hold texts such as "momentum = 0.9"', text) from error
    value = tuple(value) if isinstance(value, list) else value
    elements = value if isinstance(value, tuple) else (value,)
    if not all(isinstance(e, str) or (isinstance(e, int | float) and math.isfinite(e)) for e in elements):
        raise ConfigError(option_key, f"{key} must be true, false, a finite number, text, or a list", text)
    return key, value


def _kind(value: object) -> str:
    """Return the kind of a default value for messages; empty if it implies none."""
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return "a number"
    return "a list" if isinstance(value, tuple) else ""


class DenseOptimizer:
    """A ``torch.optim`` optimizer with explicit gradients and scheduled learning rates."""

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: Schedule) -> None:
        self.optimizer = optimizer
        self._schedule = schedule
        self._rates = [group["lr"] for group in optimizer.param_groups]

    def step(self, step: int, gradients: Mapping[Tensor, Tensor], scale: float = 1.0) -> None:
        """Take step ``step`` with ``gradients`` times ``scale``; parameters without a gradient stay."""
        factor = self._schedule.factor(step)
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
            for parameter in group["params"]:
                gradient = gradients.get(parameter)
                parameter.grad = gradient if gradient is None or scale == 1.0 else gradient * scale
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def load(self, state: dict[int, dict[str, Tensor]], folder: StoragePath) -> None:
        """Load the state of every parameter from a checkpoint; options stay as configured.

        Raises:
            CheckpointError: the state in ``folder`` is of other parameters.
        """
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
    """Return the squared norm of all ``gradients`` together."""
    detached = [gradient.detach() for gradient in gradients]
    if not detached:
        return 0.0
    total = float(torch.stack([torch.linalg.vector_norm(each) for each in detached]).double().square().sum())
    if math.isfinite(total):
        return total
    # Squares of large finite values overflow in lower precision.
    norms = [torch.linalg.vector_norm(each, dtype=torch.float64) for each in detached]
    return float(torch.stack(norms).square().sum())
