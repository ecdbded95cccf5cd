"""Warnings about common calls of PyTorch that affect the module's parameters, but not the tables."""

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

from hybrid.custom_loop.backend import Backend


class LoopWarnings:
    """The warnings about a script. Trainer 0 gives each warning once.

    Args:
        has_momentum: whether the optimizer of a table has momentum.
    """

    def __init__(self, backend: Backend, has_momentum: bool) -> None:
        self._backend = backend
        self._has_momentum = has_momentum
        self._given: set[str] = set()
        self._gradients: list[tuple[int, int]] = []
        # Learning rates and momenta at the first step of each optimizer.
        self._first = weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[list[float], list[object]]]()

    def note_gradients(self, gradients: Iterable[Tensor]) -> None:
        """Record the version counters of the gradients from ``cluster.backward``, to detect changes."""
        self._gradients = _versions(gradients)

    def check_gradients(self, gradients: Iterable[Tensor | None]) -> None:
        """Warn if the script has changed the recorded gradients, as ``clip_grad_norm_`` does."""
        if _versions(gradients) != self._gradients:
            self.warn(
                "gradients were changed between cluster.backward(...) and optimizer.step(), for instance by "
                "clip_grad_norm_. The change covers the parameters of the module, not the tables. To clip "
                "all gradients by their common norm, set train.clip_norm in the configuration instead"
            )

    def check_settings(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn if the script has changed a learning rate, but [schedule] leaves the rates of tables constant.

        RuntimeError if the momentum or the betas have changed, and the optimizer of a table has momentum.
        """
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        momenta = [group.get("betas", group.get("momentum")) for group in optimizer.param_groups]
        first_rates, first_momenta = self._first.setdefault(optimizer, (rates, momenta))
        if first_rates != rates and self._backend.config.schedule.call.name == "constant":
            self.warn(
                "the learning rate of the optimizer has changed, for instance by torch.optim.lr_scheduler. "
                "The tables keep the rates of their own optimizers. To schedule the tables, too, set section "
                "[schedule] of the configuration"
            )
        if first_momenta != momenta and self._has_momentum:
            raise RuntimeError(
                "the momentum or the betas of the optimizer have changed, as OneCycleLR and CyclicLR do by "
                "default, but the tables keep those of their own optimizers: pass cycle_momentum=False"
            )

    def warn(self, message: str) -> None:
        """Give a warning once."""
        if self._backend.trainer == 0 and message not in self._given:
            self._given.add(message)
            self._backend.warn(message)


def _versions(gradients: Iterable[Tensor | None]) -> list[tuple[int, int]]:
    return [(id(each), each._version) for each in gradients if each is not None]
