"""The ids of a batch by feature, checked once."""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from hybrid.batch import SparseFeatures
from hybrid.embedding import kernels
from hybrid.embedding.bags import Bags
from hybrid.embedding.kernels import Ints
from hybrid.embedding.table_spec import Pooling
from hybrid.errors import DataError


class BatchIds:
    """The ids of one batch, feature by feature.

    Attributes:
        ids_L: all ids, int64.
        weights_L: weight of each id, or None for ones.
        ends_K: where the ids of each feature end in ``ids_L``.

    Raises:
        DataError: offsets or weights do not match the ids.
    """

    def __init__(self, sparse: SparseFeatures) -> None:
        num_ids = len(sparse.ids_L)
        offsets = sparse.offsets
        if sparse.weights_L is not None and len(sparse.weights_L) != num_ids:
            raise DataError(f"a batch has {len(sparse.weights_L)} weights for {num_ids} ids")
        num_bags = num_ids if offsets is None else len(offsets) - 1
        if num_bags != sparse.batch_size * sparse.num_features:
            rule = "each feature must have one bag per sample"
            raise DataError(
                f"a batch of {sparse.num_features} sparse features has {num_bags} bags of ids; {rule}"
            )
        # Compiled kernels do not check bounds.
        if offsets is not None and (offsets[0] != 0 or offsets[-1] != num_ids or (offsets.diff() < 0).any()):
            raise DataError(f"the offsets of a batch must rise from 0 to {num_ids}, the number of its ids")
        self.batch_size = sparse.batch_size
        self.ids_L = sparse.ids_L.to(torch.int64).contiguous()
        self.weights_L = sparse.weights_L
        self._num_features = sparse.num_features
        self._offsets = offsets
        ends_K = torch.arange(1, sparse.num_features + 1) * self.batch_size
        self.ends_K = ends_K if offsets is None else self.offsets[ends_K]

    @cached_property
    def offsets(self) -> Tensor:
        """The start of each bag, feature by feature, int64 (K * B + 1)."""
        given = self._offsets
        return torch.arange(len(self.ids_L) + 1) if given is None else given.to(torch.int64).contiguous()

    @cached_property
    def weighted_features(self) -> frozenset[int]:
        """Indices of the features that have an id with a weight other than 1."""
        if self.weights_L is None:
            return frozenset()
        positions = (self.weights_L != 1).nonzero().view(-1)
        return frozenset(torch.bucketize(positions, self.ends_K, right=True).unique().tolist())

    @cached_property
    def mean_weights_L(self) -> Tensor:
        """Weight 1/n for each id in a bag of n ids: the weighted sum of the rows is then their mean."""
        lengths = self.offsets.diff()
        # In float64; pooling rounds the weights to the type of the rows.
        return torch.repeat_interleave(1.0 / lengths.clamp(min=1).double(), lengths)

    def pooling_weights(
        self, pooling: Pooling, is_weighted: bool, is_partial: bool = False
    ) -> tuple[Pooling, Tensor | None]:
        """Return the pooling to compute, and the weight of each id, or None for ones.

        In two cases, a mean of n ids becomes a sum with weights that are divided by n: if ids have weights,
        which torch's mean does not support, and if several workers pool a bag, because means do not add up.

        Args:
            is_weighted: whether the ids have weights.
            is_partial: whether several workers each pool some rows of a bag.
        """
        weights_L = self.weights_L if is_weighted else None
        if pooling is not Pooling.MEAN or (weights_L is None and not is_partial):
            return pooling, weights_L
        return Pooling.SUM, self.mean_weights_L if weights_L is None else self.mean_weights_L * weights_L

    def bounds(self, feature: int) -> Tensor:
        """Return the offsets of the bags of a feature in ``ids_L``, (B + 1)."""
        first = feature * self.batch_size
        return self.offsets[first : first + self.batch_size + 1]

    def single(self, features: Sequence[int]) -> Tensor:
        """Return the ids of features with one id per sample, (features, B)."""
        if self._offsets is None and len(features) == self._num_features:
            return self.ids_L.view(self._num_features, self.batch_size)
        ends = self.ends_K.tolist()
        return torch.stack([self.ids_L[ends[k] - self.batch_size : ends[k]] for k in features])

    def bags(
        self,
        features: Sequence[int],
        bases_FS: Ints,
        counts_F: Ints,
        weights_L: Tensor | None,
        pooling: Pooling,
        dtype: torch.dtype,
        offsets_dtype: torch.dtype,
    ) -> Bags:
        """Return the bags of some features, with addresses (row numbers over several tables) for ids.

        See :func:`kernels.write_bag_addresses` for the order of bags, ``bases_FS`` and ``counts_F``.

        Args:
            weights_L, pooling: see :meth:`pooling_weights`.
            dtype, offsets_dtype: types of the addresses and of the offsets of the bags.
        """
        capacity = int(self.ends_K.diff(prepend=self.ends_K.new_zeros(1))[list(features)].sum())
        addresses = torch.empty(capacity, dtype=dtype)
        starts = torch.empty(self.batch_size * len(features) + 1, dtype=offsets_dtype)
        positions = torch.empty(0 if weights_L is None else capacity, dtype=torch.int64)
        out = addresses.numpy(), starts.numpy(), positions.numpy()
        ids, offsets = self.ids_L.numpy(), self.offsets.numpy()
        of_features = np.array(features), bases_FS, counts_F
        size = kernels.write_bag_addresses(ids, offsets, self.batch_size, *of_features, *out)
        if size < capacity:
            addresses = addresses[:size].clone()  # because RPC sends the whole storage of a view
        return Bags(addresses, starts, None if weights_L is None else weights_L[positions[:size]], pooling)
