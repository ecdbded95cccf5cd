"""What a model is to say of samples: the labels of its tasks, how much each sample counts, and its group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hybrid.config import DataSection, TaskSection
from hybrid.config.sections import tasks_of
from hybrid.data.values import column_values
from hybrid.data.values.invalid_rows import Reason, Reject
from hybrid.errors import ConfigError


class Targets(NamedTuple):
    """Of B samples and T tasks.

    Attributes:
        labels_BT: float32; of no meaning where a task's mask leaves a sample out.
        weights_BT: float32, 0 where a mask leaves a sample out; None where all samples count the same.
        groups_B: int64, a hash of the group; None where there are none.
    """

    labels_BT: npt.NDArray[np.float32]
    weights_BT: npt.NDArray[np.float32] | None = None
    groups_B: npt.NDArray[np.int64] | None = None

    def select(self, mask_B: npt.NDArray[np.bool_]) -> Targets:
        """The samples where ``mask_B`` holds."""
        return Targets(*(None if part is None else part[mask_B] for part in self))  # type: ignore[arg-type]


@dataclass(frozen=True)
class TargetSpec:
    """Which targets there are.

    Attributes:
        tasks: by name, each with its label column.
        data: the section that names the columns of weights and groups.
        is_implied: whether data.label is the one task, for want of sections.
    """

    tasks: Mapping[str, TaskSection]
    data: DataSection
    is_implied: bool

    @classmethod
    def of(cls, tasks: Mapping[str, TaskSection], data: DataSection) -> TargetSpec:
        """Of the sections [tasks.NAME] and [data]."""
        return cls(tasks_of(tasks, data), data, not tasks)

    @property
    def has_weights(self) -> bool:
        """Whether samples may count otherwise than others."""
        return bool(self.data.weight) or any(task.mask for task in self.tasks.values())

    @property
    def has_groups(self) -> bool:
        return bool(self.data.group)

    @property
    def is_binary(self) -> bool:
        """Whether every label is 0 or 1."""
        return all(task.kind == "binary" for task in self.tasks.values())

    def columns(self) -> list[tuple[str, str]]:
        """The columns to read, each after the key that names it."""
        named = [("data.weight", self.data.weight), ("data.group", self.data.group)]
        for name, task in self.tasks.items():
            named.append(("data.label" if self.is_implied else f"tasks.{name}.label", task.label))
            named.append((f"tasks.{name}.mask", task.mask))
        return [(key, column) for key, column in named if column]

    def read(self, table: Mapping[str, Any], reject: Reject) -> Targets:
        """The targets of some rows; what is wrong is rejected.

        Args:
            table: the columns by name.
        """
        labels, counts = [], []
        for task in self.tasks.values():
            counts_B = self._counts(task, table, reject)
            labels_B, wrong_B, expected = self._labels(task, table[task.label])
            # Of a sample that does not count, the label is often unknown.
            reject(wrong_B & counts_B, _reason(task), task.label, expected)
            labels.append(np.where(wrong_B, 0, labels_B))
            counts.append(counts_B)
        labels_BT = np.stack(labels, axis=1).astype(np.float32)
        weights_BT = None
        if self.has_weights:
            weights_BT = np.stack(counts, axis=1) * self._weights(len(labels_BT), table, reject)[:, None]
        return Targets(labels_BT, weights_BT, self._groups(table, reject) if self.has_groups else None)

    def _counts(self, task: TaskSection, table: Mapping[str, Any], reject: Reject) -> npt.NDArray[np.bool_]:
        """Which samples count for a task."""
        if not task.mask:
            return np.ones(len(table[task.label]), np.bool_)
        data = self.data
        mask_B, unknown_B = column_values.labels(table[task.mask], data.positive_labels, data.negative_labels)
        reject(unknown_B, Reason.LABEL, task.mask, self._words)
        counts_B: npt.NDArray[np.bool_] = mask_B == 1
        return counts_B

    def _labels(self, task: TaskSection, column: Any) -> tuple[Any, npt.NDArray[np.bool_], str]:
        """Labels, which of them are none, and what was expected."""
        data = self.data
        if task.kind == "binary":
            return *column_values.labels(column, data.positive_labels, data.negative_labels), self._words
        labels_B, wrong_B = column_values.numbers(column, data.missing)
        wrong_B |= np.isnan(labels_B)
        if task.kind == "regression":
            return labels_B, wrong_B, "a finite number"
        with np.errstate(invalid="ignore"):
            wrong_B |= (labels_B < 0) | (labels_B >= task.classes) | (labels_B != np.floor(labels_B))
        return labels_B, wrong_B, f"a class from 0 to {task.classes - 1}"

    @property
    def _words(self) -> str:
        return " or ".join(map(repr, (*self.data.positive_labels, *self.data.negative_labels)))

    def _weights(self, size: int, table: Mapping[str, Any], reject: Reject) -> npt.NDArray[np.float32]:
        name = self.data.weight
        if not name:
            return np.ones(size, np.float32)
        weights_B, wrong_B = column_values.numbers(table[name], self.data.missing)
        with np.errstate(invalid="ignore"):
            wrong_B |= ~(weights_B >= 0)
        reject(wrong_B, Reason.WEIGHT, name, "a weight, a finite number of at least 0")
        return np.where(wrong_B, 0, weights_B).astype(np.float32)

    def _groups(self, table: Mapping[str, Any], reject: Reject) -> npt.NDArray[np.int64]:
        name = self.data.group
        if column_values.is_list(table[name]):
            raise ConfigError("data.group", "must be a column of one value a row, and holds lists", name)
        groups_B, absent_B = column_values.hashes(table[name], self.data.missing)
        reject(absent_B, Reason.GROUP, name, "the group of the sample")
        return groups_B


def _reason(task: TaskSection) -> Reason:
    return Reason.LABEL if task.kind == "binary" else Reason.TARGET
