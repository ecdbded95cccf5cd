"""Optimizers of the dense nets: any class of ``torch.optim``, fed from a distributed autograd context."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import TypeGuard

import torch
from torch import nn

from hybrid.errors import ConfigError


def make_optimizer(
    parameters: Iterable[nn.Parameter], name: str, learning_rate: float
) -> torch.optim.Optimizer:
    """An optimizer by the name of its class in ``torch.optim``.

    Raises:
        ConfigError: there is no such class.
    """
    cls = getattr(torch.optim, name, None)
    if not _is_optimizer(cls):
        names = {n.lower(): n for n, value in sorted(vars(torch.optim).items()) if _is_optimizer(value)}
        close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.8)
        hint = f"did you mean {names[close[0]]!r}?" if close else f"choose from {', '.join(names.values())}"
        raise ConfigError("dense.optimizer", f"is not a class of torch.optim; {hint}", name)
    return cls(parameters, lr=learning_rate)


def _is_optimizer(cls: object) -> TypeGuard[Callable[..., torch.optim.Optimizer]]:
    base = torch.optim.Optimizer
    return isinstance(cls, type) and issubclass(cls, base) and cls is not base


class DenseOptimizer:
    """Steps a ``torch.optim`` optimizer with the gradients that a distributed autograd context holds."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, context_id: int) -> None:
        """One step with the gradients of ``context_id``; parameters without one are left alone."""
        gradients = torch.distributed.autograd.get_gradients(context_id)
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = gradients.get(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
