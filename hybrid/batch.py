"""Batches of samples, and the letters of tensor shapes.

The name of a tensor ends in its shape, one letter per dimension:

====== ==========================================================
letter meaning
====== ==========================================================
B      samples of one trainer's batch; in pooling code, bags
F      dense (numeric) features; in lookup code, some of the sparse features
K      sparse (categorical) features
L      ids of a batch, over all its sparse features
D      width of an embedding vector
E      embedding vectors of all features, concatenated
H      hidden units
R      rows of a table, or of several tables in one tensor
U      distinct rows
V      U + 1: bounds of the runs of equal ids in sorted ids
S      shards
I      items: rows of the item table
G      groups of samples
T      tasks; in sequence models, positions of a sequence
O      outputs of the dense net: one per task, or one per class of a task
C      classes; in batch normalization, channels
N      any number of samples, vectors or ids
====== ==========================================================

The docstring of a function or module explains its other letters. A digit is a size.

Sparse features are jagged and feature-major: the bags of feature 0 for all samples come first, then those of
feature 1. Bag ``k * B + b`` holds ``ids_L[offsets[k * B + b] : offsets[k * B + b + 1]]``::

    samples B = 3            feature "genre"                 feature "brand"
    ids_L                    4 7 | - | 2                     5 | 1 | 9
    offsets (K*B + 1)        0     2   2                     3   4   5   6
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybrid.primitives.grouping import group_bounds, group_ends
from hybrid.primitives.key_hashes import splitmix64


class SparseFeatures(NamedTuple):
    """Ids of K sparse features for B samples, feature-major.

    Attributes:
        ids_L: int64 row numbers within each feature's table; keys if the table grows.
        offsets: int64 of shape (K * B + 1), the starts of the bags in ``ids_L`` and the end of the last bag;
            None if each bag has exactly one id.
        weights_L: float32 weight of each id within its bag, or None for all ones.
        num_features: K.
    """

    ids_L: Tensor
    offsets: Tensor | None
    weights_L: Tensor | None
    num_features: int

    @property
    def batch_size(self) -> int:
        """B, the number of samples; 0 if there are no sparse features."""
        bags = self.ids_L.numel() if self.offsets is None else self.offsets.numel() - 1
        return bags // self.num_features if self.num_features else 0

    def ids(self, feature: int) -> Tensor:
        """Return ``ids_B`` of feature number ``feature``, which must have one id per sample."""
        bags = slice(feature * self.batch_size, (feature + 1) * self.batch_size)
        return self.ids_L[bags] if self.offsets is None else self.ids_L[self.offsets[bags]]

    def samples(self, start: int, stop: int) -> SparseFeatures:
        """Return the features of samples ``start : stop``."""
        size, offsets = self.batch_size, self.offsets
        if offsets is None:

            def select(values_L: Tensor) -> Tensor:
                return values_L.view(self.num_features, size)[:, start:stop].flatten()
        else:
            features = [offsets[k * size + start : k * size + stop + 1] for k in range(self.num_features)]
            bounds = [(int(each[0]), int(each[-1])) for each in features]
            lengths = torch.cat([each.diff() for each in features])
            offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])

            def select(values_L: Tensor) -> Tensor:
                return torch.cat([values_L[first:last] for first, last in bounds])

        weights_L = None if self.weights_L is None else select(self.weights_L)
        return SparseFeatures(select(self.ids_L), offsets, weights_L, self.num_features)


class Batch(NamedTuple):
    """One trainer's slice of the samples of a step.

    Attributes:
        dense_features: ``dense_BF``, float32.
        sparse_features: ids of the K sparse features for the same B samples.
        labels: ``labels_B``, float32; for several tasks ``labels_BT``. Binary labels are 0, 1 or
            probabilities; a class is its number, from 0.
        global_size: number of samples of all trainers in the step. The loss is the mean over all of them, so
            trainers may have slices of different sizes.
        weights: weight of each sample for each task, float32, in the shape of ``labels``; None for ones.
        total_weights: ``totals_T``, float64, sums of the weights over all trainers; ignored without weights.
        groups: ``groups_B``, int64, group of each sample; None without groups.
        total_ranking_weights: ``totals_T``, float64, sums over all trainers of the ranking weights
            (:func:`hybrid.primitives.grouping.ranking_weights`); None without a ranking loss. With a ranking
            loss, the samples of a group are adjacent, in one slice and in one micro-batch.
        local_size: number of samples without padding (:func:`padding_bounds`), set by ``BatchLoader``; 0 in
            other batches.
        event_time: largest event time of the samples, in seconds since 1970, or -inf if there is none;
            ``align_batches`` replaces it by the largest over the slices of all trainers.
        checksum: always 0. Only the batches of custom loops have a checksum (``LocalBatch``).
    """

    dense_features: Tensor
    sparse_features: SparseFeatures
    labels: Tensor
    global_size: int
    weights: Tensor | None = None
    total_weights: Tensor | None = None
    groups: Tensor | None = None
    total_ranking_weights: Tensor | None = None
    local_size: int = 0
    event_time: float = -math.inf
    checksum: int = 0

    @classmethod
    def empty(cls, num_dense: int, num_sparse: int) -> Batch:
        """Return a batch without samples, of F dense and K sparse features."""
        sparse = SparseFeatures(torch.empty(0, dtype=torch.int64), None, None, num_sparse)
        return cls(torch.empty(0, num_dense), sparse, torch.empty(0), 0)

    def feature_hashes(self, sequences: Iterable[int] = ()) -> Tensor:
        """Return ``hashes_B``, int64, a hash of all features of each sample.

        Two samples with different features have equal hashes with a probability of about 2**-64. The order of
        the ids of a feature changes the hash only if the feature is a sequence.

        Args:
            sequences: indices of the features that are sequences.
        """
        sparse, size = self.sparse_features, len(self.labels)
        if not size:
            return torch.empty(0, dtype=torch.int64)
        num_dense, num_sparse = self.dense_features.shape[1], sparse.num_features
        salts = splitmix64(np.arange(num_dense + num_sparse, dtype=np.uint64))  # one per column
        hashes_B = splitmix64(_bits(self.dense_features) ^ salts[:num_dense]).sum(axis=1)
        ids_L = sparse.ids_L.cpu().numpy().astype(np.uint64)
        offsets = np.arange(len(ids_L) + 1) if sparse.offsets is None else sparse.offsets.cpu().numpy()
        num_ids_K = np.diff(offsets[::size])
        hashes_L = splitmix64(ids_L ^ np.repeat(salts[num_dense:], num_ids_K))
        if sparse.weights_L is not None:
            hashes_L = splitmix64(hashes_L ^ _bits(sparse.weights_L))
        for k in sequences:
            starts = offsets[k * size : (k + 1) * size + 1]
            feature_ids = slice(starts[0], starts[-1])
            positions_L = np.arange(starts[0], starts[-1]) - np.repeat(starts[:-1], np.diff(starts))
            hashes_L[feature_ids] = splitmix64(hashes_L[feature_ids] + positions_L.astype(np.uint64))
        # The sums may overflow, but their differences are exact modulo 2**64.
        sums = np.concatenate([np.zeros(1, np.uint64), hashes_L.cumsum()])
        hashes_B += np.diff(sums[offsets]).reshape(num_sparse, size).sum(axis=0)
        return torch.from_numpy(hashes_B.view(np.int64))

    def split(self, count: int) -> list[Batch]:
        """Split the batch into ``count`` consecutive micro-batches, whose sizes differ by at most one sample.

        Micro-batches may be empty. With a ranking loss, groups are not split, so sizes may differ more.
        """
        if count == 1:
            return [self]
        groups_B = None if self.total_ranking_weights is None else self.groups
        ends_G = None if groups_B is None else group_ends(groups_B.cpu().numpy())
        return [
            self._replace(
                dense_features=self.dense_features[start:stop],
                sparse_features=self.sparse_features.samples(start, stop),
                labels=self.labels[start:stop],
                weights=None if self.weights is None else self.weights[start:stop],
                groups=None if self.groups is None else self.groups[start:stop],
            )
            for start, stop in (slice_bounds(len(self.labels), each, count, ends_G) for each in range(count))
        ]


def slice_bounds(
    size: int, index: int, count: int, ends_G: npt.NDArray[np.int64] | None = None
) -> tuple[int, int]:
    """Return start and stop of slice ``index`` if ``size`` items are cut into ``count`` slices.

    The sizes of slices differ by at most one. If ``ends_G`` has the ends of groups (:func:`group_ends`), no
    group is split. Sizes may then differ more, and slices may be empty.
    """
    small, larger = divmod(size, count)
    start = index * small + min(index, larger)
    stop = start + small + (index < larger)
    return (start, stop) if ends_G is None else group_bounds(ends_G, start, stop)


def padding_bounds(size: int, start: int, stop: int, min_size: int) -> tuple[int, int]:
    """Return start and stop of the samples that extend the slice ``start : stop`` to ``min_size`` samples.

    The added samples follow the slice, or precede it if too few of the batch's ``size`` samples follow.
    Custom loops add a sample to an empty slice, since a net may not accept a batch without samples.
    """
    missing = max(0, min(min_size, size) - (stop - start))
    first = stop if stop + missing <= size else max(0, start - missing)
    return first, first + missing


def _bits(numbers: Tensor) -> npt.NDArray[np.uint64]:
    """Convert numbers to float64, and return their bits, which are equal for 0.0 and -0.0."""
    return (numbers.detach().cpu().double().numpy() + 0.0).view(np.uint64)


def by_task(values: Tensor, num_tasks: int) -> Tensor:
    """Return labels or weights in shape (B, T). ``values`` may be (B,) if there is one task."""
    return values.view(len(values), num_tasks)


def split_outputs(outputs_BO: Tensor, num_outputs: Sequence[int]) -> Sequence[Tensor]:
    """Return the outputs of each task, ``outputs_B``, or ``outputs_BC`` for a task with C > 1 outputs."""
    if len(num_outputs) == 1:
        return [outputs_BO]
    return [
        outputs.squeeze(1) if outputs.shape[1] == 1 else outputs  # ONNX cannot squeeze other sizes
        for outputs in outputs_BO.split(list(num_outputs), dim=1)
    ]
