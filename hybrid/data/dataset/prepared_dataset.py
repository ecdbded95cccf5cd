"""A prepared data set on disk: its arrays, and batches of its rows.

A folder holds ``manifest.json`` (dataset_manifest.py), ``features.json`` (feature_encoder.py),
``vocabularies.parquet`` (vocabulary_file.py), and a folder for each split, of plain ``.npy`` files::

    dense.npy        float32 (N, F)
    ids.npy          int32 (N, K), the features with exactly one id per sample; int64 if one of them grows
    labels.npy       uint8 (N, T), or float32 unless all tasks are binary
    weights.npy      float32 (N, T), if there is data.weight, a mask or a retrieval task
    groups.npy       int64 (N,), absent without groups
    group_rows.npy   int64 (N,), the rows by group (batches.py); only of training rows with groups
    group_starts.npy int64 (G + 1,), the start of each group in group_rows
    source_rows.npy  int64 (N,), the input row of each sample
    bag_K_ids.npy      int32 (L,), the ids of multi-hot feature K; int64 if its table grows
    bag_K_offsets.npy  int64 (N + 1,), where the ids of each sample start, and where the last end
    bag_K_weights.npy  float32 (L,), if the ids of feature K have weights
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybrid.batch import Batch, SparseFeatures
from hybrid.config import TaskSection
from hybrid.data.dataset.dataset_manifest import FILE_NAME, DataManifest, LabelReport
from hybrid.data.encode.feature_encoder import EncodedBags, EncodedBlock, Ids, item_positions
from hybrid.data.values.model_columns import Targets, TargetSpec
from hybrid.errors import DataError
from hybrid.input_spec import FeatureSpec, InputSpec
from hybrid.primitives.grouping import ranking_totals
from hybrid.storage.file_formats import map_array

_TYPES: dict[str, tuple[npt.DTypeLike, ...]] = {  # types of arrays; other arrays are int64
    "labels": (np.uint8, np.float32),
    **dict.fromkeys(("dense", "weights"), (np.float32,)),
    "ids": (np.int32, np.int64),
}

Position: TypeAlias = npt.NDArray[np.int64]  # see SplitWriter


class PreparedDataset:
    """A memory-mapped split of a prepared data set, whose rows can be read in any order.

    Args:
        folder: the folder of the data set on this machine.
        split: "train", "validation" or "test".

    Raises:
        DataError: the manifest or an array is missing or invalid, or a sampled checksum differs.
        StorageError: the manifest is a link, or not a regular file.

    Attributes:
        group_rows: int64 (N,), the rows by group, and within a group in file order.
        group_starts: int64 (G + 1,), the start of each group in ``group_rows``. Both are None without groups,
            and in splits other than "train".
        source_rows: int64 (N,), the 0-based input row of each sample.
    """

    def __init__(self, folder: Path, split: str) -> None:
        try:
            manifest = DataManifest.read(folder / FILE_NAME)
            manifest.check(folder, split)
            arrays = map_split(folder, manifest, split)
        except DataError as error:
            raise DataError(f"{error}; delete {folder} to prepare it again") from error
        self.folder = folder
        self.input_spec = manifest.input_spec
        self.report = manifest.splits[split]
        self.num_samples = self.report.num_rows
        self.source_rows = arrays["source_rows"]
        self.group_rows, self.group_starts = arrays.get("group_rows"), arrays.get("group_starts")
        self._targets = Targets(arrays["labels"], arrays.get("weights"), arrays.get("groups"))
        self.has_groups = self._targets.groups_B is not None
        bags = [
            EncodedBags(arrays[f"bag_{k}_ids"], arrays[f"bag_{k}_offsets"], arrays.get(f"bag_{k}_weights"))
            for k, feature in enumerate(self.input_spec.sparse_features)
            if feature.multi_hot
        ]
        self._samples = EncodedBlock(arrays["dense"], arrays["ids"], tuple(bags), self._targets)

    @property
    def ids_per_sample(self) -> dict[str, float]:
        """The mean number of ids of each multi-hot feature; other features have exactly one id."""
        names = [feature.name for feature in self.input_spec.sparse_features if feature.multi_hot]
        sizes = [len(bag.ids_L) / max(1, self.num_samples) for bag in self._samples.bags]
        return dict(zip(names, sizes, strict=True))

    def count_ids(self, feature: int) -> Tensor:
        """Return how often each table row occurs in samples of weight above 0 for any task, int64 (rows,).

        ``feature`` is the index of a feature with one id per sample and a table of fixed size.
        """
        features = self.input_spec.sparse_features
        ids_N = self._samples.ids_BK[:, sum(not each.multi_hot for each in features[:feature])]
        if self._targets.weights_BT is not None:
            ids_N = ids_N[(self._targets.weights_BT > 0).any(axis=1)]
        return torch.from_numpy(np.bincount(ids_N, minlength=features[feature].num_rows))

    def total_weights(self, rows: npt.NDArray[np.int64]) -> Tensor | None:
        """Return the sums of the weights of ``rows``, float64 (T,); None without weights."""
        weights_NT = self._targets.weights_BT
        if weights_NT is None:
            return None
        return torch.from_numpy(weights_NT.take(rows, axis=0).sum(0, dtype=np.float64))

    def total_ranking_weights(self, rows: npt.NDArray[np.int64]) -> Tensor:
        """Return each task's sum of ranking-loss weights over ``rows``, (T,); groups must be complete."""
        targets = self._targets.select(rows)
        assert targets.groups_B is not None
        weights = None if targets.weights_BT is None else torch.from_numpy(targets.weights_BT)
        return ranking_totals(
            torch.from_numpy(targets.labels_BT), weights, torch.from_numpy(targets.groups_B)
        )

    def gather(self, rows: npt.NDArray[np.int64], global_size: int) -> Batch:
        """Return the samples ``rows`` (B,), in this order: a slice of a batch of ``global_size`` samples."""
        return block_batch(self._samples.take(rows), self.input_spec)._replace(global_size=global_size)


