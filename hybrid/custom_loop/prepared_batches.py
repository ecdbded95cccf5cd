"""Prepared data (``hybrid/data``) as batches of dicts; each trainer reads its slice only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from hybrid.batch import Batch, by_task
from hybrid.custom_loop.call_sites import CallSite
from hybrid.custom_loop.embedding_modules import Jagged
from hybrid.custom_loop.global_batches import LocalBatch
from hybrid.data.batches.batch_loader import BatchLoader
from hybrid.data.dataset.prepared_dataset import PreparedDataset
from hybrid.errors import ConfigError, DataError
from hybrid.input_spec import InputSpec

DENSE, GROUP = "dense", "group"


@dataclass
class PreparedData:
    """The samples of one split, for :meth:`Cluster.batches`.

    A batch is a dict:

    ================ ===================================================================================
    ``dense``        numeric columns, (samples, columns)
    ``COLUMN``       ids of a sparse column, (samples,), or a :class:`Jagged` if it is multi-hot
    ``COL.weights``  weights of the ids of a weighted multi-hot column, a :class:`Jagged`
    ``TASK``         labels of a task, (samples,); ``label`` without sections [tasks.NAME]
    ``TASK.weights`` weights of the samples for a task, (samples,), if the data have weights
    ``group``        group of each sample, (samples,), if the data have groups
    ================ ===================================================================================

    Attributes:
        dataset: the prepared files.
        batch_size: default size of a batch of all trainers.
        seed, shuffle, lanes: how each pass orders the samples.
        tasks: names of the tasks, in the order of the labels.
        passes: number of passes so far.
    """

    dataset: PreparedDataset
    batch_size: int
    seed: int
    shuffle: bool
    lanes: int
    tasks: tuple[str, ...]
    passes: int = 0

    def __post_init__(self) -> None:
        names = [DENSE, *self.tasks, *(f"{task}.weights" for task in self.tasks)]
        names += [GROUP] if self.dataset.has_groups else []
        names += [each.name for each in self.dataset.input_spec.sparse_features]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            rule = "is the name of two columns in batches of prepared data; rename the column or the task"
            raise ConfigError("data.sparse", rule, repeated)

    def __len__(self) -> int:
        return self.dataset.num_samples

    @property
    def num_rows(self) -> dict[str, int]:
        """Number of rows that the table of each sparse column needs."""
        return {each.name: each.num_rows for each in self.dataset.input_spec.sparse_features}

    @property
    def dense_columns(self) -> tuple[str, ...]:
        """Names of the numeric columns, in the order of ``dense``."""
        return self.dataset.input_spec.dense_features

    def local_batches(
        self,
        trainer: int,
        num_trainers: int,
        size: int | None,
        sites: Iterable[CallSite],
        whole: str | None = None,
    ) -> Iterator[LocalBatch]:
        """Yield a trainer's slice of each batch of the next pass.

        Args:
            whole: ``group`` if groups are not split, or None.

        Raises:
            DataError: ``whole`` names another column.
        """
        if whole not in (None, GROUP):
            raise DataError(
                f"whole = {whole!r} must be {GROUP!r} for prepared data; data.group names the column"
            )
        loader = BatchLoader(
            self.dataset,
            batch_size=size or self.batch_size,
            trainer_index=trainer,
            num_trainers=num_trainers,
            seed=self.seed,
            shuffle=self.shuffle,
            lanes=self.lanes,
            by_group=whole is not None,
        )
        epoch, self.passes = self.passes, self.passes + 1
        with loader.batches(epoch) as stream:
            for batch in stream:
                values = features_of(batch, self.dataset.input_spec)
                for t, task in enumerate(self.tasks):
                    values[task] = by_task(batch.labels, len(self.tasks))[:, t]
                    if batch.weights is not None:
                        values[f"{task}.weights"] = by_task(batch.weights, len(self.tasks))[:, t]
                if batch.groups is not None:
                    values[GROUP] = batch.groups
                yield LocalBatch(values, len(batch.labels), batch.global_size, sites)


def features_of(batch: Batch, input_spec: InputSpec) -> dict[str, Any]:
    """Return the columns of a batch, without labels, as a dict; see :class:`PreparedData`."""
    values: dict[str, Any] = {DENSE: batch.dense_features}
    sparse = batch.sparse_features
    size, offsets = sparse.batch_size, sparse.offsets
    if offsets is None:
        offsets = torch.arange(len(sparse.ids_L) + 1)
    for k, feature in enumerate(input_spec.sparse_features):
        ends = offsets[k * size : (k + 1) * size + 1]
        ids = slice(int(ends[0]), int(ends[-1]))
        is_jagged = feature.multi_hot and sparse.offsets is not None
        values[feature.name] = Jagged(sparse.ids_L[ids], ends - ends[0]) if is_jagged else sparse.ids_L[ids]
        if is_jagged and feature.weighted and sparse.weights_L is not None:
            values[f"{feature.name}.weights"] = Jagged(sparse.weights_L[ids], ends - ends[0])
    return values
