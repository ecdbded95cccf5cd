"""A second look at the last step of a trainer, in search of what went wrong in it.

The local net computes once more what it has computed, out of what it was given: batch, pooled embeddings,
and the remote net's output. Nothing is sent for that, and nothing kept but those tensors, until the next
step.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor

from hybrid.models.dense_net import DenseNet

_REMOTE_NET = "the remote net"


class Given(NamedTuple):
    """What a net was given: ``dense_BF``, ``pooled_BE`` and, of a remote net, ``hidden_BH`` for the head."""

    dense_BF: Tensor
    pooled_BE: Tensor
    remote_BH: Tensor | None


def raise_of_backward(net: DenseNet, given: Given, precision: AbstractContextManager[object]) -> None:
    """Raise what the backward pass of the net raises: distributed autograd tells its text, and no place."""
    pooled_BE = given.pooled_BE.detach().requires_grad_()
    with torch.enable_grad(), precision:
        output = _outputs(net, given._replace(pooled_BE=pooled_BE))
    sources = [pooled_BE, *(parameter for parameter in net.parameters() if parameter.requires_grad)]
    torch.autograd.grad(output.sum(), sources, allow_unused=True)


def first_not_finite(
    net: DenseNet, given: Given, precision: AbstractContextManager[object], *, is_whole: bool = True
) -> str:
    """What is the first in the net that is not finite: an input, a parameter, or the output of a layer.

    Args:
        is_whole: whether this trainer has all of the net; without the others it can compute no part of it.

    Returns:
        A part of a sentence; empty where all is finite.
    """
    for what, tensor in (
        ("numeric columns of the batch", given.dense_BF),
        ("vectors of the tables", given.pooled_BE),
    ):
        if not tensor.isfinite().all():
            return f"the {what} are not finite"
    bad_parameters = [name for name, p in net.named_parameters() if not p.isfinite().all()]
    outputs = _outputs_not_finite(net, given, precision) if is_whole else []
    if outputs:
        first = f"the first that is not finite is the output of {outputs[0]}"
        if outputs[0] == _REMOTE_NET:
            return first
        own = [name for name in bad_parameters if name.startswith(f"{outputs[0]}.")]
        parameters = f"its parameter {own[0]} is not either" if own else "its parameters are finite"
        return f"{first}, {parameters}"
    return f"the parameter {bad_parameters[0]} is not finite" if bad_parameters else ""


def _outputs_not_finite(net: DenseNet, given: Given, precision: AbstractContextManager[object]) -> list[str]:
    """The layers whose outputs are not finite, in the order in which they end."""
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
            _outputs(net, given, look)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _outputs(net: DenseNet, given: Given, look: Callable[[str, Tensor], None] | None = None) -> Tensor:
    hidden_BH = net.interaction(net.bottom(given.dense_BF), given.pooled_BE)
    if given.remote_BH is not None:
        hidden_BH = given.remote_BH
        if look is not None:
            look(_REMOTE_NET, hidden_BH)
    output: Tensor = net.head(hidden_BH)
    return output