def map_split(folder: Path, manifest: DataManifest, split: str) -> dict[str, npt.NDArray[Any]]:
    """Map all arrays of a split into memory, by name; DataError if a file is missing or unsuitable."""
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
    return torch.from_numpy(values_BT.astype(np.float32, copy=False)).squeeze(1)


def sparse_features(
    ids_BK: Ids, bags: Sequence[EncodedBags], features: Sequence[FeatureSpec]
) -> SparseFeatures:
    """Return the ids of B samples: all ids of the first feature, then all ids of the second, and so on."""
    ids_KB = ids_BK.T.astype(np.int64, order="C")
    if not bags:
        return SparseFeatures(torch.from_numpy(ids_KB.reshape(-1)), None, None, len(features))
    is_weighted = any(feature.weighted for feature in features)
    one_id, multi_hot = iter(ids_KB), iter(bags)
    ids, weights, ends, num_ids = [], [], [np.zeros(1, np.int64)], 0
    for feature in features:
        given_L = None
        if feature.multi_hot:
            ids_L, offsets, given_L = next(multi_hot)
        else:
            ids_L, offsets = next(one_id), np.arange(len(ids_BK) + 1)
        ids.append(ids_L.astype(np.int64, copy=False))
        ends.append(num_ids + offsets[1:])
        num_ids += len(ids_L)
        if is_weighted:
            weights.append(np.ones(len(ids_L), np.float32) if given_L is None else given_L)
    weights_L = torch.from_numpy(np.concatenate(weights)) if weights else None
    all_ends = torch.from_numpy(np.concatenate(ends))
    return SparseFeatures(torch.from_numpy(np.concatenate(ids)), all_ends, weights_L, len(features))


def block_batch(block: EncodedBlock, spec: InputSpec) -> Batch:
    """Return a batch of all samples of a block; without targets, labels are NaN."""
    targets = block.targets or Targets(np.full((block.size, 1), np.nan, np.float32))
    weights_BT, groups_B, times_B = targets.weights_BT, targets.groups_B, targets.times_B
    return Batch(
        torch.from_numpy(block.dense_BF),
        sparse_features(block.ids_BK, block.bags, spec.sparse_features),
        _by_task(targets.labels_BT),
        block.size,
        weights=None if weights_BT is None else _by_task(weights_BT),
        groups=None if groups_B is None else torch.from_numpy(groups_B),
        event_time=-np.inf if times_B is None else float(times_B.max(initial=-np.inf)),
    )


