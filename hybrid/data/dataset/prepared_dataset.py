"""A prepared data set on disk, and batches of its rows.

A folder holds ``manifest.json`` (dataset_manifest.py), ``features.json`` (feature_encoder.py),
``vocabularies.parquet`` (vocabulary.py), and a folder for each split, of plain ``.npy`` files::

    dense.npy        float32 (N, F)
    ids.npy          int32 (N, K), the features with exactly one id per sample
    labels.npy       uint8 (N, T), or float32 unless all tasks are binary
    weights.npy      float32 (N, T), absent if all samples have the same weight
    groups.npy       int64 (N,), absent without groups
    group_rows.npy   int64 (N,), of training rows with groups: the rows by group (batch_loader.py)
    group_starts.npy int64 (G + 1,), the start of each group in group_rows
    source_rows.npy  int64 (N,), the input row of each sample
    bag_K_ids.npy, bag_K_offsets.npy     int32 (L,) and int64 (N + 1,), of multi-hot feature K
    bag_K_weights.npy  float32 (L,), if the ids of feature K have weights
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybrid.batch import Batch, SparseFeatures
from hybrid.data.dataset.dataset_manifest import FILE_NAME, DataManifest, DatasetReport
from hybrid.data.dataset.sample_order import positions
from hybrid.data.encode.feature_encoder import EncodedBags, EncodedBlock
from hybrid.data.values.model_columns import Targets
from hybrid.errors import DataError
from hybrid.input_spec import FeatureSpec, InputSpec
from hybrid.primitives.grouping import ranking_totals
from hybrid.storage.file_formats import map_array

_TYPES: dict[str, tuple[npt.DTypeLike, ...]] = {  # of arrays; int64 for those that are not here
    "labels": (np.uint8, np.float32),
    **dict.fromkeys(("dense", "weights"), (np.float32,)),
    "ids": (np.int32,),
}


class StepRows(NamedTuple):
    """The rows of a step; a trainer's slice is from ``start`` to ``stop``, and has ``padding`` after it."""

    rows: npt.NDArray[np.int64]
    start: int
    stop: int
    padding: tuple[int, int] = (0, 0)

    @property
    def local(self) -> npt.NDArray[np.int64]:
        first, last = self.padding
        local = self.rows[self.start : self.stop]
        return np.concatenate([local, self.rows[first:last]]) if first < last else local


class PreparedDataset:
    """A memory-mapped split of a prepared data set, whose rows can be read in any order.

    Attributes:
        folder: the folder of the data set on this machine.
        group_rows: int64 (N,), the rows by group, in file order within each; None without this order.
        group_starts: int64 (G + 1,), the start of each group in ``group_rows``.
        source_rows: int64 (N,), the 0-based input row of each sample.
    """

    def __init__(
        self,
        folder: Path,
        arrays: Mapping[str, npt.NDArray[Any]],
        input_spec: InputSpec,
        report: DatasetReport,
    ) -> None:
        self.folder = folder
        self.input_spec = input_spec
        self.report = report
        self._dense, self._ids, self.source_rows = arrays["dense"], arrays["ids"], arrays["source_rows"]
        self._labels = arrays["labels"]
        self._weights, self._groups = arrays.get("weights"), arrays.get("groups")
        self.group_rows, self.group_starts = arrays.get("group_rows"), arrays.get("group_starts")
        self._bags = {  # of each multi-hot feature, its ids, offsets and weights
            k: (arrays[f"bag_{k}_ids"], arrays[f"bag_{k}_offsets"], arrays.get(f"bag_{k}_weights"))
            for k, feature in enumerate(input_spec.sparse_features)
            if feature.multi_hot
        }

    @classmethod
    def open(cls, folder: Path, split: str) -> PreparedDataset:
        """Open the split "train", "validation" or "test" of a folder that ``prepare`` wrote.

        DataError if the size, or a sample of the content, of an array differs from the manifest.
        """
        try:
            manifest = DataManifest.read(folder / FILE_NAME)
            manifest.check(folder, split)
            arrays = map_arrays(folder, manifest, split)
        except DataError as error:
            raise DataError(f"{error}; delete {folder} to prepare it again") from error
        return cls(folder, arrays, manifest.input_spec, manifest.splits[split])

    @property
    def num_samples(self) -> int:
        return self.report.num_rows

    @property
    def ids_per_sample(self) -> dict[str, float]:
        """The mean number of ids of each multi-hot feature; the others have exactly one."""
        names = [feature.name for feature in self.input_spec.sparse_features if feature.multi_hot]
        pairs = zip(names, self._bags.values(), strict=True)
        return {name: len(ids_L) / max(1, self.num_samples) for name, (ids_L, *_) in pairs}

    @property
    def has_groups(self) -> bool:
        return self._groups is not None

    def total_weights(self, rows: npt.NDArray[np.int64]) -> Tensor | None:
        """Return the sums of the weights of ``rows`` by task; None if all samples have the same weight."""
        if self._weights is None:
            return None
        return torch.from_numpy(self._weights.take(rows, axis=0).sum(0, dtype=np.float64))

    def total_groups(self, rows: npt.NDArray[np.int64]) -> Tensor:
        """Return the total weights of the groups of ``rows`` by task; the groups must be complete."""
        assert self._groups is not None
        labels_BT = torch.from_numpy(self._labels.take(rows, axis=0))
        weights_BT = None if self._weights is None else torch.from_numpy(self._weights.take(rows, axis=0))
        return ranking_totals(labels_BT, weights_BT, torch.from_numpy(self._groups.take(rows)))

    def gather(
        self,
        rows: npt.NDArray[np.int64],
        global_size: int,
        total_weights: Tensor | None = None,
        total_groups: Tensor | None = None,
    ) -> Batch:
        """Return the samples ``rows`` (B,), in that order, as a slice of a step of ``global_size`` samples.

        Args:
            total_weights: :meth:`total_weights` of all samples of the step.
            total_groups: :meth:`total_groups` of all samples of the step, for ranking losses.
        """
        bags = []
        for ids_L, offsets, weights_L in self._bags.values():
            positions_L, lengths_B = positions(offsets, rows)
            weights = None if weights_L is None else weights_L[positions_L]
            bags.append(EncodedBags(ids_L[positions_L], lengths_B, weights))
        block = EncodedBlock(self._dense.take(rows, axis=0), self._ids.take(rows, axis=0), tuple(bags))
        weights_BT = None if self._weights is None else self._weights.take(rows, axis=0)
        groups_B = None if self._groups is None else self._groups.take(rows)
        targets = Targets(self._labels.take(rows, axis=0), weights_BT, groups_B)
        batch = block_batch(block, self.input_spec, targets)
        return batch._replace(global_size=global_size, total_weights=total_weights, total_groups=total_groups)


