"""Row optimizers of the reference, and rounding of rows to bfloat16.

This module shares no code with ``kernels.py``, or with ``row_optimizers.py``, which documents the equations.
Optimizers of torch.optim update the rows of a step as if each row had a separate optimizer; with
``all_rows``, they update all rows. Row-wise Adagrad and FTRL are written here, since torch lacks them.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from hybrid.embedding.initial_rows import random_salt
from hybrid.embedding.table_spec import OptimizerSpec
from hybrid.primitives.key_hashes import next_random

State = dict[str, Tensor]

# A rate below this value would not change rows, and the inverse of the rate may overflow float32.
_SMALLEST_FTRL_RATE = 1e-20
_SPLITMIX_STEP = 0x9E3779B97F4A7C15  # from one state of SplitMix64 to the next
_LARGEST = torch.finfo(torch.bfloat16).max

# Names of optimizer state with the names in torch: a number per value, or a number per row.
_STATE_OF_VALUES = {
    "momentum": {"buffer": "momentum_buffer"},
    "adagrad": {"sum": "sum"},
    "adam": {"mean": "exp_avg", "square": "exp_avg_sq"},
    "adamw": {"mean": "exp_avg", "square": "exp_avg_sq"},
    "ftrl": {"z": "", "n": ""},
}
_STATE_OF_ROWS = {"rowwise_adagrad": ("sum",), "adam": ("steps",), "adamw": ("steps",)}


def initial_state(spec: OptimizerSpec, table_RD: Tensor) -> State:
    """Return zeros of the table's dtype for each optimizer state, by the name of the state on workers."""
    of_values = {name: torch.zeros_like(table_RD) for name in _STATE_OF_VALUES.get(spec.name, ())}
    of_rows = {name: table_RD.new_zeros(len(table_RD)) for name in _STATE_OF_ROWS.get(spec.name, ())}
    return of_values | of_rows


def update_rows(
    spec: OptimizerSpec,
    learning_rate: float,
    table_RD: Tensor,
    state: State,
    ids_U: Tensor,
    grad_UD: Tensor,
    rounded: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> None:
    """Take one optimizer step with the gradients of the distinct rows ``ids_U``, in place.

    With ``spec.all_rows``, all other rows take the step with gradients of zero.

    Args:
        rounded: for a bfloat16 table, a function that rounds new rows (U, D), given their ids (U,).
    """
    if spec.all_rows:
        grad_UD = grad_UD.new_zeros(table_RD.shape).index_copy_(0, ids_U, grad_UD)
        ids_U = torch.arange(len(table_RD))
    rows_UD = table_RD[ids_U].to(grad_UD.dtype)
    state_U = {name: of_table[ids_U] for name, of_table in state.items()}
    match spec.name:
        case "rowwise_adagrad":
            grad_UD = grad_UD.add(rows_UD, alpha=spec.weight_decay)
            state_U["sum"] += grad_UD.square().mean(dim=1)
            denominator_U1 = state_U["sum"].sqrt().add_(spec.eps).unsqueeze(1)
            rows_UD.addcdiv_(grad_UD, denominator_U1, value=-learning_rate)
        case "ftrl":
            _ftrl(rows_UD, grad_UD, state_U, spec, learning_rate)
        case _:
            _torch_step(rows_UD, grad_UD, state_U, spec, learning_rate)
    table_RD[ids_U] = rows_UD if rounded is None else rounded(rows_UD, ids_U)
    for name, of_table in state.items():
        of_table[ids_U] = state_U[name]


def _torch_step(rows_UD: Tensor, grad_UD: Tensor, state: State, spec: OptimizerSpec, rate: float) -> None:
    """Update rows and state in place, with a torch optimizer per group of rows with equal step counts."""
    names = _STATE_OF_VALUES.get(spec.name, {})
    steps_U = state.get("steps", rows_UD.new_zeros(len(rows_UD)))
    for steps in steps_U.unique().tolist():
        index_N = (steps_U == steps).nonzero().squeeze(1)
        parameter = nn.Parameter(rows_UD[index_N])
        parameter.grad = grad_UD[index_N]
        optimizer = _torch_optimizer(spec, parameter, rate)
        torch_state = {torch_name: state[name][index_N] for name, torch_name in names.items()}
        optimizer.state[parameter] = {"step": torch.tensor(steps), **torch_state}
        optimizer.step()
        rows_UD[index_N] = parameter.detach()
        for name, torch_name in names.items():
            state[name][index_N] = torch_state[torch_name]
    steps_U += 1


def _torch_optimizer(spec: OptimizerSpec, parameter: nn.Parameter, rate: float) -> torch.optim.Optimizer:
    decay = spec.weight_decay
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


def _ftrl(rows_UD: Tensor, grad_UD: Tensor, state: State, spec: OptimizerSpec, rate: float) -> None:
    """Update rows and state in place by FTRL-Proximal (McMahan et al. 2013), at this step's rate."""
    if rate < _SMALLEST_FTRL_RATE:
        return
    z_UD, n_UD, l1, l2 = state["z"], state["n"], spec.ftrl_l1, spec.weight_decay
    # The z whose solution at this rate is the current rows. With a constant rate, this z is the stored z.
    current_UD = -rows_UD * ((spec.ftrl_beta + n_UD.sqrt()) / rate + l2) - rows_UD.sign() * l1
    z_UD.copy_(torch.where(rows_UD == 0, z_UD, current_UD))
    sigma_UD = ((n_UD + grad_UD.square()).sqrt() - n_UD.sqrt()) / rate
    z_UD += grad_UD - sigma_UD * rows_UD
    n_UD += grad_UD.square()
    solution_UD = -(z_UD - z_UD.sign() * l1) / ((spec.ftrl_beta + n_UD.sqrt()) / rate + l2)
    rows_UD.copy_(torch.where(z_UD.abs() <= l1, 0.0, solution_UD))


def round_stochastically(rows_UD: Tensor, numbers_U: Tensor, seed: int, step: int, table: str) -> Tensor:
    """Return rows in bfloat16, each value rounded up or down at random.

    The position of a value between its neighbors in bfloat16 is compared with a random number of SplitMix64.

    Args:
        numbers_U: number of each row in its table; for a growing table, its key, as int64.
    """
    single_UD = rows_UD.float()
    lower_UD = (single_UD.view(torch.int32) & ~0xFFFF).view(torch.float32)  # the neighbor closer to zero
    upper_UD = (lower_UD.view(torch.int32) + 0x10000).view(torch.float32)
    position_UD = (single_UD.double() - lower_UD) / (upper_UD.double() - lower_UD)
    is_raised_UD = position_UD * 2**16 + _random(rows_UD.shape[1], numbers_U, seed, step, table) >= 2**16
    rounded_UD = torch.where(is_raised_UD, upper_UD, lower_UD).clamp(-_LARGEST, _LARGEST)
    return torch.where(single_UD.isfinite(), rounded_UD, single_UD).to(torch.bfloat16)


def _random(dim: int, numbers_U: Tensor, seed: int, step: int, table: str) -> Tensor:
    """Return random 16-bit numbers for the values of rows, (U, ``dim``), from the other arguments only."""
    salt_1 = next_random(np.array([random_salt(seed, table)], np.uint64) + np.uint64(step))
    state_U1 = next_random(salt_1 + numbers_U.numpy().astype(np.uint64))[:, None]
    index_N = np.arange(-(-dim // 4), dtype=np.uint64)
    words_UN = next_random(state_U1 + index_N * np.uint64(_SPLITMIX_STEP))
    return torch.from_numpy(words_UN.astype("<u8").view("<u2")[:, :dim].astype(np.float64))
