"""Warnings about common calls of PyTorch loops that miss the tables, or see only a slice of the batch."""

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd.graph import Node

from hybrid.custom_loop.backend import Backend


class LoopWarnings:
    """Gives each warning once, on trainer 0.

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
        """Record the version counters of the gradients from ``cluster.backward``."""
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
        """Warn if the learning rate of an optimizer has changed since its first step.

        Raises:
            RuntimeError: the momentum or the betas have changed; those of the tables cannot change.
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

    def check_pairs(self, loss: Tensor, size: int, sizes: Iterable[int]) -> None:
        """Warn if a loss compares the samples of this trainer's slice with each other.

        Such a loss has a matrix of (samples, samples) in its graph.

        Args:
            size: number of samples in the slice.
            sizes: sizes of parameters and inputs. If ``size`` is among them, other matrices may have this
                shape, and nothing is checked.
        """
        if self._backend.trainer > 0 or self._backend.group.size() == 1 or size < 2 or size in set(sizes):
            return
        if loss.grad_fn is not None and _has_output_shape(loss.grad_fn, (size, size)):
            self.warn(
                f"the loss seems to compare samples with each other (a matrix of {size} x {size} samples). "
                "Each trainer sees only a slice of the batch. To compare with all samples of the batch, call "
                "cluster.gather(vectors), which keeps gradients"
            )

    def warn(self, message: str) -> None:
        """Give a warning once."""
        if self._backend.trainer == 0 and message not in self._given:
            self._given.add(message)
            self._backend.warn(message)


def _versions(gradients: Iterable[Tensor | None]) -> list[tuple[int, int]]:
    return [(id(each), each._version) for each in gradients if each is not None]


def _has_output_shape(node: Node, shape: tuple[int, ...]) -> bool:
    """Whether an operation of an autograd graph has an output of the shape."""
    seen, stack = {node}, [node]
    while stack:
        current = stack.pop()
        if any(tuple(output.shape) == shape for output in current._input_metadata):
            return True
        next_nodes = {each for each, _ in current.next_functions if each is not None} - seen
        seen |= next_nodes
        stack += next_nodes
    return False
