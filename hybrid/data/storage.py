"""A prepared data set on disk: writing it, and gathering batches from it.

A folder holds ``manifest.json`` (hybrid/data/manifest.py), ``features.json`` (hybrid/data/encode.py) and one
folder a split, of plain ``.npy`` files::

    dense.npy        float32 (N, F)
    ids.npy          int32 (N, K), the features of exactly one id a sample
    labels.npy       uint8 (N, T), or float32 where not all tasks are binary; absent where there are no labels
    weights.npy      float32 (N, T), absent where all samples count the same
    groups.npy       int64 (N,), absent where there are no groups
    source_rows.npy  int64 (N,), the row of the input each sample came from
    bag_K_ids.npy, bag_K_offsets.npy     int32 (L,) and int64 (N + 1,), of multi-hot feature K
    bag_K_weights.npy  float32 (L,), where the ids of feature K have weights
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybrid.batch import Batch, SparseFeatures
from hybrid.data.bad_rows import BadRowReport
from hybrid.data.encode import EncodedBlock
from hybrid.data.manifest import FILE_NAME, NO_BAD_ROWS, DataManifest, DatasetReport, LabelReport
from hybrid.data.targets import Targets, TargetSpec
from hybrid.data.unknown import UnknownValues
from hybrid.errors import DataError
from hybrid.input_spec import InputSpec


class _GrowingArray:
    """A ``.npy`` file that grows along its first axis; its final shape is written when it is closed."""

    def __init__(self, path: Path, dtype: npt.DTypeLike, row_shape: tuple[int, ...] = ()) -> None:
        self._file = path.open("wb")
        self._dtype = np.dtype(dtype)
        self._row_shape = row_shape
        self._num_rows = 0
        self._write_header()

    def append(self, rows: npt.NDArray[Any]) -> None:
        self._file.write(np.ascontiguousarray(rows, self._dtype).data)
        self._num_rows += len(rows)

    def close(self) -> None:
        self._file.seek(0)
        self._write_header()  # numpy pads headers so that the first axis can grow in place
        self._file.close()

    def _write_header(self) -> None:
        shape = (self._num_rows, *self._row_shape)
        header = {"descr": self._dtype.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self._file, header)


class SplitWriter:
    """Writes one split of a prepared data set, block by block; to be closed.

    Args:
        targets: which labels, weights and groups there are; None where there are none.
    """

    def __init__(self, folder: Path, spec: InputSpec, targets: TargetSpec | None) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self._files = ExitStack()
        self._num_rows = 0
        self._targets = None if targets is None else _TargetWriter(targets, self._array)
        features = spec.sparse_features
        self._dense = self._array("dense", np.float32, len(spec.dense_features))
        self._ids = self._array("ids", np.int32, sum(not feature.multi_hot for feature in features))
        self._source_rows = self._array("source_rows", np.int64)
        multi_hot = [k for k, feature in enumerate(features) if feature.multi_hot]
        self._bag_ids = [self._array(f"bag_{k}_ids", np.int32) for k in multi_hot]
        self._bag_offsets = [self._array(f"bag_{k}_offsets", np.int64) for k in multi_hot]
        self._bag_weights = [
            self._array(f"bag_{k}_weights", np.float32) if features[k].weighted else None for k in multi_hot
        ]
        self._bag_ends = [0] * len(multi_hot)
        for offsets in self._bag_offsets:
            offsets.append(np.zeros(1, np.int64))

    def append(
        self,
        block: EncodedBlock,
        targets: Targets | None,
        source_rows_B: npt.NDArray[np.int64],
    ) -> None:
        """Add B samples."""
        self._dense.append(block.dense_BF)
        self._ids.append(block.ids_BK)
        self._source_rows.append(source_rows_B)
        self._num_rows += len(source_rows_B)
        if self._targets is not None:
            assert targets is not None
            self._targets.append(targets)
        for i, bag in enumerate(block.bags):
            self._bag_ids[i].append(bag.ids_L)
            if (weights := self._bag_weights[i]) is not None:
                assert bag.weights_L is not None
                weights.append(bag.weights_L)
            self._bag_offsets[i].append(self._bag_ends[i] + np.cumsum(bag.lengths_B))
            self._bag_ends[i] += len(bag.ids_L)

    def close(self) -> None:
        """Write how long the arrays have become."""
        self._files.close()

    def report(
        self, bad_rows: BadRowReport = NO_BAD_ROWS, unknown: tuple[UnknownValues, ...] = ()
    ) -> DatasetReport:
        """What was written, with what else is known of the split."""
        labels = () if self._targets is None else self._targets.report()
        return DatasetReport(self._num_rows, labels, bad_rows, unknown)

    def _array(self, name: str, dtype: npt.DTypeLike, *row_shape: int) -> _GrowingArray:
        array = _GrowingArray(self._folder / f"{name}.npy", dtype, row_shape)
        self._files.callback(array.close)
        return array


class _TargetWriter:
    """Writes the labels, weights and groups of a split, and sums up the labels.

    Args:
        make_array: makes an array of a name, type and shape of a row.
    """

    def __init__(self, spec: TargetSpec, make_array: Callable[..., _GrowingArray]) -> None:
        self._tasks = spec.tasks
        size = len(spec.tasks)
        self._labels = make_array("labels", np.uint8 if spec.is_binary else np.float32, size)
        self._weights = make_array("weights", np.float32, size) if spec.has_weights else None
        self._groups = make_array("groups", np.int64) if spec.has_groups else None
        self._counts_T = np.zeros(size, np.int64)
        self._sums_T = np.zeros(size)
        self._lowest_T, self._highest_T = np.full(size, np.inf), np.full(size, -np.inf)

    def append(self, targets: Targets) -> None:
        """Add those of B samples."""
        self._labels.append(targets.labels_BT)
        counts_BT = np.ones(targets.labels_BT.shape, np.bool_)
        if self._weights is not None:
            assert targets.weights_BT is not None
            self._weights.append(targets.weights_BT)
            counts_BT = targets.weights_BT > 0
        if self._groups is not None:
            assert targets.groups_B is not None
            self._groups.append(targets.groups_B)
        labels_BT = targets.labels_BT.astype(np.float64)
        self._counts_T += counts_BT.sum(0)
        self._sums_T += np.where(counts_BT, labels_BT, 0).sum(0)
        if len(labels_BT):
            self._lowest_T = np.minimum(self._lowest_T, np.where(counts_BT, labels_BT, np.inf).min(0))
            self._highest_T = np.maximum(self._highest_T, np.where(counts_BT, labels_BT, -np.inf).max(0))

    def report(self) -> tuple[LabelReport, ...]:
        """What the labels of each task are."""
        reports = []
        for t, (name, task) in enumerate(self._tasks.items()):
            count = int(self._counts_T[t])
            known = (self._sums_T[t] / count, self._lowest_T[t], self._highest_T[t]) if count else ()
            reports.append(LabelReport(name, task.kind, count, *map(float, known)))
        return tuple(reports)


class PreparedDataset:
    """One split of a prepared data set, memory-mapped: any rows, in any order.

    Attributes:
        input_spec: columns of the batches.
        report: sizes, labels, bad rows.
        source_rows: int64 (N,), 0-based row of the input each sample came from.
    """

    def __init__(self, folder: Path, split: str, input_spec: InputSpec, report: DatasetReport) -> None:
        self.folder = folder
        self.input_spec = input_spec
        self.report = report
        self._split = folder / split
        self._dense = self._map("dense")
        self._ids = self._map("ids")
        self._labels, self._weights, self._groups = map(self._map_if_there, ("labels", "weights", "groups"))
        self.source_rows: npt.NDArray[np.int64] = self._map("source_rows")
        self._bags = {
            k: (self._map(f"bag_{k}_ids"), self._map(f"bag_{k}_offsets"))
            for k, feature in enumerate(input_spec.sparse_features)
            if feature.multi_hot
        }
        self._id_weights = {
            k: self._map(f"bag_{k}_weights")
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
        return cls(folder, split, manifest.input_spec, manifest.splits[split])

    @property
    def num_samples(self) -> int:
        return self.report.num_rows

    @property
    def ids_per_sample(self) -> dict[str, float]:
        """Mean number of ids of each multi-hot feature; the others have exactly one."""
        names = [feature.name for feature in self.input_spec.sparse_features]
        return {names[k]: len(ids_L) / max(1, self.num_samples) for k, (ids_L, _) in self._bags.items()}

    @property
    def has_groups(self) -> bool:
        """Whether samples have groups."""
        return self._groups is not None

    def total_weights(self, rows: npt.NDArray[np.int64]) -> Tensor | None:
        """The sums of the weights of the samples ``rows`` by task; None where all samples count the same."""
        if self._weights is None:
            return None
        return torch.from_numpy(self._weights.take(rows, axis=0).sum(0, dtype=np.float64))

    def gather(
        self, rows: npt.NDArray[np.int64], global_size: int, total_weights: Tensor | None = None
    ) -> Batch:
        """The samples ``rows`` (B,), in that order, as a share of a step of ``global_size`` samples.

        Without labels in the data set, ``labels_B`` is NaN, so that no one takes it for an answer.

        Args:
            total_weights: of all samples of the step; see :meth:`total_weights`.
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
        )

    def _gather_sparse(self, rows: npt.NDArray[np.int64]) -> SparseFeatures:
        num_features = len(self.input_spec.sparse_features)
        ids_KB = self._ids.take(rows, axis=0).T.astype(np.int64, order="C")
        if not self._bags:
            return SparseFeatures(torch.from_numpy(ids_KB.reshape(-1)), None, None, num_features)
        one_id = iter(ids_KB)
        ids, weights, lengths = [], [], [np.zeros(1, np.int64)]
        for k in range(num_features):
            if k in self._bags:
                stored_L, offsets = self._bags[k]
                positions_L, lengths_B = _positions(offsets, rows)
                ids_L = stored_L[positions_L].astype(np.int64)
            else:
                ids_L, lengths_B = next(one_id), np.ones(len(rows), np.int64)
            ids.append(ids_L)
            lengths.append(lengths_B)
            if k in self._id_weights:
                weights.append(self._id_weights[k][positions_L])
            elif self._id_weights:
                weights.append(np.ones(len(ids_L), np.float32))
        weights_L = torch.from_numpy(np.concatenate(weights)) if weights else None
        ends = torch.from_numpy(np.cumsum(np.concatenate(lengths)))
        return SparseFeatures(torch.from_numpy(np.concatenate(ids)), ends, weights_L, num_features)

    def _map_if_there(self, name: str) -> npt.NDArray[Any] | None:
        return self._map(name) if (self._split / f"{name}.npy").exists() else None

    def _map(self, name: str) -> npt.NDArray[Any]:
        # As a plain ndarray: slicing the memmap class costs more than the rows of a small batch.
        return np.asarray(np.load(self._split / f"{name}.npy", mmap_mode="r"))


def _positions(
    offsets: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Where the ids of the bags ``rows`` lie, one bag after the other, and the length of each."""
    starts_B = offsets[rows]
    lengths_B = offsets[rows + 1] - starts_B
    before_B = np.cumsum(lengths_B) - lengths_B
    return np.repeat(starts_B - before_B, lengths_B) + np.arange(lengths_B.sum()), lengths_B


def _of_tasks(values_BT: npt.NDArray[Any]) -> Tensor:
    """A column for each task as float32; a vector of one task."""
    values = torch.from_numpy(values_BT.astype(np.float32, copy=False))
    return values[:, 0] if values.size(1) == 1 else values
