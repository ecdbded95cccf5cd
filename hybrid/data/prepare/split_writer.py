"""Creation of the arrays of a split (see prepared_dataset.py), and writing of samples into them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hybrid.config import TaskSection
from hybrid.data.dataset.dataset_manifest import LabelReport
from hybrid.data.dataset.sample_order import positions
from hybrid.data.encode.feature_encoder import EncodedBlock
from hybrid.data.values.model_columns import Targets, TargetSpec
from hybrid.input_spec import InputSpec


class SplitPosition(NamedTuple):
    """A position in the arrays of a split: numbers of samples and of values per sparse column before it."""

    row: int
    values_K: npt.NDArray[np.int64]


class LabelSums(NamedTuple):
    """Sums of the labels of T tasks, over the samples of a block that count for each task."""

    counts_T: npt.NDArray[np.int64]
    sums_T: npt.NDArray[np.float64]
    lowest_T: npt.NDArray[np.float64]
    highest_T: npt.NDArray[np.float64]

    @classmethod
    def of(cls, targets: Targets) -> LabelSums:
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


def create_arrays(folder: Path, spec: InputSpec, targets: TargetSpec, end: SplitPosition) -> None:
    """Create the arrays of a split, whose last sample is before ``end``."""
    folder.mkdir(parents=True, exist_ok=True)
    features = spec.sparse_features
    multi_hot = [k for k, feature in enumerate(features) if feature.multi_hot]

    def create(name: str, num_rows: int, dtype: npt.DTypeLike, *row_shape: int) -> None:
        path = folder / f"{name}.npy"
        np.lib.format.open_memmap(path, "w+", dtype, (num_rows, *row_shape))
        # If the disk is full, this fails; a write to a mapped array would kill the process.
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)

    create("dense", end.row, np.float32, len(spec.dense_features))
    create("ids", end.row, np.int32, len(features) - len(multi_hot))
    create("source_rows", end.row, np.int64)
    is_binary = all(task.kind == "binary" for task in targets.tasks.values())
    create("labels", end.row, np.uint8 if is_binary else np.float32, len(targets.tasks))
    if targets.has_weights:
        create("weights", end.row, np.float32, len(targets.tasks))
    if targets.data.group:
        create("groups", end.row, np.int64)
    for k in multi_hot:
        create(f"bag_{k}_offsets", end.row + 1, np.int64)
        create(f"bag_{k}_ids", int(end.values_K[k]), np.int32)
        if features[k].weighted:
            create(f"bag_{k}_weights", int(end.values_K[k]), np.float32)


class SplitWriter:
    """Writes samples into the arrays of a split from ``start`` on; ``label_sums`` has the sums by block."""

    def __init__(self, folder: Path, spec: InputSpec, start: SplitPosition) -> None:
        self._arrays = {path.stem: np.load(path, mmap_mode="r+") for path in folder.glob("*.npy")}
        self._row = start.row
        multi_hot = [k for k, feature in enumerate(spec.sparse_features) if feature.multi_hot]
        self._bag_ends = {k: int(start.values_K[k]) for k in multi_hot}
        self.label_sums: list[LabelSums] = []

    def append(self, block: EncodedBlock, targets: Targets, source_rows_B: npt.NDArray[np.int64]) -> None:
        self._put(self._row, dense=block.dense_BF, ids=block.ids_BK, source_rows=source_rows_B)
        self._put(self._row, labels=targets.labels_BT, weights=targets.weights_BT, groups=targets.groups_B)
        for (k, end), bag in zip(self._bag_ends.items(), block.bags, strict=True):
            self._put(self._row + 1, **{f"bag_{k}_offsets": end + np.cumsum(bag.lengths_B)})
            self._put(end, **{f"bag_{k}_ids": bag.ids_L, f"bag_{k}_weights": bag.weights_L})
            self._bag_ends[k] += len(bag.ids_L)
        self._row += len(source_rows_B)
        self.label_sums.append(LabelSums.of(targets))

    def _put(self, start: int, **arrays: npt.NDArray[Any] | None) -> None:
        """Write the next rows of some arrays; None for those that the split lacks."""
        for name, rows in arrays.items():
            if rows is not None:
                self._arrays[name][start : start + len(rows)] = rows


def write_group_order(split: Path) -> None:
    """Write the rows of a complete split by group, if they have groups; takes about 40 bytes per row."""
    if not (split / "groups.npy").exists():
        return
    groups_N = np.load(split / "groups.npy", mmap_mode="r")
    order_N = groups_N.argsort(kind="stable")
    sorted_N = groups_N[order_N]
    starts_G1 = np.append(np.flatnonzero(np.diff(sorted_N, prepend=sorted_N[:1] - 1)), len(sorted_N))
    rows_N, sizes_G = positions(starts_G1, order_N[starts_G1[:-1]].argsort())
    np.save(split / "group_rows.npy", order_N[rows_N])
    np.save(split / "group_starts.npy", np.concatenate([[0], sizes_G.cumsum()]))
