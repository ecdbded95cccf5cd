"""Optimizers of rows: each step updates the touched rows, or all rows of a table.

A row is touched if the step looks it up. Let w be a touched row, and g its gradient summed over the samples
of the step. The rate r is the learning rate of the table times the factor of the schedule:

=============== =========================================== ========= =========== =========================
name            update of a touched row                     state     decay       source
=============== =========================================== ========= =========== =========================
frozen          none                                        0
sgd             w -= r g                                    0         L2          torch.optim.SGD
momentum        b = momentum b + g;  w -= r b               D         L2          torch.optim.SGD
adagrad         s += g^2;  w -= r g / (sqrt(s) + eps)       D         L2          Duchi et al. 2011
rowwise_adagrad s += mean(g^2);  w as adagrad               1         L2          Gupta et al. 2014
adam            n += 1;  m += (1 - beta1) (g - m);          2 D + 1   L2          Kingma & Ba 2015
                v = beta2 v + (1 - beta2) g^2;
                w -= r m' / (sqrt(v') + eps), where
                m' = m / (1 - beta1^n) and
                v' = v / (1 - beta2^n)
adamw           as adam                                     2 D + 1   apart       Loshchilov & Hutter 2019
ftrl            see :class:`FTRL`                           2 D       closed form McMahan et al. 2013
=============== =========================================== ========= =========== =========================

``state`` is the number of values per row of width D. ``decay`` is the effect of ``weight_decay``: "L2" first
adds weight_decay * w to g. "apart" first multiplies w by 1 - r * weight_decay. "closed form" is an L2 penalty
on w. ``adam`` and ``adamw`` count steps per row, so a row's bias correction depends on its number of steps.
The update of a row does not depend on which other rows a step touches.

Without ``all_rows``, a row that a step does not touch keeps its values and its state. With ``all_rows``, the
step also updates this row, with a gradient of zero. If the optimizer has decay or momentum, each step then
costs a pass over the table. A table that the loss of a custom loop does not use stays unchanged.

Rows in bfloat16 are widened, updated, and rounded stochastically. Their state is not rounded.

If torch has the optimizer, rows that are updated in every step are bit-identical to torch's single-tensor
code.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import softshrink

from hybrid.embedding import kernels
from hybrid.embedding.row_gradients import RowGradients
from hybrid.embedding.table_spec import STATE_TENSORS, OptimizerSpec
from hybrid.primitives.bfloat16_arrays import as_array
from hybrid.primitives.huge_pages import zeros_in_large_pages

Zeros: TypeAlias = Callable[[Sequence[int], torch.dtype], Tensor]  # makes a tensor of a shape and a type


def _put(full: Tensor, rows_U: Tensor, part: Tensor) -> None:
    if len(part):
        matrix, rows = (tensor.view(len(tensor), -1).numpy() for tensor in (full, part))
        kernels.put_rows(matrix, rows_U.numpy(), rows)


class StochasticRounding(NamedTuple):
    """The type of the arithmetic for updates of rows in bfloat16, and the random numbers for rounding."""

    dtype: torch.dtype  # type of the arithmetic and of the state
    # Returns a random number for each row; see :func:`kernels.put_rounded_rows`.
    seeds: Callable[[Tensor], npt.NDArray[np.uint64]]


class RowOptimizer:
    """The base class of optimizers that update rows of a weight matrix in place.

    Args:
        rounding: needed for a matrix in bfloat16. If None, the arithmetic is in the type of the matrix.

    Attributes:
        state: tensors by name, of the type of the arithmetic; their first dimension is the row.
    """

    def __init__(
        self,
        spec: OptimizerSpec,
        weight_RD: Tensor,
        zeros: Zeros = zeros_in_large_pages,
        rounding: StochasticRounding | None = None,
    ) -> None:
        self.spec = spec
        self.weight_RD = weight_RD
        self.rounding = rounding
        dtype = weight_RD.dtype if rounding is None else rounding.dtype
        of_values, of_row = STATE_TENSORS.get(spec.name, ((), ()))
        self.state = {name: zeros(weight_RD.shape, dtype) for name in of_values}
        self.state |= {name: zeros(weight_RD.shape[:1], dtype) for name in of_row}

    def apply(self, gradients: RowGradients, first: int, last: int, scale: float, factor: float) -> float:
        """Apply one step to ``gradients.rows_U[first:last]``, with the gradients times ``scale``.

        ``factor`` multiplies the learning rate. Return the sum of unscaled gradients, to detect NaN and inf.
        """
        grad_UD, total = gradients.sum_block(first, last, scale)
        self.step(gradients.rows_U[first:last], grad_UD, factor)
        return total

    def step(self, rows_U: Tensor, grad_UD: Tensor, factor: float = 1.0) -> None:
        """Apply one step to the distinct rows ``rows_U``; ``factor`` multiplies the learning rate."""
        if not len(rows_U):
            return
        weight_UD = self.weight_RD.index_select(0, rows_U).to(grad_UD.dtype)
        state = {name: full.index_select(0, rows_U) for name, full in self.state.items()}
        self.update(weight_UD, grad_UD, self.spec.learning_rate * factor, state)
        self._put_weight(rows_U, weight_UD)
        for name, part in state.items():
            _put(self.state[name], rows_U, part)

    def step_all(self, first: int, last: int, rows_U: Tensor, grad_UD: Tensor, factor: float = 1.0) -> None:
        """Apply one step to all rows ``first:last`` of the matrix.

        Args:
            rows_U, grad_UD: the touched rows of this range, and their gradients. Other rows get gradient 0.
            factor: multiplies the learning rate in this step.
        """
        weight_RD = self.weight_RD[first:last].to(grad_UD.dtype)
        grad_RD = torch.zeros_like(weight_RD)
        _put(grad_RD, rows_U - first, grad_UD)
        state = {name: full[first:last] for name, full in self.state.items()}
        self.update(weight_RD, grad_RD, self.spec.learning_rate * factor, state)
        if self.rounding is not None:  # otherwise, the rows are updated in place
            self._put_weight(torch.arange(first, last), weight_RD)

    def _put_weight(self, rows_U: Tensor, weight_UD: Tensor) -> None:
        if self.rounding is None:
            _put(self.weight_RD, rows_U, weight_UD)
        else:
            seeds_U = self.rounding.seeds(rows_U)
            kernels.put_rounded_rows(as_array(self.weight_RD), rows_U.numpy(), weight_UD.numpy(), seeds_U)

    def update(self, weight_UD: Tensor, grad_UD: Tensor, rate: float, state: Mapping[str, Tensor]) -> None:
        """Update rows and their state in place, with learning rate ``rate``; subclasses define it."""
        raise NotImplementedError

    def _with_decay(self, grad_UD: Tensor, weight_UD: Tensor) -> Tensor:
        decay = self.spec.weight_decay
        return grad_UD.add(weight_UD, alpha=decay) if decay else grad_UD


class SGD(RowOptimizer):
    def apply(self, gradients: RowGradients, first: int, last: int, scale: float, factor: float) -> float:
        if self.spec.weight_decay or self.rounding is not None:
            return super().apply(gradients, first, last, scale, factor)
        # Bit-identical, but without copies of rows and gradients.
        return gradients.add_to(self.weight_RD, first, last, scale, -self.spec.learning_rate * factor)

    def update(self, weight_UD: Tensor, grad_UD: Tensor, rate: float, state: Mapping[str, Tensor]) -> None:
        weight_UD.add_(self._with_decay(grad_UD, weight_UD), alpha=-rate)


class Momentum(RowOptimizer):
    def update(self, weight_UD: Tensor, grad_UD: Tensor, rate: float, state: Mapping[str, Tensor]) -> None:
        grad_UD = self._with_decay(grad_UD, weight_UD)
        buffer_UD = state["buffer"].mul_(self.spec.momentum).add_(grad_UD)
        weight_UD.add_(buffer_UD, alpha=-rate)


class Adagrad(RowOptimizer):
    """Adagrad with a sum of squared gradients for each value of a row."""

    def update(self, weight_UD: Tensor, grad_UD: Tensor, rate: float, state: Mapping[str, Tensor]) -> None:
        grad_UD = self._with_decay(grad_UD, weight_UD)
        sum_UD = state["sum"].addcmul_(grad_UD, grad_UD)
        weight_UD.addcdiv_(grad_UD, sum_UD.sqrt().add_(self.spec.eps), value=-rate)


class RowwiseAdagrad(RowOptimizer):
    """Adagrad with one value of state per row: the sum of the mean squares of the row's gradients."""

    def update(self, weight_UD: Tensor, grad_UD: Tensor, rate: float, state: Mapping[str, Tensor]) -> None:
        grad_UD = self._with_decay(grad_UD, weight_UD)
        sum_U = state["sum"].add_(grad_UD.square().mean(1))
        weight_UD.addcdiv_(grad_UD, sum_U.sqrt().add_(self.spec.eps).unsqueeze(1), value=-rate)


