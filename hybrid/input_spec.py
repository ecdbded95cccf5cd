"""What the batches of a run hold: the columns of its data."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FeatureSpec:
    """One sparse feature of the input.

    Attributes:
        name: column name.
        num_rows: one more than the largest id.
        multi_hot: whether a sample may hold any number of ids; otherwise it holds exactly one.
        weighted: whether its ids have weights in prepared data; it is multi-hot then.
    """

    name: str
    num_rows: int
    multi_hot: bool = False
    weighted: bool = False


@dataclass(frozen=True, slots=True)
class InputSpec:
    """The columns of a data set, in the order of the tensors of a batch."""

    dense_features: tuple[str, ...]
    sparse_features: tuple[FeatureSpec, ...]


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """The labels of one task.

    Attributes:
        name: of the task.
        kind: ``binary`` (0, 1, or a probability in between), ``regression`` (any number), or ``classes``.
        num_classes: how many, from 0; 0 where the kind is another.
    """

    name: str = "label"
    kind: str = "binary"
    num_classes: int = 0
