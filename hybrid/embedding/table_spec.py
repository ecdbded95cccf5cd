"""Descriptions of tables and their optimizers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeAlias

from hybrid.config.data_sections import MIN_GROWING_ROWS, UNKNOWN_ROWS
from hybrid.input_spec import InputSpec

UNLIMITED_ROWS = 1_000_000  # an estimate for a growing table without a limit

# Names of the state tensors of each optimizer: first those of the shape (rows, D), then those of (rows,).
STATE_TENSORS = {
    "momentum": (("buffer",), ()),
    "adagrad": (("sum",), ()),
    "rowwise_adagrad": ((), ("sum",)),
    "adam": (("mean", "square"), ("steps",)),
    "adamw": (("mean", "square"), ("steps",)),
    "ftrl": (("z", "n"), ()),
}

AddressKey: TypeAlias = tuple[int, str]


class Pooling(StrEnum):
    """How the rows of a bag become one vector. An empty bag becomes zeros."""

    SUM = "sum"
    MEAN = "mean"
    MAX = "max"


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """Name and settings of an optimizer of rows (see ``row_optimizers.py``).

    Settings that the named optimizer does not have are ignored.
    """

    name: str
    learning_rate: float
    eps: float = 1e-8
    betas: tuple[float, float] = (0.9, 0.999)
    momentum: float = 0.9
    weight_decay: float = 0.0
    ftrl_beta: float = 1.0
    ftrl_l1: float = 0.0
    all_rows: bool = False  # whether each step updates every row, with a gradient of zero for the others

    @property
    def has_momentum(self) -> bool:
        """Whether the optimizer has momentum: ``momentum``, ``adam`` and ``adamw``."""
        return self.name in ("momentum", "adam", "adamw")

    @property
    def steps_all_rows(self) -> bool:
        """Whether each step updates all rows: ``all_rows`` is set, and there is weight decay or momentum."""
        return self.all_rows and (self.weight_decay > 0 or self.has_momentum)


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """The rules for adding and evicting rows of a growing table (see ``growing_group.py``).

    Args:
        admit_after: an id gets a row when this number of steps have read the id.
        max_rows: the largest number of rows, at least 8,192; 0 for no limit.
        evict_after: number of steps without a lookup after which an id loses its row; 0 for never.
        half_life: interval in steps at which the counts for ``admit_after`` are halved.
        unknown: the vector of an id without a row in evaluations: its "initial" row, or "zeros".

    Raises:
        ValueError: an argument is out of range.
    """

    admit_after: int = 1
    max_rows: int = 0
    evict_after: int = 0
    half_life: int = 10_000
    unknown: str = "initial"

    def __post_init__(self) -> None:
        if min(self.admit_after, self.half_life) < 1 or self.evict_after < 0:
            raise ValueError("admit_after and half_life must be at least 1, and evict_after at least 0")
        if self.max_rows and self.max_rows < MIN_GROWING_ROWS:
            raise ValueError(f"max_rows must be 0 or at least {MIN_GROWING_ROWS:,}, not {self.max_rows}")
        if self.unknown not in UNKNOWN_ROWS:
            raise ValueError(f"unknown is one of {', '.join(UNKNOWN_ROWS)}, not {self.unknown!r}")


@dataclass(frozen=True, slots=True)
class TableSpec:
    """An embedding table and the features that look it up."""

    name: str  # unique name; initial rows are a function of it and the seed
    # num_rows, dim: shape of the table; a growing table has 0 rows.
    num_rows: int
    dim: int
    pooling: Pooling  # how the rows of a bag become one vector
    features: tuple[str, ...]  # names of the features that read this table
    optimizer: OptimizerSpec  # how rows are updated
    init_scale: float  # scale of the initial rows; see ``init``
    placement: str = "auto"  # "auto", "table" (whole on one worker) or "row" (split over workers)
    workers: tuple[int, ...] = ()  # indices of the allowed workers; empty for any
    bytes_per_value: int = 4  # bytes of a value of optimizer state, gradients and pooled vectors
    initial: str = ""  # file or folder of initial rows (see ``initial_rows.py``); empty for random ones
    # If ``initial`` is the folder of a checkpoint or of exported tables, the name of the table there.
    initial_table: str = ""
    has_initial_state: bool = False  # whether ``initial`` has the state of the same optimizer
    # "uniform" in [-init_scale, init_scale], "normal" with this standard deviation, or "zeros".
    init: str = "uniform"
    poolings: tuple[Pooling, ...] = ()  # pooling of each feature, if not all are ``pooling``
    encoder_folder: str = ""  # for initial rows by value: prepared data, whose encoder maps values to rows
    # For each feature, the maximum length of a sequence, or 0 if it is pooled; empty if all are pooled.
    sequences: tuple[int, ...] = ()
    sequence: int = 0  # for a table from for_feature: maximum length of the sequence; 0 if pooled
    # The side that pools bags: "workers", "trainers", or "auto" if the placement decides.
    pooled_by: str = "auto"
    # The rules of a growing table, whose ids are 64-bit keys; None for a fixed number of rows.
    growth: Growth | None = None
    # Whether rows are stored in bfloat16. Otherwise, a value has ``bytes_per_value``.
    has_bfloat16_rows: bool = False

    @property
    def row_bytes_per_value(self) -> int:
        """Bytes of one value of a stored row; ``bytes_per_value`` is for optimizer state and gradients."""
        return 2 if self.has_bfloat16_rows else self.bytes_per_value

    @property
    def expected_rows(self) -> int:
        """Number of rows. For a growing table, the limit ``max_rows``, or 0 without a limit."""
        return self.growth.max_rows if self.growth else self.num_rows

    @property
    def address_key(self) -> AddressKey:
        """Key of the table's ``AddressSpace``: the table's width, and for a growing table also the name."""
        return self.dim, self.name if self.growth else ""

    def for_feature(self, feature: str) -> TableSpec:
        """Return the table with the ``pooling`` and ``sequence`` of one of its features."""
        if not (self.poolings or self.sequences):
            return self
        index = self.features.index(feature)
        return replace(
            self,
            pooling=self.poolings[index] if self.poolings else self.pooling,
            sequence=self.sequences[index] if self.sequences else 0,
        )

    @property
    def is_initial_by_position(self) -> bool:
        """Whether ``initial`` is a matrix with all rows of the table, in order."""
        return bool(self.initial) and not (self.encoder_folder or self.initial_table)

    @property
    def num_vectors(self) -> int:
        """Vectors per sample: 1, or the length of a sequence. Only for a table from :meth:`for_feature`."""
        return self.sequence or 1

    @property
    def width(self) -> int:
        """Values per sample in :attr:`num_vectors` vectors, and one more for the length of a sequence."""
        return self.num_vectors * self.dim + bool(self.sequence)


def tables_of(input_spec: InputSpec, tables: Iterable[TableSpec]) -> list[TableSpec]:
    """Return the table of each sparse feature, in feature order, with the feature's pooling and sequence."""
    table_of = {feature: table.for_feature(feature) for table in tables for feature in table.features}
    return [table_of[feature.name] for feature in input_spec.sparse_features]
