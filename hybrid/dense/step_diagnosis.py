"""Diagnosis of a failed step: repeat the local passes to find the layer of an error or a non-finite value.

The local net repeats its passes from its inputs: batch, pooled embeddings and output of the remote net. These
tensors are kept until the next step. Nothing is sent.
"""

import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hybrid.models.dense_net import DenseNet

_REMOTE_NET = "the remote net"


class NetInputs(NamedTuple):
    """The inputs of a net: ``dense_BF``, ``pooled_BE`` and, of a remote net, its output."""

    dense_BF: Tensor
    pooled_BE: Tensor
    remote_BH: Tensor | None


def raise_of_backward(net: DenseNet, inputs: NetInputs, precision: AbstractContextManager[object]) -> None:
    """Repeat the backward pass: distributed autograd reports the text of an error, but no location."""
    pooled_BE = inputs.pooled_BE.detach().requires_grad_()
    with torch.enable_grad(), precision:
        output = _outputs(net, inputs._replace(pooled_BE=pooled_BE))
    sources = [pooled_BE, *(parameter for parameter in net.parameters() if parameter.requires_grad)]
    torch.autograd.grad(output.sum(), sources, allow_unused=True)


def first_not_finite(
    net: DenseNet, inputs: NetInputs, precision: AbstractContextManager[object], *, is_whole: bool = True
) -> str:
    """Find the first non-finite input, parameter or layer output.

    Args:
        is_whole: whether this trainer holds the whole net; a shard alone cannot compute.

    Returns:
        A clause; empty if everything is finite.
    """
    for what, tensor in (
        ("numeric columns of the batch", inputs.dense_BF),
        ("vectors of the tables", inputs.pooled_BE),
    ):
        if not tensor.isfinite().all():
            return f"the {what} are not finite"
    bad_parameters = [name for name, p in net.named_parameters() if not p.isfinite().all()]
    outputs = _outputs_not_finite(net, inputs, precision) if is_whole else []
    if outputs:
        first = f"the first that is not finite is the output of {outputs[0]}"
        if outputs[0] == _REMOTE_NET:
            return first
        own = [name for name in bad_parameters if name.startswith(f"{outputs[0]}.")]
        parameters = f"its parameter {own[0]} is not either" if own else "its parameters are finite"
        return f"{first}, {parameters}"
    return f"the parameter {bad_parameters[0]} is not finite" if bad_parameters else ""


def _outputs_not_finite(
    net: DenseNet, inputs: NetInputs, precision: AbstractContextManager[object]
) -> list[str]:
    """Return the layers with non-finite outputs, in the order in which they end."""
    found: list[str] = []

    def look(name: str, output: object) -> None:
        if isinstance(output, Tensor) and not output.isfinite().all():
            found.append(name)

    hooks = [
        module.register_forward_hook(lambda _, __, output, name=name: look(name, output))
        for name, module in net.named_modules()
        if name
    ]
    try:
        with torch.no_grad(), precision:
            _outputs(net, inputs, look)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _outputs(net: DenseNet, inputs: NetInputs, look: Callable[[str, Tensor], None] | None = None) -> Tensor:
    hidden_BH = net.interaction(net.bottom(inputs.dense_BF), inputs.pooled_BE)
    if inputs.remote_BH is not None:
        hidden_BH = inputs.remote_BH
        if look is not None:
            look(_REMOTE_NET, hidden_BH)
    output: Tensor = net.head(hidden_BH)
    return output


def name_layer(error: BaseException, *nets: nn.Module) -> None:
    """Add a note to an exception that names the layer whose forward pass raised it, if there is one.

    Args:
        nets: the nets that name layers; the first name of a layer counts.
    """
    names = {module: name for net in reversed(nets) for name, module in net.named_modules() if name}
    found: nn.Module | None = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and module in names:
            found = module
    if found is not None:
        settings = found.extra_repr()
        kind = f"{type(found).__name__}({settings})" if settings else type(found).__name__
        error.add_note(f"in {names[found]} of the net, {kind}")
