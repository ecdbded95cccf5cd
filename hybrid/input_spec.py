"""The features and labels of a data set."""

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
        """Whether ids are 64-bit keys of a growing table."""
        return self.num_rows == 0


@dataclass(frozen=True, slots=True)
class InputSpec:
    """The features of a data set, in the order of the tensors of a batch."""

    dense_features: tuple[str, ...]
    sparse_features: tuple[FeatureSpec, ...]

    @property
    def sizes(self) -> tuple[int, int]:
        """The numbers of dense and of sparse features, as :meth:`Batch.empty` needs them."""
        return len(self.dense_features), len(self.sparse_features)