class LabelSums(NamedTuple):
    """Label statistics of T tasks in a block, over the samples with a weight above 0 for the task."""

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


class SplitWriter:
    """Creates the arrays of a split, and writes samples to any position; several threads may write.

    A position is an array: the number of earlier samples, then, if there are multi-hot features, the number
    of ids of earlier samples for each feature. Raise OSError if the disk is full.

    Args:
        end: the position after the last sample.
    """

    def __init__(self, folder: Path, spec: InputSpec, targets: TargetSpec, end: Position) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._arrays = folder, dict[str, npt.NDArray[Any]]()
        num_rows, *ids_K = end.tolist()
        num_tasks = len(targets.tasks)
        is_binary = all(task.kind == "binary" for task in targets.tasks.values())
        one_id = [feature for feature in spec.sparse_features if not feature.multi_hot]
        self._create("dense", np.float32, num_rows, len(spec.dense_features))
        self._create("ids", _id_type(one_id), num_rows, len(one_id))
        self._create("source_rows", np.int64, num_rows)
        self._create("labels", np.uint8 if is_binary else np.float32, num_rows, num_tasks)
        if targets.has_weights:
            self._create("weights", np.float32, num_rows, num_tasks)
        if targets.data.group:
            self._create("groups", np.int64, num_rows)
        self._multi_hot = [k for k, feature in enumerate(spec.sparse_features) if feature.multi_hot]
        for k in self._multi_hot:
            feature = spec.sparse_features[k]
            self._create(f"bag_{k}_offsets", np.int64, num_rows + 1)
            self._create(f"bag_{k}_ids", _id_type([feature]), ids_K[k])
            if feature.weighted:
                self._create(f"bag_{k}_weights", np.float32, ids_K[k])

    def _create(self, name: str, dtype: npt.DTypeLike, *shape: int) -> None:
        path = self._folder / f"{name}.npy"
        self._arrays[name] = np.lib.format.open_memmap(path, "w+", dtype, shape)
        # If the disk is full, this fails; a write to a mapped array would kill the process.
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)

    def write(self, start: Position, block: EncodedBlock, source_rows_B: npt.NDArray[np.int64]) -> Position:
        """Write a block with targets to the position ``start``, and return the position after it.

        ``source_rows_B`` are the row numbers in the input.
        """
        targets, end = block.targets, start.copy()
        assert targets is not None
        self._put(start[0], dense=block.dense_BF, ids=block.ids_BK, source_rows=source_rows_B)
        self._put(start[0], labels=targets.labels_BT, weights=targets.weights_BT, groups=targets.groups_B)
        end[0] += block.size
        for k, bag in zip(self._multi_hot, block.bags, strict=True):
            first = start[1 + k]
            self._put(start[0] + 1, **{f"bag_{k}_offsets": first + bag.offsets[1:]})
            self._put(first, **{f"bag_{k}_ids": bag.ids_L, f"bag_{k}_weights": bag.weights_L})
            end[1 + k] += len(bag.ids_L)
        return end

    def _put(self, start: int, **arrays: npt.NDArray[Any] | None) -> None:
        for name, rows in arrays.items():
            if rows is not None:
                self._arrays[name][start : start + len(rows)] = rows


def _id_type(features: Sequence[FeatureSpec]) -> npt.DTypeLike:
    return np.int64 if any(feature.is_growing for feature in features) else np.int32


def write_group_order(split: Path) -> None:
    """Write ``group_rows.npy`` and ``group_starts.npy`` of a complete split; do nothing without groups.

    Groups are in the order of their first rows. The sort takes 40 bytes of memory per row.
    """
    if not (split / "groups.npy").exists():
        return
    groups_N = np.load(split / "groups.npy", mmap_mode="r")
    order_N = groups_N.argsort(kind="stable")
    sorted_N = groups_N[order_N]
    starts_G1 = np.append(np.flatnonzero(np.diff(sorted_N, prepend=sorted_N[:1] - 1)), len(sorted_N))
    rows_N, sizes_G = item_positions(starts_G1, order_N[starts_G1[:-1]].argsort())
    np.save(split / "group_rows.npy", order_N[rows_N])
    np.save(split / "group_starts.npy", np.concatenate([[0], sizes_G.cumsum()]))