def map_arrays(folder: Path, manifest: DataManifest, split: str) -> dict[str, npt.NDArray[Any]]:
    """Map all arrays of a split into memory, by their names.

    Raises:
        DataError: an array is missing, cannot be read, or has another type or length than a prepared one.
    """
    arrays, num_rows = {}, manifest.splits[split].num_rows
    features = enumerate(manifest.input_spec.sparse_features)
    of_bags = [f"bag_{k}_{kind}" for k, each in features if each.multi_hot for kind in ("ids", "offsets")]
    required = {"dense", "ids", "labels", "source_rows", *of_bags}
    listed = {Path(name).stem for name in manifest.stored if name.startswith(f"{split}/")}
    for name in sorted(required | listed):  # the ids of a bag precede its offsets and weights
        bag, _, kind = name.rpartition("_") if name.startswith("bag_") else ("", "", name)
        try:
            array = arrays[name] = map_array(folder / split / f"{name}.npy", folder)
            num_items = len(arrays[f"{bag}_ids"]) if bag else num_rows
            lengths = {"group_starts": len(array), "offsets": num_rows + 1}
            if len(array) != lengths.get(kind, num_items):
                raise ValueError(f"its length is {len(array)}")
            if array.dtype not in _TYPES.get(kind, (np.int64,)):
                raise ValueError(f"its type is {array.dtype}")
            if kind == "offsets" and [array[0], array[-1]] != [0, num_items]:
                raise ValueError(f"its ends are {array[0]} and {array[-1]}")
        except (OSError, ValueError, KeyError, TypeError) as error:
            path = folder / split / f"{name}.npy"
            raise DataError(f"{path}: is not an array of prepared data: {error}") from error
    return arrays


def _by_task(values_BT: npt.NDArray[Any]) -> Tensor:
    """Return a float32 column for each task; a vector for one task."""
    return torch.from_numpy(values_BT.astype(np.float32, copy=False)).squeeze(1)


def sparse_features(
    ids_BK: npt.NDArray[np.int32], bags: Sequence[EncodedBags], features: Sequence[FeatureSpec]
) -> SparseFeatures:
    """Return the ids of B samples, feature-major; for ``ids_BK`` and ``bags`` see EncodedBlock."""
    ids_KB = ids_BK.T.astype(np.int64, order="C")
    if not bags:
        return SparseFeatures(torch.from_numpy(ids_KB.reshape(-1)), None, None, len(features))
    is_weighted = any(feature.weighted for feature in features)
    one_id, multi_hot = iter(ids_KB), iter(bags)
    ids, weights, lengths = [], [], [np.zeros(1, np.int64)]
    for feature in features:
        given_L = None
        if feature.multi_hot:
            ids_L, lengths_B, given_L = next(multi_hot)
            ids.append(ids_L.astype(np.int64))
        else:
            lengths_B = np.ones(len(ids_BK), np.int64)
            ids.append(next(one_id))
        lengths.append(lengths_B)
        if is_weighted:
            weights.append(np.ones(len(ids[-1]), np.float32) if given_L is None else given_L)
    weights_L = torch.from_numpy(np.concatenate(weights)) if weights else None
    ends = torch.from_numpy(np.cumsum(np.concatenate(lengths)))
    return SparseFeatures(torch.from_numpy(np.concatenate(ids)), ends, weights_L, len(features))


def block_batch(block: EncodedBlock, spec: InputSpec, targets: Targets | None = None) -> Batch:
    """Return all samples of a block; without targets, labels are NaN."""
    size = len(block.dense_BF)
    labels_BT, weights_BT, groups_B = targets or Targets(np.full((size, 1), np.nan, np.float32))
    return Batch(
        torch.from_numpy(block.dense_BF),
        sparse_features(block.ids_BK, block.bags, spec.sparse_features),
        _by_task(labels_BT),
        size,
        weights=None if weights_BT is None else _by_task(weights_BT),
        groups=None if groups_B is None else torch.from_numpy(groups_B),
    )
