"""A writer of the arrays of a split, as prepared_dataset.py lists them."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hybrid.config import TaskSection
from hybrid.data.dataset.dataset_manifest import NO_INVALID_ROWS, DatasetReport, LabelReport
from hybrid.data.encode.feature_encoder import EncodedBlock
from hybrid.data.values.targets import Targets, TargetSpec
from hybrid.input_spec import InputSpec


class SplitPosition(NamedTuple):
    """A position in the arrays of a split: the samples before it, and the values of each sparse column."""

    row: int
    values_K: npt.NDArray[np.int64]


class _ArrayWriter:
    """A segment of a ``.npy`` file, written from its first row on.

    Args:
        row: its first row.
        is_end: whether the array ends with it; the shape is written then.
    """

    def __init__(
        self, path: Path, dtype: npt.DTypeLike, row_shape: tuple[int, ...], row: int, *, is_end: bool
    ) -> None:
        self._dtype = np.dtype(dtype)
        self._row_shape = row_shape
        self._num_rows = row
        self._is_end = is_end
        self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+b")
        self._file.seek(len(self._header()) + row * self._dtype.itemsize * math.prod(row_shape))

    def append(self, rows: npt.NDArray[Any]) -> None:
        self._file.write(np.ascontiguousarray(rows, self._dtype).data)
        self._num_rows += len(rows)

    def close(self) -> None:
        if self._is_end:
            self._file.seek(0)
            self._file.write(self._header())
        self._file.close()

    def _header(self) -> bytes:
        """Return the header; numpy pads it to the same length for any number of rows."""
        header = BytesIO()
        shape = (self._num_rows, *self._row_shape)
        fields = {"descr": self._dtype.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(header, fields)
        return header.getvalue()


class LabelSums(NamedTuple):
    """Sums of the labels of T tasks, over the samples of a block that count for each task."""

    counts_T: npt.NDArray[np.int64]
    sums_T: npt.NDArray[np.float64]
    lowest_T: npt.NDArray[np.float64]
    highest_T: npt.NDArray[np.float64]

    @classmethod
    def of(cls, targets: Targets) -> LabelSums:
        """Sum the labels of B samples."""
        labels_BT = targets.labels_BT.astype(np.float64)
        counts_BT = np.ones(labels_BT.shape, np.bool_)
        if targets.weights_BT is not None:
            counts_BT = targets.weights_BT > 0
        return cls(
            counts_BT.sum(0),
            np.where(counts_BT, labels_BT, 0).sum(0),
            np.where(counts_BT, labels_BT, np.inf).min(0, initial=np.inf),
            np.where(counts_BT, labels_BT, -np.inf).max(0, initial=-np.inf),
        )


def label_reports(tasks: Mapping[str, TaskSection], blocks: Sequence[LabelSums]) -> tuple[LabelReport, ...]:
    """Return the report of the labels of each task, from the sums of all blocks."""
    counts_T, sums_T, lowest_T, highest_T = LabelSums.of(Targets(np.empty((0, len(tasks)), np.float32)))
    for block in blocks:
        counts_T += block.counts_T
        sums_T += block.sums_T
        lowest_T = np.minimum(lowest_T, block.lowest_T)
        highest_T = np.maximum(highest_T, block.highest_T)
    reports = []
    for t, (name, task) in enumerate(tasks.items()):
        count = int(counts_T[t])
        known = (sums_T[t] / count, lowest_T[t], highest_T[t]) if count else ()
        reports.append(LabelReport(name, task.kind, count, *map(float, known)))
    return tuple(reports)


class SplitWriter:
    """Writes a split of a prepared data set, or a segment of it, block by block; close it.

    Args:
        targets: labels, weights and groups; None if there are none.
        start: of the segment; by default that of the split.
        is_end: whether the split ends with the segment; the lengths of the arrays are written then.

    Attributes:
        label_sums: of each block.
    """

    def __init__(
        self,
        folder: Path,
        spec: InputSpec,
        targets: TargetSpec | None,
        start: SplitPosition | None = None,
        *,
        is_end: bool = True,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        features = spec.sparse_features
        multi_hot = [k for k, feature in enumerate(features) if feature.multi_hot]
        self._targets = targets
        self._num_rows = first = 0 if start is None else start.row
        self._bag_ends = {k: 0 if start is None else int(start.values_K[k]) for k in multi_hot}
        self._arrays: dict[str, _ArrayWriter] = {}
        self._files = ExitStack()
        self.label_sums: list[LabelSums] = []

        def create(name: str, row: int, dtype: npt.DTypeLike, *row_shape: int) -> None:
            array = _ArrayWriter(folder / f"{name}.npy", dtype, row_shape, row, is_end=is_end)
            self._files.callback(array.close)
            self._arrays[name] = array

        create("dense", first, np.float32, len(spec.dense_features))
        create("ids", first, np.int32, len(features) - len(multi_hot))
        create("source_rows", first, np.int64)
        if targets is not None:
            create("labels", first, np.uint8 if targets.is_binary else np.float32, len(targets.tasks))
            if targets.has_weights:
                create("weights", first, np.float32, len(targets.tasks))
            if targets.has_groups:
                create("groups", first, np.int64)
        for k, end in self._bag_ends.items():
            create(f"bag_{k}_offsets", first, np.int64)
            self._arrays[f"bag_{k}_offsets"].append(np.array([end]))
            create(f"bag_{k}_ids", end, np.int32)
            if features[k].weighted:
                create(f"bag_{k}_weights", end, np.float32)

    def append(
        self, block: EncodedBlock, targets: Targets | None, source_rows_B: npt.NDArray[np.int64]
    ) -> None:
        """Add B samples."""
        rows: dict[str, Any] = {"dense": block.dense_BF, "ids": block.ids_BK, "source_rows": source_rows_B}
        if self._targets is not None:
            assert targets is not None
            rows |= {"labels": targets.labels_BT, "weights": targets.weights_BT, "groups": targets.groups_B}
            self.label_sums.append(LabelSums.of(targets))
        for (k, end), bag in zip(self._bag_ends.items(), block.bags, strict=True):
            rows[f"bag_{k}_offsets"] = end + np.cumsum(bag.lengths_B)
            rows[f"bag_{k}_ids"], rows[f"bag_{k}_weights"] = bag.ids_L, bag.weights_L
            self._bag_ends[k] += len(bag.ids_L)
        for name, array in self._arrays.items():
            array.append(rows[name])
        self._num_rows += len(source_rows_B)

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def report(self) -> DatasetReport:
        """Return the report of the rows."""
        labels = () if self._targets is None else label_reports(self._targets.tasks, self.label_sums)
        return DatasetReport(self._num_rows, labels, NO_INVALID_ROWS)
