"""Keys of [embedding] and [tables.NAME]: the tables, their first rows, and their optimizers."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid.config.data import POOLINGS
from hybrid.config.key import fixed, option

TABLE_OPTIMIZERS = ("sgd", "momentum", "adagrad", "rowwise_adagrad", "adam", "adamw", "ftrl")
INITIALISERS = ("uniform", "normal", "zeros")


@dataclass(frozen=True, kw_only=True)
class EmbeddingSection:
    """Defaults of all tables; a section [tables.NAME] overrides them for one."""

    dim: int = fixed(16, "width of a row", minimum=1)
    pooling: str = fixed("sum", "how a bag of ids becomes one vector", choices=POOLINGS)
    optimizer: str = fixed("adagrad", "how rows are updated", choices=TABLE_OPTIMIZERS)
    learning_rate: float = option(0.05, "learning rate of the rows", above=0)
    eps: float = option(
        1e-8,
        "eps of adagrad, rowwise_adagrad, adam and adamw; keeps a zero gradient from dividing by zero",
        minimum=1e-30,
    )
    momentum: float = option(0.9, "momentum (momentum)", minimum=0, maximum=0.999999)
    beta1: float = option(0.9, "first beta (adam, adamw)", minimum=0, maximum=0.999999)
    beta2: float = option(0.999, "second beta (adam, adamw)", minimum=0, maximum=0.999999)
    weight_decay: float = option(
        0.0,
        "decay of a row at each step that touches it; see hybrid/embedding/worker/optimizers.py",
        minimum=0,
    )
    ftrl_beta: float = option(1.0, "beta of ftrl, which slows its first steps", above=0)
    ftrl_l1: float = option(0.0, "L1 penalty (ftrl): values below it are zero", minimum=0)
    wire_dtype: str = option(
        "rows",
        "type in which vectors and their gradients travel in training: that of the rows, or bfloat16, "
        "half the bytes and eight bits of precision",
        choices=("rows", "bfloat16"),
    )
    placement: str = option(
        "auto", "table: whole on one worker; row: split over workers", choices=("auto", "table", "row")
    )


@dataclass(frozen=True, kw_only=True)
class TableSection:
    """Overrides for one table; a key left out takes the value of [embedding]."""

    dim: int | None = fixed(None, "width of a row", minimum=1)
    pooling: str | None = fixed(None, "pooling of a bag", choices=POOLINGS)
    optimizer: str | None = fixed(None, "how rows are updated", choices=TABLE_OPTIMIZERS)
    learning_rate: float | None = option(None, "learning rate of the rows", above=0)
    placement: str | None = option(None, "auto, table or row", choices=("auto", "table", "row"))
    workers: tuple[int, ...] = option((), "worker indices the table may be placed on; empty for any")
    features: tuple[str, ...] = fixed((), "columns that share this table; empty for the one of its name")
    initial: str = fixed(
        "",
        "file with its first rows, which all workers see; empty for random ones. Parquet: a column of values "
        "and one of vectors; safetensors (path#name for one of several tensors) or .npy: row by row",
    )
    frozen: bool = fixed(False, "rows stay as they are first")
    init: str = fixed("uniform", "how random first rows are drawn", choices=INITIALISERS)
    init_scale: float = fixed(
        0.0, "uniform: the largest absolute value, normal: the deviation; 0 for 1 / sqrt(rows)", minimum=0
    )
