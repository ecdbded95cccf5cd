"""Sharding plans: how the layers of a net are split over a tensor group."""

import difflib
from collections.abc import Callable, Container, Mapping, Sequence
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import TypeGuard

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from hybrid.errors import ConfigError

# How to split the submodules at these paths.
Plan = dict[str, ParallelStyle]

_KEY = "dense.tensor_plan"
_SPLITTABLE = (nn.Linear, nn.Embedding)
# Elementwise layers also work on a part of the columns.
_ELEMENTWISE = (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Identity)
_SHOWN = 8  # layers named in a message


class TensorStyle(StrEnum):
    """How a layer is split; all styles also take full inputs.

    ================ ==================================================================
    COLWISE          by outputs, which stay split for a following ROWWISE layer
    ROWWISE          by inputs; the group sums the partial outputs
    COLWISE_GATHERED by outputs, which the group gathers
    ================ ==================================================================
    """

    COLWISE = "colwise"
    ROWWISE = "rowwise"
    COLWISE_GATHERED = "colwise_gathered"

    def parallel_style(self) -> ParallelStyle:
        """Return torch's style for one layer."""
        return _STYLES[self]()


_STYLES: dict[TensorStyle, Callable[[], ParallelStyle]] = {
    TensorStyle.COLWISE: lambda: ColwiseParallel(use_local_output=False),
    # "Replicate" applies to plain tensors; a split input stays split.
    TensorStyle.ROWWISE: lambda: RowwiseParallel(input_layouts=Replicate()),
    TensorStyle.COLWISE_GATHERED: lambda: ColwiseParallel(output_layouts=Replicate()),
}


def automatic_plan(stage: nn.Module) -> Plan:
    """Return a plan for one stage of a net, perhaps an empty one.

    Two successive linear layers of an ``nn.Sequential``, with only activations between them, communicate
    once, after the second (Shoeybi et al. 2019). The outputs of other linear layers are gathered. Layers with
    one output and all other modules are not split.
    """
    styles: dict[str, TensorStyle] = {}
    for path, module in stage.named_modules():
        if type(module) is nn.Sequential:
            styles |= {_joined(path, name): style for name, style in _pairs(module).items()}
        elif _is_plain_linear(module) and module.out_features > 1:
            styles.setdefault(path, TensorStyle.COLWISE_GATHERED)
    return {path: style.parallel_style() for path, style in styles.items()}


def _pairs(layers: nn.Sequential) -> dict[str, TensorStyle]:
    """Return the styles of the layers that form pairs, by name."""
    styles: dict[str, TensorStyle] = {}
    for name, module in layers._modules.items():
        follower = _follower(layers, name)
        is_first = name not in styles and _is_plain_linear(module) and module.out_features > 1
        if is_first and follower is not None and _is_plain_linear(layers._modules[follower]):
            styles |= {name: TensorStyle.COLWISE, follower: TensorStyle.ROWWISE}
    return styles


def _follower(layers: nn.Sequential, name: str) -> str | None:
    """Return the first module after ``name`` that is not an activation."""
    names = list(layers._modules)
    later = names[names.index(name) + 1 :]
    return next((n for n in later if not isinstance(layers._modules[n], _ELEMENTWISE)), None)


def parse_plan(texts: Sequence[str], net: nn.Module) -> dict[str, Plan]:
    """Parse the user's plan, by stage; paths are relative to the stage, and "" is the stage itself.

    Args:
        texts: each "pattern = style", such as "head.[02] = colwise", with a file name pattern for the paths
            of layers in ``net``.
        net: the full net; its children are the stages.

    Raises:
        ConfigError: a text is malformed or has no valid style, its pattern matches no layer that can be
            split, two patterns match one layer, or the layer after a split output needs full inputs.
    """
    modules = {path: module for path, module in net.named_modules() if path}
    chosen: dict[str, tuple[TensorStyle, str]] = {}
    for text in texts:
        pattern, equals, name = (side.strip() for side in text.partition("="))
        if not (pattern and equals and name):
            raise ConfigError(_KEY, 'must hold texts such as "head.0 = colwise"', text)
        styles = [style.value for style in TensorStyle]
        if name not in styles:
            close = difflib.get_close_matches(name, styles, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(styles)}"
            raise ConfigError(_KEY, f"{name!r} is not a style; {hint}", text)
        for path in _matches(pattern, modules, text):
            if path in chosen:
                raise ConfigError(_KEY, f"{path} is matched by {chosen[path][1]!r} too", text)
            chosen[path] = TensorStyle(name), text
    plan: dict[str, Plan] = {stage: {} for stage, _ in net.named_children()}
    for path, (style, text) in chosen.items():
        if style is TensorStyle.COLWISE and _needs_full_output(path, net, chosen):
            rule = f"the output of {path} stays split; split the layer after it, or take colwise_gathered"
            raise ConfigError(_KEY, rule, text)
        stage, _, relative = path.partition(".")
        plan[stage][relative] = style.parallel_style()
    return plan


def _needs_full_output(path: str, net: nn.Module, split: Container[str]) -> bool:
    """Return whether the module after the layer at ``path`` is known to need full inputs."""
    parent, _, name = path.rpartition(".")
    layers = net.get_submodule(parent)
    if not isinstance(layers, nn.Sequential):
        return False
    follower = _follower(layers, name)
    return follower is None or _joined(parent, follower) not in split


def _matches(pattern: str, modules: Mapping[str, nn.Module], text: str) -> list[str]:
    """Return the paths that ``pattern`` matches, all of layers that can be split."""
    matched = [path for path in modules if fnmatchcase(path, pattern)]
    if not matched:
        raise ConfigError(_KEY, f"{pattern!r} matches nothing in the net; {_layers(modules)}", text)
    for path in matched:
        if not isinstance(modules[path], _SPLITTABLE):
            kind = type(modules[path]).__name__
            rule = f"{path} is a {kind}; only Linear and Embedding can be split; {_layers(modules)}"
            raise ConfigError(_KEY, rule, text)
    return matched


def _layers(modules: Mapping[str, nn.Module]) -> str:
    """Return text that lists the first layers that can be split."""
    layers = [path for path, module in modules.items() if isinstance(module, _SPLITTABLE)]
    if not layers:
        return "it has no Linear or Embedding"
    more = ", ..." if len(layers) > _SHOWN else ""
    return f"there are {', '.join(layers[:_SHOWN])}{more}"


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _is_plain_linear(module: nn.Module | None) -> TypeGuard[nn.Linear]:
    # Subclasses may have other parameters, or be used without a call.
    return type(module) is nn.Linear
