"""Row optimizers of the reference: the operations of torch.optim, on the rows of a step only.

It shares nothing with ``row_optimizers.py``, which documents the formulas. If torch has the optimizer, a rule
repeats the operations of its class, so that a step of all rows has the bits of torch. If all rows take every
step, ``torch.optim`` itself is used (:class:`WholeTable`).
"""

import torch
from torch import Tensor, nn

from hybrid.embedding.table_spec import OptimizerSpec

State = dict[str, Tensor]

# Below this rate, rows would not change, and its inverse may overflow float32.
_SMALLEST_FTRL_RATE = 1e-20

_STATE_OF_VALUES = {
    "momentum": ("buffer",),
    "adagrad": ("sum",),
    "adam": ("mean", "square"),
    "adamw": ("mean", "square"),
    "ftrl": ("z", "n"),
}
_STATE_OF_ROWS = {"rowwise_adagrad": ("sum",), "adam": ("steps",), "adamw": ("steps",)}


def initial_state(spec: OptimizerSpec, table_RD: Tensor) -> State:
    """Return zeros for each value or row of a table, by the names of the cluster's optimizers."""
    of_values = {name: torch.zeros_like(table_RD) for name in _STATE_OF_VALUES.get(spec.name, ())}
    of_rows = {name: table_RD.new_zeros(len(table_RD)) for name in _STATE_OF_ROWS.get(spec.name, ())}
    return of_values | of_rows


def update_rows(
    spec: OptimizerSpec, learning_rate: float, table_RD: Tensor, state: State, ids_U: Tensor, grad_UD: Tensor
) -> None:
    """Take one optimizer step of the distinct rows ``ids_U``, in place."""
    rows_UD = table_RD[ids_U]
    # AdamW and FTRL apply decay themselves; otherwise it is a part of the gradient.
    if spec.weight_decay and spec.name not in ("adamw", "ftrl"):
        grad_UD = grad_UD.add(rows_UD, alpha=spec.weight_decay)
    state_U = {name: whole[ids_U] for name, whole in state.items()}
    _step(rows_UD, grad_UD, state_U, spec, learning_rate)
    table_RD[ids_U] = rows_UD
    for name, whole in state.items():
        whole[ids_U] = state_U[name]


def _step(rows_UD: Tensor, grad_UD: Tensor, state: State, spec: OptimizerSpec, rate: float) -> None:
    """Update rows and their state in place."""
    match spec.name:
        case "sgd":
            rows_UD.add_(grad_UD, alpha=-rate)
        case "momentum":
            state["buffer"].mul_(spec.momentum).add_(grad_UD)
            rows_UD.add_(state["buffer"], alpha=-rate)
        case "adagrad":
            state["sum"].addcmul_(grad_UD, grad_UD)
            rows_UD.addcdiv_(grad_UD, state["sum"].sqrt().add_(spec.eps), value=-rate)
        case "rowwise_adagrad":
            state["sum"] += grad_UD.square().mean(dim=1)
            rows_UD.addcdiv_(grad_UD, state["sum"].sqrt().add_(spec.eps).unsqueeze(1), value=-rate)
        case "adam":
            _adam(rows_UD, grad_UD, state, spec, rate)
        case "adamw":
            rows_UD.mul_(1 - rate * spec.weight_decay)
            _adam(rows_UD, grad_UD, state, spec, rate)
        case name:
            assert name == "ftrl", name
            _ftrl(rows_UD, grad_UD, state, spec, rate)


def _adam(rows_UD: Tensor, grad_UD: Tensor, state: State, spec: OptimizerSpec, rate: float) -> None:
    """Torch's rule, with a step count for each row."""
    beta1, beta2 = spec.betas
    state["steps"] += 1
    state["mean"].lerp_(grad_UD, 1 - beta1)
    state["square"].mul_(beta2).addcmul_(grad_UD, grad_UD, value=1 - beta2)
    # Python's powers as in torch, since powers of tensors differ in the last bit.
    counts, of_row_U = state["steps"].unique(return_inverse=True)
    step_sizes = [rate / (1 - beta1**count) for count in counts.tolist()]
    corrections = [(1 - beta2**count) ** 0.5 for count in counts.tolist()]
    step_size_U1 = rows_UD.new_tensor(step_sizes)[of_row_U].unsqueeze(1)
    correction_U1 = rows_UD.new_tensor(corrections)[of_row_U].unsqueeze(1)
    denominator_UD = (state["square"].sqrt() / correction_U1).add_(spec.eps)
    rows_UD.add_(-step_size_U1 * state["mean"] / denominator_UD)


def _ftrl(rows_UD: Tensor, grad_UD: Tensor, state: State, spec: OptimizerSpec, rate: float) -> None:
    """FTRL-Proximal (McMahan et al. 2013), from any initial values and at rates that may change."""
    if rate < _SMALLEST_FTRL_RATE:
        return
    z_UD, n_UD, l1, l2 = state["z"], state["n"], spec.ftrl_l1, spec.weight_decay
    # The z whose solution at this rate is the current row; the stored z if the rate is constant.
    present_UD = -rows_UD * ((spec.ftrl_beta + n_UD.sqrt()) / rate + l2) - rows_UD.sign() * l1
    z_UD.copy_(torch.where(rows_UD == 0, z_UD, present_UD))
    sigma_UD = ((n_UD + grad_UD.square()).sqrt() - n_UD.sqrt()) / rate
    z_UD += grad_UD - sigma_UD * rows_UD
    n_UD += grad_UD.square()
    solution_UD = -(z_UD - z_UD.sign() * l1) / ((spec.ftrl_beta + n_UD.sqrt()) / rate + l2)
    rows_UD.copy_(torch.where(z_UD.abs() <= l1, 0.0, solution_UD))


class WholeTable:
    """A table trained by ``torch.optim``: every row takes every step, with a gradient of the table's size.

    Args:
        table_RD: the rows, updated in place.
        state: the result of :func:`initial_state`, updated in place.
    """

    def __init__(self, spec: OptimizerSpec, table_RD: Tensor, state: State) -> None:
        self._parameter = nn.Parameter(table_RD)
        self._optimizer = _torch_optimizer(spec, self._parameter)
        self._state = state

    def step(self, learning_rate: float, ids_U: Tensor, grad_UD: Tensor) -> None:
        """Take one step with the gradients of the distinct rows ``ids_U``; all others are zero."""
        self._parameter.grad = torch.zeros_like(self._parameter).index_copy_(0, ids_U, grad_UD)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        torch_state = self._optimizer.state[self._parameter]
        for name, tensor in self._state.items():
            tensor.copy_(torch_state[_NAMES_IN_TORCH[name]])


_NAMES_IN_TORCH = {
    "buffer": "momentum_buffer",
    "sum": "sum",
    "mean": "exp_avg",
    "square": "exp_avg_sq",
    "steps": "step",
}


def _torch_optimizer(spec: OptimizerSpec, parameter: nn.Parameter) -> torch.optim.Optimizer:
    rate, decay = spec.learning_rate, spec.weight_decay
    match spec.name:
        case "sgd":
            return torch.optim.SGD([parameter], rate, weight_decay=decay)
        case "momentum":
            return torch.optim.SGD([parameter], rate, spec.momentum, weight_decay=decay)
        case "adagrad":
            return torch.optim.Adagrad([parameter], rate, eps=spec.eps, weight_decay=decay)
        case "adam":
            return torch.optim.Adam([parameter], rate, spec.betas, spec.eps, decay)
        case name:
            assert name == "adamw", name
            return torch.optim.AdamW([parameter], rate, spec.betas, spec.eps, decay)
