"""What a table is: its name, size, pooling and optimizer, and which features read it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from hybrid.input_spec import InputSpec


class Pooling(StrEnum):
    """How the rows of one bag become one vector. An empty bag gives zeros."""

    SUM = "sum"
    MEAN = "mean"
    MAX = "max"


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """An optimizer of table rows: its name and its settings (see ``row_optimizers.py``).

    Settings that the named optimizer does not have are without effect.

    Attributes:
        all_rows: whether every row of a table takes every step, those that it does not touch with a gradient
            of zero.
    """

    name: str
    learning_rate: float
    eps: float = 1e-8
    betas: tuple[float, float] = (0.9, 0.999)
    momentum: float = 0.9
    weight_decay: float = 0.0
    ftrl_beta: float = 1.0
    ftrl_l1: float = 0.0
    all_rows: bool = False

    @property
    def steps_all_rows(self) -> bool:
        """Whether a step changes rows that it does not touch: they decay, or go on as they moved."""
        return self.all_rows and (self.weight_decay > 0 or self.name in ("momentum", "adam", "adamw"))


@dataclass(frozen=True, slots=True)
class TableSpec:
    """One embedding table and the features that look it up.

    Attributes:
        name: unique name; the table's initial rows depend on it and the seed alone.
        num_rows, dim: its shape.
        pooling: how the rows of a bag become one vector.
        features: names of the features that read this table.
        optimizer: how its rows are updated.
        init_scale: of the first rows, as ``init`` says.
        placement: "auto", "table" (whole on one worker) or "row" (split over workers).
        workers: worker indices it may be placed on; empty for any.
        bytes_per_value: of its rows and their optimizer state.
        initial: where its first rows are (see ``pretrained_by_position.py``); empty for random ones.
        init: how random ones are drawn: "uniform" in [-init_scale, init_scale], "normal" of this deviation,
            or "zeros".
        poolings: of each feature, where they are not all ``pooling``.
        sequences: of each feature, of how many ids at most it is a sequence, whose vectors stay apart; 0
            where its bags are pooled. Empty where all are.
        sequence: the same of the one feature by which :meth:`read_by` gives the table.
        keys: the folder of the prepared data by which ``initial`` has rows by value, if it has.
        pooled_by: who pools its bags: "workers", "trainers", or "auto", where the placement decides.
    """

    name: str
    num_rows: int
    dim: int
    pooling: Pooling
    features: tuple[str, ...]
    optimizer: OptimizerSpec
    init_scale: float
    placement: str = "auto"
    workers: tuple[int, ...] = ()
    bytes_per_value: int = 4
    initial: str = ""
    init: str = "uniform"
    poolings: tuple[Pooling, ...] = ()
    keys: str = ""
    sequences: tuple[int, ...] = ()
    sequence: int = 0
    pooled_by: str = "auto"

    def read_by(self, feature: str) -> TableSpec:
        """The table with the pooling of one of its features, or with the length of its sequence."""
        if not (self.poolings or self.sequences):
            return self
        place = self.features.index(feature)
        return replace(
            self,
            pooling=self.poolings[place] if self.poolings else self.pooling,
            sequence=self.sequences[place] if self.sequences else 0,
        )

    @property
    def num_vectors(self) -> int:
        """How many vectors the net gets of a sample, where :meth:`read_by` has given the table."""
        return self.sequence or 1

    @property
    def width(self) -> int:
        """Of all that the net gets of a sample: a vector, or those of a sequence and how many they are."""
        return self.num_vectors * self.dim + bool(self.sequence)


def tables_of(input_spec: InputSpec, tables: Iterable[TableSpec]) -> list[TableSpec]:
    """The table of each sparse feature, with its pooling or sequence, in feature order."""
    table_of = {feature: table.read_by(feature) for table in tables for feature in table.features}
    return [table_of[feature.name] for feature in input_spec.sparse_features]
