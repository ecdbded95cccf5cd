"""The ids of a batch, checked once, feature by feature."""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from hybrid.batch import SparseFeatures
from hybrid.embedding.table_spec import Pooling
from hybrid.errors import DataError


class BatchIds:
    """The ids of one batch, feature by feature.

    Attributes:
        ids_L: all ids, feature after feature.
        weights_L: the weight of each, or None.
        ends_K: where each feature's ids end.

    Raises:
        DataError: offsets or weights are not those of the ids.
    """

    def __init__(self, sparse: SparseFeatures) -> None:
        _check(sparse)
        self.batch_size = sparse.batch_size
        self.ids_L = sparse.ids_L.to(torch.int64).contiguous()
        self.weights_L = sparse.weights_L
        self._num_features = sparse.num_features
        self._offsets = None if sparse.offsets is None else sparse.offsets.to(torch.int64).contiguous()
        ends_K = torch.arange(1, sparse.num_features + 1) * self.batch_size
        self.ends_K = ends_K if self._offsets is None else self._offsets[ends_K]

    @property
    def offsets(self) -> Tensor:
        """Where each bag starts, feature after feature, (K * B + 1)."""
        return torch.arange(len(self.ids_L) + 1) if self._offsets is None else self._offsets

    @cached_property
    def weighted(self) -> frozenset[int]:
        """The features that have an id of another weight than 1."""
        if self.weights_L is None:
            return frozenset()
        positions = (self.weights_L != 1).nonzero().view(-1)
        return frozenset(torch.bucketize(positions, self.ends_K, right=True).unique().tolist())

    @cached_property
    def shares_L(self) -> Tensor:
        """Of each id 1/n, where its bag holds n: rows times these add up to means."""
        lengths = self.offsets.diff()
        # Rounded where rows are pooled, to their type.
        return torch.repeat_interleave(1.0 / lengths.clamp(min=1).double(), lengths)

    def pooled_as(
        self, pooling: Pooling, is_weighted: bool, in_parts: bool = False
    ) -> tuple[Pooling, Tensor | None]:
        """How bags are pooled that are to be pooled so, and by which weights of all ids, if by any.

        Means of parts do not add up, and torch takes none of weighted rows; sums of 1/n shares do both.

        Args:
            is_weighted: whether their ids have weights, as those of a batch may.
            in_parts: whether several workers each pool some rows of a bag.
        """
        weights_L = self.weights_L if is_weighted else None
        if pooling is not Pooling.MEAN or (weights_L is None and not in_parts):
            return pooling, weights_L
        return Pooling.SUM, self.shares_L if weights_L is None else self.shares_L * weights_L

    def count(self, features: Sequence[int]) -> int:
        """How many ids some features have together."""
        return int(self.ends_K.diff(prepend=self.ends_K.new_zeros(1))[list(features)].sum())

    def bounds(self, feature: int) -> Tensor:
        """Where each bag of a feature starts and ends among all ids, (B + 1)."""
        first = feature * self.batch_size
        if self._offsets is None:
            return torch.arange(first, first + self.batch_size + 1)
        return self._offsets[first : first + self.batch_size + 1]

    def single(self, features: Sequence[int]) -> Tensor:
        """Ids of features that hold one id a sample, (features, B)."""
        if self._offsets is None and len(features) == self._num_features:
            return self.ids_L.view(self._num_features, self.batch_size)
        ends = self.ends_K.tolist()
        return torch.stack([self.ids_L[ends[k] - self.batch_size : ends[k]] for k in features])


def _check(sparse: SparseFeatures) -> None:
    num_ids, offsets = len(sparse.ids_L), sparse.offsets
    if sparse.weights_L is not None and len(sparse.weights_L) != num_ids:
        raise DataError(f"a batch has {len(sparse.weights_L)} weights of {num_ids} ids")
    num_bags = num_ids if offsets is None else len(offsets) - 1
    if num_bags != sparse.batch_size * sparse.num_features:
        raise DataError(f"a batch of {sparse.num_features} sparse features has {num_bags} bags of ids")
    # What follows trusts them: compiled loops look no bounds up.
    if offsets is not None and (offsets[0] != 0 or offsets[-1] != num_ids or (offsets.diff() < 0).any()):
        raise DataError(f"the offsets of a batch must rise from 0 to {num_ids}, the number of its ids")
