"""Encoded samples as the tensors of a batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from hybrid.batch import Batch, SparseFeatures
from hybrid.data.encode.feature_encoder import EncodedBlock
from hybrid.data.encode.sparse_encoding import Bags
from hybrid.input_spec import FeatureSpec, InputSpec


def sparse_features(
    ids_BK: npt.NDArray[np.int32], bags: Sequence[Bags], features: Sequence[FeatureSpec]
) -> SparseFeatures:
    """The ids of B samples, feature-major.

    Args:
        ids_BK, bags: of the features of one id a sample, and of the multi-hot ones, as in EncodedBlock.
    """
    ids_KB = ids_BK.T.astype(np.int64, order="C")
    if not bags:
        return SparseFeatures(torch.from_numpy(ids_KB.reshape(-1)), None, None, len(features))
    is_weighted = any(feature.weighted for feature in features)
    one_id, multi_hot = iter(ids_KB), iter(bags)
    ids, weights, lengths = [], [], [np.zeros(1, np.int64)]
    for feature in features:
        own_L = None
        if feature.multi_hot:
            ids_L, lengths_B, own_L = next(multi_hot)
            ids.append(ids_L.astype(np.int64))
        else:
            lengths_B = np.ones(len(ids_BK), np.int64)
            ids.append(next(one_id))
        lengths.append(lengths_B)
        if is_weighted:
            weights.append(np.ones(len(ids[-1]), np.float32) if own_L is None else own_L)
    weights_L = torch.from_numpy(np.concatenate(weights)) if weights else None
    ends = torch.from_numpy(np.cumsum(np.concatenate(lengths)))
    return SparseFeatures(torch.from_numpy(np.concatenate(ids)), ends, weights_L, len(features))


def unlabelled_batch(block: EncodedBlock, spec: InputSpec) -> Batch:
    """All samples of a block; their labels are NaN, so that no one takes them for an answer."""
    size = len(block.dense_BF)
    return Batch(
        torch.from_numpy(block.dense_BF),
        sparse_features(block.ids_BK, block.bags, spec.sparse_features),
        torch.full((size,), torch.nan),
        size,
    )
