"""Optimizers of tables, with names and arguments as in ``torch.optim``; ``embedding.worker`` has formulas.

With ``all_rows``, every row takes every step, as ``torch.optim`` has it for an ``nn.Embedding``; else those
that the step touches.
"""

import math

from hybrid.embedding.table_spec import OptimizerSpec


def SGD(lr: float, weight_decay: float = 0.0, *, all_rows: bool = False) -> OptimizerSpec:
    """Stochastic gradient descent."""
    return _checked(OptimizerSpec("sgd", lr, weight_decay=weight_decay, all_rows=all_rows))


def Momentum(
    lr: float, momentum: float = 0.9, weight_decay: float = 0.0, *, all_rows: bool = False
) -> OptimizerSpec:
    """SGD with momentum; the buffer of a row rests while the row does."""
    spec = OptimizerSpec("momentum", lr, momentum=momentum, weight_decay=weight_decay, all_rows=all_rows)
    return _checked(spec)


def Adagrad(
    lr: float, eps: float = 1e-10, weight_decay: float = 0.0, *, all_rows: bool = False
) -> OptimizerSpec:
    """Adagrad, with a sum of squares for each value."""
    return _checked(OptimizerSpec("adagrad", lr, eps=eps, weight_decay=weight_decay, all_rows=all_rows))


def RowwiseAdagrad(lr: float, eps: float = 1e-10, weight_decay: float = 0.0) -> OptimizerSpec:
    """Adagrad with one sum of squares for each row, the mean over its values."""
    return _checked(OptimizerSpec("rowwise_adagrad", lr, eps=eps, weight_decay=weight_decay))


def Adam(
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    *,
    all_rows: bool = False,
) -> OptimizerSpec:
    """Adam, which counts the steps of each row by itself."""
    spec = OptimizerSpec("adam", lr, betas=betas, eps=eps, weight_decay=weight_decay, all_rows=all_rows)
    return _checked(spec)


def AdamW(
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    *,
    all_rows: bool = False,
) -> OptimizerSpec:
    """Adam with decoupled decay."""
    spec = OptimizerSpec("adamw", lr, betas=betas, eps=eps, weight_decay=weight_decay, all_rows=all_rows)
    return _checked(spec)


def Ftrl(lr: float, beta: float = 1.0, l1: float = 0.0, weight_decay: float = 0.0) -> OptimizerSpec:
    """FTRL-proximal."""
    return _checked(OptimizerSpec("ftrl", lr, ftrl_beta=beta, ftrl_l1=l1, weight_decay=weight_decay))


def _checked(spec: OptimizerSpec) -> OptimizerSpec:
    """``spec``; ValueError where a number cannot be what it is."""
    above_zero = {"lr": spec.learning_rate, "eps": spec.eps, "beta": spec.ftrl_beta}
    at_least_zero = {"weight_decay": spec.weight_decay, "l1": spec.ftrl_l1}
    below_one = {"momentum": spec.momentum, "betas": min(spec.betas), "betas ": max(spec.betas)}
    for name, value in (above_zero | at_least_zero | below_one).items():
        is_right = math.isfinite(value) and value >= 0 and (value > 0 or name not in above_zero)
        if not is_right or (name in below_one and value >= 1):
            raise ValueError(f"{spec.name}: {name.strip()} cannot be {value}")
    return spec
