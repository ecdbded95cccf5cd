"""Optimizers of table rows: each updates only the rows that a step touched.

With g the gradient of a touched row, summed over the samples of the step, and r its learning rate:

================ =================================================================== ==================
name             update of a touched row w                                           source
================ =================================================================== ==================
sgd              w -= r * g                                                          torch.optim.SGD
adagrad          s += g^2; w -= r * g / (sqrt(s) + eps)                              Duchi et al. 2011
rowwise_adagrad  s += mean(g^2); w -= r * g / (sqrt(s) + eps), one s a row           Gupta et al. 2014
adam             per row: n += 1; m, v as Kingma & Ba 2015; bias corrected by n      torch.optim.Adam
================ =================================================================== ==================

``adam`` counts the steps of each row by itself, so a rare row's first steps are corrected as first steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from hybrid.embedding.spec import OptimizerSpec


class RowOptimizer(ABC):
    """Updates rows of one weight matrix in place; its state lies in tensors beside the rows."""

    def __init__(self, spec: OptimizerSpec, weight_RD: Tensor) -> None:
        self.spec = spec
        self.weight_RD = weight_RD

    @property
    def state(self) -> dict[str, Tensor]:
        """Named state tensors; the first dimension of each counts rows."""
        return {}

    @abstractmethod
    def step(self, rows_U: Tensor, grad_UD: Tensor) -> None:
        """Apply one step to the distinct rows ``rows_U`` with gradients ``grad_UD``."""


class SGD(RowOptimizer):
    def step(self, rows_U: Tensor, grad_UD: Tensor) -> None:
        self.weight_RD.index_add_(0, rows_U, grad_UD, alpha=-self.spec.learning_rate)


class Adagrad(RowOptimizer):
    def __init__(self, spec: OptimizerSpec, weight_RD: Tensor) -> None:
        super().__init__(spec, weight_RD)
        self.sum_RD = torch.zeros_like(weight_RD)

    @property
    def state(self) -> dict[str, Tensor]:
        return {"sum": self.sum_RD}

    def step(self, rows_U: Tensor, grad_UD: Tensor) -> None:
        sum_UD = self.sum_RD.index_select(0, rows_U).addcmul_(grad_UD, grad_UD)
        self.sum_RD.index_copy_(0, rows_U, sum_UD)
        update_UD = grad_UD / sum_UD.sqrt_().add_(self.spec.eps)
        self.weight_RD.index_add_(0, rows_U, update_UD, alpha=-self.spec.learning_rate)


class RowwiseAdagrad(RowOptimizer):
    def __init__(self, spec: OptimizerSpec, weight_RD: Tensor) -> None:
        super().__init__(spec, weight_RD)
        self.sum_R = weight_RD.new_zeros(len(weight_RD))

    @property
    def state(self) -> dict[str, Tensor]:
        return {"sum": self.sum_R}

    def step(self, rows_U: Tensor, grad_UD: Tensor) -> None:
        sum_U = self.sum_R.index_select(0, rows_U).add_(grad_UD.square().mean(1))
        self.sum_R.index_copy_(0, rows_U, sum_U)
        update_UD = grad_UD / sum_U.sqrt_().add_(self.spec.eps).unsqueeze(1)
        self.weight_RD.index_add_(0, rows_U, update_UD, alpha=-self.spec.learning_rate)


class Adam(RowOptimizer):
    def __init__(self, spec: OptimizerSpec, weight_RD: Tensor) -> None:
        super().__init__(spec, weight_RD)
        self.mean_RD = torch.zeros_like(weight_RD)
        self.square_RD = torch.zeros_like(weight_RD)
        self.steps_R = weight_RD.new_zeros(len(weight_RD))

    @property
    def state(self) -> dict[str, Tensor]:
        return {"mean": self.mean_RD, "square": self.square_RD, "steps": self.steps_R}

    def step(self, rows_U: Tensor, grad_UD: Tensor) -> None:
        beta1, beta2 = self.spec.betas
        steps_U = self.steps_R.index_select(0, rows_U).add_(1)
        mean_UD = self.mean_RD.index_select(0, rows_U).lerp_(grad_UD, 1 - beta1)
        square_UD = (
            self.square_RD.index_select(0, rows_U).mul_(beta2).addcmul_(grad_UD, grad_UD, value=1 - beta2)
        )
        for whole, part in ((self.steps_R, steps_U), (self.mean_RD, mean_UD), (self.square_RD, square_UD)):
            whole.index_copy_(0, rows_U, part)
        # In float32, 1 - 0.999**n loses half its digits while n is small.
        exact_U1 = steps_U.double().unsqueeze(1)
        correction1_U1 = (1 - beta1**exact_U1).to(grad_UD.dtype)
        correction2_U1 = (1 - beta2**exact_U1).to(grad_UD.dtype)
        denominator_UD = square_UD.div_(correction2_U1).sqrt_().add_(self.spec.eps)
        update_UD = mean_UD.div_(correction1_U1).div_(denominator_UD)
        self.weight_RD.index_add_(0, rows_U, update_UD, alpha=-self.spec.learning_rate)


OPTIMIZERS: dict[str, type[RowOptimizer]] = {
    "sgd": SGD,
    "adagrad": Adagrad,
    "rowwise_adagrad": RowwiseAdagrad,
    "adam": Adam,
}