class Adam(RowOptimizer):
    """Adam with a step count per row; the name ``adamw`` selects decoupled weight decay."""

    def __init__(self, spec: OptimizerSpec, *matrix: Any, **more: Any) -> None:
        super().__init__(spec, *matrix, **more)
        largest = max(spec.betas)
        # From this step on, both powers are so small that 1 minus the power rounds to 1.
        self._last_distinct = 1 + int(-54 * math.log(2) / math.log(largest)) if largest > 0 else 1
        self._corrections_N2 = torch.empty(0, 2, dtype=torch.float64)

    def corrections(self, steps_U: Tensor) -> tuple[Tensor, Tensor]:
        """Return 1 - beta1^n and sqrt(1 - beta2^n), float64 of shape (U, 1), for step counts n >= 1.

        Python computes the values, as in torch.optim, since powers of tensors differ in the last bit. The
        values are stored for later calls.
        """
        index_U = steps_U.long().clamp_(max=self._last_distinct)
        largest = int(index_U.max())
        if largest >= len(self._corrections_N2):
            beta1, beta2 = self.spec.betas
            more = range(len(self._corrections_N2), largest + 1024)
            rows = [(1 - beta1**n, (1 - beta2**n) ** 0.5) for n in more]
            self._corrections_N2 = torch.cat([self._corrections_N2, torch.tensor(rows, dtype=torch.float64)])
        correction_U1, root_U1 = self._corrections_N2.index_select(0, index_U).split(1, dim=1)
        return correction_U1, root_U1

    def update(self, weight_UD: Tensor, grad_UD: Tensor, rate: float, state: Mapping[str, Tensor]) -> None:
        beta1, beta2 = self.spec.betas
        if self.spec.name == "adam":
            grad_UD = self._with_decay(grad_UD, weight_UD)
        elif self.spec.weight_decay:
            weight_UD.mul_(1 - rate * self.spec.weight_decay)
        mean_UD = state["mean"].lerp_(grad_UD, 1 - beta1)
        square_UD = state["square"].mul_(beta2).addcmul_(grad_UD, grad_UD, value=1 - beta2)
        correction_U1, root_U1 = self.corrections(state["steps"].add_(1))
        denominator_UD = square_UD.sqrt().div_(root_U1.to(square_UD.dtype)).add_(self.spec.eps)
        # torch computes number / tensor as a product with the reciprocal, which rounds twice.
        move_U1 = (correction_U1.new_tensor(-rate) / correction_U1).to(mean_UD.dtype)
        weight_UD.add_((mean_UD * move_U1).div_(denominator_UD))


