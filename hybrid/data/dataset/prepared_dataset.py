"""A prepared data set on disk: writing it, and gathering batches from it.

A folder holds ``manifest.json`` (dataset_manifest.py), ``features.json`` (feature_encoder.py),
``vocabularies.parquet`` (vocabulary_file.py) and one folder a split, of plain ``.npy`` files::

    dense.npy        float32 (N, F)
    ids.npy          int32 (N, K), the features of exactly one id a sample
    labels.npy       uint8 (N, T), or float32 where not all tasks are binary; absent where there are no labels
    weights.npy      float32 (N, T), absent where all samples count the same
    groups.npy       int64 (N,), absent where there are no groups
    group_rows.npy   int64 (N,), of training rows with groups: the rows by group (group_order.py)
    group_starts.npy int64 (G + 1,), where each group starts in group_rows
    source_rows.npy  int64 (N,), the row of the input each sample came from
    bag_K_ids.npy, bag_K_offsets.npy     int32 (L,) and int64 (N + 1,), of multi-hot feature K
    bag_K_weights.npy  float32 (L,), where the ids of feature K have weights
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybrid.batch import Batch, SparseFeatures
from hybrid.data.dataset.batch_tensors import sparse_features
from hybrid.data.dataset.dataset_manifest import FILE_NAME, DataManifest, DatasetReport
from hybrid.data.dataset.prefetch import Ahead, AtHand, StepRows
from hybrid.data.encode.sparse_encoding import Bags
from hybrid.errors import DataError
from hybrid.input_spec import InputSpec
from hybrid.primitives.grouping import order_totals


class PreparedDataset:
    """One split of a prepared data set, memory-mapped: any rows, in any order.

    Args:
        arrays: by their names.

    Attributes:
        folder: of a data set that was opened as one.
        input_spec: columns of the batches.
        report: sizes, labels, bad rows.
        group_rows: int64 (N,), the rows by group, as they lie in the file within each; None where they are
            not ordered so.
        group_starts: int64 (G + 1,), where each group starts in ``group_rows``.
    """

    folder: Path

    def __init__(
        self, arrays: Mapping[str, npt.NDArray[Any]], input_spec: InputSpec, report: DatasetReport
    ) -> None:
        self.input_spec = input_spec
        self.report = report
        self._arrays = arrays
        self._dense, self._ids = arrays["dense"], arrays["ids"]
        self._labels, self._weights, self._groups = map(arrays.get, ("labels", "weights", "groups"))
        self.group_rows, self.group_starts = map(arrays.get, ("group_rows", "group_starts"))
        self._bags = {
            k: (arrays[f"bag_{k}_ids"], arrays[f"bag_{k}_offsets"])
            for k, feature in enumerate(input_spec.sparse_features)
            if feature.multi_hot
        }
        self._id_weights = {
            k: arrays[f"bag_{k}_weights"]
            for k, feature in enumerate(input_spec.sparse_features)
            if feature.weighted
        }

    @classmethod
    def open(cls, folder: Path, split: str) -> PreparedDataset:
        """The split "train" or "test" of what ``prepare`` made.

        The size of each array, and a sample of its content, must be what was written.

        Raises:
            DataError: it is not whole, or altered.
        """
        try:
            manifest = DataManifest.read(folder / FILE_NAME)
            manifest.check(folder, split)
        except DataError as error:
            raise DataError(f"{error}; delete {folder} to prepare it anew") from error
        dataset = cls(map_arrays(folder / split), manifest.input_spec, manifest.splits[split])
        dataset.folder = folder
        return dataset

    @property
    def source_rows(self) -> npt.NDArray[np.int64]:
        """The 0-based row of the input that each sample came from, (N,)."""
        return self._arrays["source_rows"]

    def ahead(self, plan: Callable[[int], StepRows], steps: range, chunks_at_once: int) -> Ahead:
        """What says which rows ``steps`` have, once :meth:`gather` can read them.

        Args:
            plan: says which rows a step has, whether they can be read or not.
            chunks_at_once: see :class:`hybrid.data.dataset.sample_order.Order`.
        """
        return AtHand(plan)

    def close(self) -> None:
        """End what reads ahead in the background."""

    @property
    def num_samples(self) -> int:
        return self.report.num_rows

    @property
    def total_ids(self) -> Sequence[int]:
        """How many ids each multi-hot feature has in all samples."""
        return [len(ids_L) for ids_L, _ in self._bags.values()]

    @property
    def ids_per_sample(self) -> dict[str, float]:
        """Mean number of ids of each multi-hot feature; the others have exactly one."""
        names = [feature.name for feature in self.input_spec.sparse_features if feature.multi_hot]
        pairs = zip(names, self.total_ids, strict=True)
        return {name: total / max(1, self.num_samples) for name, total in pairs}

    @property
    def has_groups(self) -> bool:
        """Whether samples have groups."""
        return self._groups is not None

    def total_weights(self, rows: npt.NDArray[np.int64]) -> Tensor | None:
        """The sums of the weights of the samples ``rows`` by task; None where all samples count the same."""
        if self._weights is None:
            return None
        return torch.from_numpy(self._weights.take(rows, axis=0).sum(0, dtype=np.float64))

    def total_groups(self, rows: npt.NDArray[np.int64]) -> Tensor:
        """How much the groups of the samples ``rows``, which are whole, count by task."""
        assert self._labels is not None, "rows that are ordered by group have labels"
        assert self._groups is not None
        labels_BT = torch.from_numpy(self._labels.take(rows, axis=0))
        weights_BT = None if self._weights is None else torch.from_numpy(self._weights.take(rows, axis=0))
        return order_totals(labels_BT, weights_BT, torch.from_numpy(self._groups.take(rows)))

    def gather(
        self,
        rows: npt.NDArray[np.int64],
        global_size: int,
        total_weights: Tensor | None = None,
        total_groups: Tensor | None = None,
    ) -> Batch:
        """The samples ``rows`` (B,), in that order, as a share of a step of ``global_size`` samples.

        Without labels in the data set, ``labels_B`` is NaN, so that no one takes it for an answer.

        Args:
            total_weights: of all samples of the step; see :meth:`total_weights`.
            total_groups: of all of them, where a loss is of the order within groups.
        """
        labels = torch.full((len(rows),), torch.nan)
        if self._labels is not None:
            labels = _of_tasks(self._labels.take(rows, axis=0))
        return Batch(
            torch.from_numpy(self._dense.take(rows, axis=0)),
            self._gather_sparse(rows),
            labels,
            global_size,
            weights=None if self._weights is None else _of_tasks(self._weights.take(rows, axis=0)),
            total_weights=total_weights,
            groups=None if self._groups is None else torch.from_numpy(self._groups.take(rows)),
            total_groups=total_groups,
        )

    def _gather_sparse(self, rows: npt.NDArray[np.int64]) -> SparseFeatures:
        bags = []
        for k, (stored_L, offsets) in self._bags.items():
            positions_L, lengths_B = positions(offsets, rows)
            weights_L = self._id_weights[k][positions_L] if k in self._id_weights else None
            bags.append(Bags(stored_L[positions_L], lengths_B, weights_L))
        return sparse_features(self._ids.take(rows, axis=0), bags, self.input_spec.sparse_features)


def map_arrays(split: Path) -> dict[str, npt.NDArray[Any]]:
    """All arrays of a split, by their names."""
    # As plain ndarrays: slicing the memmap class costs more than the rows of a small batch.
    return {path.stem: np.asarray(np.load(path, mmap_mode="r")) for path in sorted(split.glob("*.npy"))}


def positions(
    offsets: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Where what is in the bags ``rows`` lies, one bag after the other, and the length of each.

    Args:
        offsets: where each bag starts, and where the last one ends.
    """
    starts_B = offsets[rows]
    lengths_B = offsets[rows + 1] - starts_B
    before_B = np.cumsum(lengths_B) - lengths_B
    return np.repeat(starts_B - before_B, lengths_B) + np.arange(lengths_B.sum()), lengths_B


def _of_tasks(values_BT: npt.NDArray[Any]) -> Tensor:
    """A column for each task as float32; a vector of one task."""
    values = torch.from_numpy(values_BT.astype(np.float32, copy=False))
    return values[:, 0] if values.size(1) == 1 else values
