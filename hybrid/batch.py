"""A batch of samples, and the legend of tensor shapes.

Tensor names end in their shape, one letter a dimension:

====== ==========================================================
letter meaning
====== ==========================================================
B      samples of a batch (on one trainer)
F      dense (numeric) features
K      sparse (categorical) features
L      ids of a batch, over all its sparse features
D      width of an embedding vector
E      widths of all features' embedding vectors, side by side
H      hidden units
U      distinct rows
====== ==========================================================

Sparse features are jagged and feature-major: the bags of feature 0 for all samples come first, then
those of feature 1. Bag ``k * B + b`` holds ``ids_L[offsets[k * B + b] : offsets[k * B + b + 1]]``::

    samples B = 3            feature "genre"                 feature "brand"
    ids_L                    4 7 | - | 2                     5 | 1 | 9
    offsets (K*B + 1)        0     2   2                     3   4   5   6
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class SparseFeatures(NamedTuple):
    """Ids of K sparse features for B samples, feature-major.

    Attributes:
        ids_L: int64 row numbers within each feature's table.
        offsets: int64 of shape (K * B + 1), where each bag starts; None where every bag holds
            exactly one id, so that ``ids_L`` has K * B elements.
        weights_L: float32 weight of each id within its bag, or None for all ones.
        num_features: K.
    """

    ids_L: Tensor
    offsets: Tensor | None
    weights_L: Tensor | None
    num_features: int

    @property
    def batch_size(self) -> int:
        """B, the number of samples."""
        bags = self.ids_L.numel() if self.offsets is None else self.offsets.numel() - 1
        return bags // self.num_features if self.num_features else 0

    @classmethod
    def from_bags(
        cls, bags: list[list[list[int]]], weights: list[list[list[float]]] | None = None
    ) -> SparseFeatures:
        """Build from nested lists ``bags[feature][sample]`` of ids (and weights of the same shape)."""
        flat = [bag for feature in bags for bag in feature]
        lengths = torch.tensor([0] + [len(bag) for bag in flat], dtype=torch.int64)
        weights_L = None
        if weights is not None:
            values = [w for feature in weights for bag in feature for w in bag]
            weights_L = torch.tensor(values, dtype=torch.float32)
        ids_L = torch.tensor([i for bag in flat for i in bag], dtype=torch.int64)
        return cls(ids_L, lengths.cumsum(0), weights_L, len(bags))


class Batch(NamedTuple):
    """One trainer's share of a step's samples.

    Attributes:
        dense_features: ``dense_BF``, float32.
        sparse_features: ids of the K sparse features for the same B samples.
        labels: ``labels_B``, float32 of 0 and 1.
        global_size: samples in the whole step, over all trainers. The loss is the mean over these,
            so shares of different sizes (or of none) still add up to the right gradient.
    """

    dense_features: Tensor
    sparse_features: SparseFeatures
    labels: Tensor
    global_size: int
