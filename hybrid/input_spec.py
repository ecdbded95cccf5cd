"""The names and kinds of the features of a data set."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FeatureSpec:
    """One sparse feature of the input."""

    name: str  # column name
    num_rows: int  # one more than the largest id; 0 if ids are keys of a growing table
    multi_hot: bool = False  # whether a sample has any number of ids, instead of exactly one
    weighted: bool = False  # whether ids have weights; only if multi_hot

    @property
    def is_growing(self) -> bool:
        """Whether the ids are 64-bit keys of a growing table, instead of row numbers."""
        return self.num_rows == 0


@dataclass(frozen=True, slots=True)
class InputSpec:
    """The features of a data set, in the order of the tensors of a batch."""

    dense_features: tuple[str, ...]
    sparse_features: tuple[FeatureSpec, ...]

    @property
    def sizes(self) -> tuple[int, int]:
        """The number of dense features and the number of sparse features."""
        return len(self.dense_features), len(self.sparse_features)
