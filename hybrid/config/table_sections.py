"""Keys of [embedding] and [tables.NAME]: the tables, their first rows, and their optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hybrid.config.data_sections import POOLINGS
from hybrid.config.key import fixed, option
from hybrid.errors import ConfigError

TABLE_OPTIMIZERS = ("sgd", "momentum", "adagrad", "rowwise_adagrad", "adam", "adamw", "ftrl")
# Those of torch.optim, which says what becomes of a row whose gradient is zero.
OPTIMIZERS_OF_ALL_ROWS = ("sgd", "momentum", "adagrad", "adam", "adamw")
POOLERS = ("workers", "trainers")
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
        "decay of a row at each step that touches it, or at all steps with all_rows; see "
        "hybrid/embedding/worker/row_optimizers.py",
        minimum=0,
    )
    all_rows: bool = option(
        False,
        "every row takes every step, as in torch with dense gradients: all of them decay, and are moved by "
        "momentum and means (sgd, momentum, adagrad, adam, adamw); a step then reads and writes whole tables",
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
    pooled_by: str = option(
        "auto",
        "who makes one vector of a bag: the workers that hold its rows, or the trainers, which then fetch "
        "each distinct row once; auto takes whom fewer bytes are expected of (hybrid plan shows both)",
        choices=("auto", *POOLERS),
    )


@dataclass(frozen=True, kw_only=True)
class TableSection:
    """Overrides for one table; a key left out takes the value of [embedding]."""

    dim: int | None = fixed(None, "width of a row", minimum=1)
    pooling: str | None = fixed(None, "pooling of a bag", choices=POOLINGS)
    optimizer: str | None = fixed(None, "how rows are updated", choices=TABLE_OPTIMIZERS)
    learning_rate: float | None = option(None, "learning rate of the rows", above=0)
    all_rows: bool | None = option(None, "every row takes every step")
    placement: str | None = option(None, "auto, table or row", choices=("auto", "table", "row"))
    pooled_by: str | None = option(None, "who pools its bags", choices=("auto", *POOLERS))
    workers: tuple[int, ...] = option((), "worker indices the table may be placed on; empty for any")
    features: tuple[str, ...] = fixed((), "columns that share this table; empty for the one of its name")
    initial: str = fixed(
        "",
        "file with its first rows, which all workers see, or its URL; empty for random ones. Parquet: a "
        "column of values and one of vectors; safetensors (path#name for one of several tensors) or .npy: "
        "row by row",
    )
    frozen: bool = fixed(False, "rows stay as they are first")
    init: str = fixed("uniform", "how random first rows are drawn", choices=INITIALISERS)
    init_scale: float = fixed(
        0.0, "uniform: the largest absolute value, normal: the deviation; 0 for 1 / sqrt(rows)", minimum=0
    )


def check_all_rows(embedding: EmbeddingSection, tables: Mapping[str, TableSection], update: str) -> None:
    """ConfigError where every row of a table is to take every step, and cannot.

    Args:
        update: how gradients are applied, ``train.update``.
    """
    asked = [("embedding", embedding.all_rows, embedding.optimizer)]
    for name, table in tables.items():
        all_rows = embedding.all_rows if table.all_rows is None else table.all_rows
        asked.append((f"tables.{name}", all_rows, table.optimizer or embedding.optimizer))
    for section, all_rows, optimizer in asked:
        if all_rows and optimizer not in OPTIMIZERS_OF_ALL_ROWS:
            others = ", ".join(OPTIMIZERS_OF_ALL_ROWS)
            rule = f"must be false with {optimizer}, or the optimizer one of {others}"
            raise ConfigError(f"{section}.all_rows", rule, True)
        if all_rows and update == "async":
            rule = "needs train.update = sync or pipelined, whose steps all trainers take together"
            raise ConfigError(f"{section}.all_rows", rule, True)
