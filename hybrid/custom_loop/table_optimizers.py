"""Optimizers of tables, with the names and arguments of ``torch.optim``.

With ``all_rows``, a step updates every row, as ``torch.optim`` does for an ``nn.Embedding``; without, it
updates the rows of its batch only. ``hybrid/embedding/worker/row_optimizers.py`` has the formulas.
"""

import math
from typing import Any

from hybrid.embedding.table_spec import OptimizerSpec


def SGD(lr: float, weight_decay: float = 0.0, *, all_rows: bool = False) -> OptimizerSpec:
    """Stochastic gradient descent."""
    return _spec("sgd", lr, weight_decay=weight_decay, all_rows=all_rows)


def Momentum(
    lr: float, momentum: float = 0.9, weight_decay: float = 0.0, *, all_rows: bool = False
) -> OptimizerSpec:
    """SGD with momentum; the buffer of a row changes only when the row is updated."""
    return _spec("momentum", lr, momentum=momentum, weight_decay=weight_decay, all_rows=all_rows)


def Adagrad(
    lr: float, eps: float = 1e-10, weight_decay: float = 0.0, *, all_rows: bool = False
) -> OptimizerSpec:
    """Adagrad with a sum of squares per value."""
    return _spec("adagrad", lr, eps=eps, weight_decay=weight_decay, all_rows=all_rows)


def RowwiseAdagrad(lr: float, eps: float = 1e-10, weight_decay: float = 0.0) -> OptimizerSpec:
    """Adagrad with one sum of squares per row: of the mean over its values."""
    return _spec("rowwise_adagrad", lr, eps=eps, weight_decay=weight_decay)


def Adam(
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    *,
    all_rows: bool = False,
) -> OptimizerSpec:
    """Adam with a step count per row."""
    return _spec("adam", lr, betas=betas, eps=eps, weight_decay=weight_decay, all_rows=all_rows)


def AdamW(
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    *,
    all_rows: bool = False,
) -> OptimizerSpec:
    """Adam with decoupled weight decay."""
    return _spec("adamw", lr, betas=betas, eps=eps, weight_decay=weight_decay, all_rows=all_rows)


def Ftrl(lr: float, beta: float = 1.0, l1: float = 0.0, weight_decay: float = 0.0) -> OptimizerSpec:
    """FTRL-proximal."""
    return _spec("ftrl", lr, ftrl_beta=beta, ftrl_l1=l1, weight_decay=weight_decay)


def _spec(name: str, lr: float, **settings: Any) -> OptimizerSpec:
    """Return a specification; ValueError if one of its numbers is out of range."""
    spec = OptimizerSpec(name, lr, **settings)
    above_zero = {"lr": spec.learning_rate, "eps": spec.eps, "beta": spec.ftrl_beta}
    at_least_zero = {"weight_decay": spec.weight_decay, "l1": spec.ftrl_l1}
    below_one = {"momentum": spec.momentum, "betas": min(spec.betas), "betas ": max(spec.betas)}
    for name, value in (above_zero | at_least_zero | below_one).items():
        is_right = math.isfinite(value) and value >= 0 and (value > 0 or name not in above_zero)
        if not is_right or (name in below_one and value >= 1):
            raise ValueError(f"{spec.name}: {name.strip()} cannot be {value}")
    return spec