class FTRL(RowOptimizer):
    """FTRL-Proximal (McMahan et al. 2013, algorithm 1), for each value w of a row.

    The state of w is z and n. The gradient of w is g, the learning rate is r, and beta and l1 are settings.
    With sigma = (sqrt(n + g^2) - sqrt(n)) / r, and a = (beta + sqrt(n + g^2)) / r + weight_decay::

        z += g - sigma w;  n += g^2;  w = 0 if |z| <= l1 else -(z - sign(z) l1) / a

    Unlike in the paper, rows do not start at zero, and a schedule may change r. So if w is not zero, a step
    first replaces z by -w ((beta + sqrt(n)) / r + weight_decay) - sign(w) l1. For this z, the formula above
    gives the current w. If w is zero, the step uses the stored z. With initial rows of zero and a constant r,
    the result equals the paper's. If the gradient or the learning rate is zero, w does not change.
    """

    # Below this, 1 / r could overflow float32, and w would not move visibly.
    smallest_rate: ClassVar[float] = 1e-20

    def update(self, weight_UD: Tensor, grad_UD: Tensor, rate: float, state: Mapping[str, Tensor]) -> None:
        if rate < self.smallest_rate:
            return
        spec = self.spec
        l1 = self.spec.ftrl_l1
        n_UD = state["n"].addcmul_(grad_UD, grad_UD)
        scale_UD = n_UD.sqrt().add_(spec.ftrl_beta).div_(rate).add_(spec.weight_decay)
        # The z for w and the old n, minus sigma w, is the z for w and the new n.
        z_UD = state["z"].masked_fill_(weight_UD != 0, 0.0).addcmul_(weight_UD, scale_UD, value=-1)
        if l1:
            z_UD.sub_(weight_UD.sign(), alpha=l1)
        z_UD.add_(grad_UD)
        solution_UD = softshrink(z_UD, l1).div_(scale_UD.neg_())
        # If w were computed from z where the gradient is zero, rounding would change it in each step.
        torch.where(grad_UD == 0, weight_UD, solution_UD, out=weight_UD)


OPTIMIZERS: dict[str, type[RowOptimizer]] = {
    "frozen": RowOptimizer,  # TableShards drops the gradients before they are merged
    "sgd": SGD,
    "momentum": Momentum,
    "adagrad": Adagrad,
    "rowwise_adagrad": RowwiseAdagrad,
    "adam": Adam,
    "adamw": Adam,
    "ftrl": FTRL,
}
