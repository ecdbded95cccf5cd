"""Comparison of models in ``hybrid.models`` with plain implementations that compute a sample at a time."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from support.seeded import random
from torch import Tensor, nn

Parameters: TypeAlias = Mapping[str, Tensor]


def vectors(*shape: int, seed: int) -> Tensor:
    """Return random inputs that require gradients."""
    return random(*shape, seed=seed, dtype=torch.float64).requires_grad_()


def check_model(
    module: nn.Module, plain: Callable[..., Any], *inputs: Tensor, run: Callable[..., Any] | None = None
) -> None:
    """Check that outputs, and gradients of all parameters and inputs, are those of ``plain``.

    An empty slice gives every parameter a gradient of zeros.

    Args:
        plain: takes the module's parameters by name, and the inputs.
        run: called with the inputs instead of the module.
    """
    module.double()
    run = module if run is None else run
    parameters = dict(module.named_parameters())
    expected = _with_gradients(plain(parameters, *inputs), [*parameters.values(), *inputs])
    found = _with_gradients(run(*inputs), [*parameters.values(), *inputs])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    empty = [each[:0].detach().requires_grad_(each.requires_grad) for each in inputs]
    outputs, gradients = _with_gradients(run(*empty), [*parameters.values()])
    assert [len(each) for each in outputs] == [0] * len(expected[0])
    assert all(not gradient.any() for gradient in gradients)  # a NaN would be some


def _with_gradients(outputs: Any, leaves: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the outputs, and the gradients of their sum with random weights."""
    each = list(outputs) if isinstance(outputs, tuple) else [outputs]
    total = torch.stack(
        [(out * random(*out.shape, seed=40 + k, dtype=torch.float64)).sum() for k, out in enumerate(each)]
    ).sum()
    trained = [leaf for leaf in leaves if leaf.requires_grad]
    return each, list(torch.autograd.grad(total, trained)) if trained else []


def plain_mlp(parameters: Parameters, prefix: str, x_H: Tensor, ends_linear: bool = False) -> Tensor:
    """Apply linear layers with a ReLU after each, or after each but the last."""
    names = [name for name in parameters if name.startswith(f"{prefix}.")]
    numbers = sorted({int(name.removeprefix(f"{prefix}.").split(".")[0]) for name in names})
    for number in numbers:
        weight, bias = (parameters[f"{prefix}.{number}.{kind}"] for kind in ("weight", "bias"))
        x_H = (weight * x_H).sum(dim=1) + bias
        if not (ends_linear and number == numbers[-1]):
            x_H = torch.where(x_H > 0, x_H, 0.0)
    return x_H


def plain_logit(parameters: Parameters, prefix: str, x_H: Tensor) -> Tensor:
    """Return the output of an MLP: a scalar if it has one."""
    return plain_mlp(parameters, prefix, x_H, ends_linear=True).squeeze(0)


def within(parameters: Parameters, prefix: str) -> dict[str, Tensor]:
    """Return the parameters of a submodule."""
    start = f"{prefix}."
    return {n.removeprefix(start): each for n, each in parameters.items() if n.startswith(start)}
