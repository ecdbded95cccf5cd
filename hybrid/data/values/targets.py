"""The targets of samples: the labels of the tasks, the weight of each sample, and its group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hybrid.config import DataSection, TaskSection
from hybrid.config.sections import tasks_of
from hybrid.data.values import column_values
from hybrid.data.values.invalid_rows import Reason, Reject
from hybrid.errors import ConfigError


class Targets(NamedTuple):
    """The targets of B samples for T tasks.

    Attributes:
        labels_BT: float32; without meaning where a task's mask excludes a sample.
        weights_BT: float32, 0 where a mask excludes a sample; None if all samples have the same weight.
        groups_B: int64, a hash of the group; None without groups.
    """

    labels_BT: npt.NDArray[np.float32]
    weights_BT: npt.NDArray[np.float32] | None = None
    groups_B: npt.NDArray[np.int64] | None = None

    def select(self, mask_B: npt.NDArray[np.bool_]) -> Targets:
        """Return the samples of a mask."""
        return Targets(*(None if array is None else array[mask_B] for array in self))  # type: ignore[arg-type]


@dataclass(frozen=True)
class TargetSpec:
    """The targets of a run.

    Attributes:
        tasks: by name, each with its label column.
        data: the section that names the columns of weights and groups.
        is_implied: whether data.label is the only task, since there are no sections.
    """

    tasks: Mapping[str, TaskSection]
    data: DataSection
    is_implied: bool

    @classmethod
    def of(cls, tasks: Mapping[str, TaskSection], data: DataSection) -> TargetSpec:
        """Return the targets of the sections [tasks.NAME] and [data]."""
        return cls(tasks_of(tasks, data), data, not tasks)

    @property
    def has_weights(self) -> bool:
        """Whether samples may have different weights."""
        return bool(self.data.weight) or any(task.mask for task in self.tasks.values())

    @property
    def has_groups(self) -> bool:
        return bool(self.data.group)

    @property
    def is_binary(self) -> bool:
        """Whether every label is 0 or 1."""
        return all(task.kind == "binary" for task in self.tasks.values())

    def columns(self) -> list[tuple[str, str]]:
        """Return the columns to read, each after the key that names it."""
        named = [("data.weight", self.data.weight), ("data.group", self.data.group)]
        for name, task in self.tasks.items():
            named.append(("data.label" if self.is_implied else f"tasks.{name}.label", task.label))
            named.append((f"tasks.{name}.mask", task.mask))
        return [(key, column) for key, column in named if column]

    def read(self, table: Mapping[str, pa.Array], reject: Reject) -> Targets:
        """Return the targets of a table of columns; invalid rows are rejected."""
        data = self.data
        label_texts = " or ".join(map(repr, (*data.positive_labels, *data.negative_labels)))
        labels: list[npt.NDArray[Any]] = []
        counts: list[npt.NDArray[np.bool_]] = []
        for task in self.tasks.values():
            counts_B = np.ones(len(table[task.label]), np.bool_)
            if task.mask:
                mask_B, wrong_B = column_values.labels(
                    table[task.mask], data.positive_labels, data.negative_labels
                )
                reject(wrong_B, Reason.LABEL, task.mask, label_texts)
                counts_B = mask_B == 1
            labels_B: npt.NDArray[Any]
            if task.kind == "binary":
                labels_B, wrong_B = column_values.labels(
                    table[task.label], data.positive_labels, data.negative_labels
                )
                reason, expected = Reason.LABEL, label_texts
            else:
                labels_B, wrong_B = column_values.numbers(table[task.label], data.missing)
                wrong_B |= np.isnan(labels_B)
                reason, expected = Reason.TARGET, "a finite number"
            if task.kind == "classes":
                with np.errstate(invalid="ignore"):
                    wrong_B |= (labels_B < 0) | (labels_B >= task.classes) | (labels_B != np.floor(labels_B))
                expected = f"a class from 0 to {task.classes - 1}"
            # The label of a masked sample is often unknown.
            reject(wrong_B & counts_B, reason, task.label, expected)
            labels.append(np.where(wrong_B, 0, labels_B))
            counts.append(counts_B)
        labels_BT = np.stack(labels, axis=1).astype(np.float32)
        weights_BT = groups_B = None
        if self.has_weights:
            samples_B = np.ones(len(labels_BT), np.float32)
            if data.weight:
                numbers_B, wrong_B = column_values.numbers(table[data.weight], data.missing)
                with np.errstate(invalid="ignore"):
                    wrong_B |= ~(numbers_B >= 0)
                reject(wrong_B, Reason.WEIGHT, data.weight, "a weight, a finite number of at least 0")
                samples_B = np.where(wrong_B, 0, numbers_B).astype(np.float32)
            weights_BT = np.stack(counts, axis=1) * samples_B[:, None]
        if self.has_groups:
            if column_values.is_list(table[data.group]):
                rule = "must be a column of one value a row, and holds lists"
                raise ConfigError("data.group", rule, data.group)
            groups_B, wrong_B = column_values.hashes(table[data.group], data.missing)
            reject(wrong_B, Reason.GROUP, data.group, "the group of the sample")
        return Targets(labels_BT, weights_BT, groups_B)
