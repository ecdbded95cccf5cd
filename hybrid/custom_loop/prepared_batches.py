"""Prepared data (``hybrid/data``) as batches of dicts, of which each trainer reads its own share alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from hybrid.batch import Batch, SparseFeatures, by_task
from hybrid.custom_loop.call_sites import Site
from hybrid.custom_loop.global_batches import Share
from hybrid.custom_loop.jagged import Jagged
from hybrid.data.batches.batch_loader import BatchLoader
from hybrid.data.dataset.prepared_dataset import PreparedDataset
from hybrid.errors import ConfigError, DataError
from hybrid.input_spec import FeatureSpec, InputSpec

DENSE, GROUP = "dense", "group"


@dataclass
class PreparedData:
    """The samples of one split: for :meth:`Cluster.batches`.

    A batch has the labels (samples,) of each task under its name (``label`` where there are no sections
    [tasks.NAME]), and as ``NAME.weights`` how much each sample counts for it, where samples differ in that;
    ``group`` (samples,), the same for samples of one group; ``dense`` (samples, numeric columns), and each
    sparse column under its name: ids (samples,), or a :class:`Jagged` where there may be several, with its
    weights, if they have any, as ``NAME.weights``.

    Attributes:
        dataset: what is on the disk.
        batch_size: of all trainers together, where none is given.
        seed, shuffle, lanes: how each pass orders the samples.
        tasks: their names, in the order of the labels.
        passes: how many there have been.
    """

    dataset: PreparedDataset
    batch_size: int
    seed: int
    shuffle: bool
    lanes: int
    tasks: tuple[str, ...]
    passes: int = 0

    def __post_init__(self) -> None:
        given = [DENSE, *self.tasks, *(f"{task}.weights" for task in self.tasks)]
        given += [GROUP] if self.dataset.has_groups else []
        given += [each.name for each in self.dataset.input_spec.sparse_features]
        if taken := sorted({name for name in given if given.count(name) > 1}):
            rule = "cannot be the name of a column in batches of prepared data; rename it, or the task"
            raise ConfigError("data.sparse", rule, taken)

    def __len__(self) -> int:
        return self.dataset.num_samples

    @property
    def num_rows(self) -> dict[str, int]:
        """How many rows a table of each sparse column has."""
        return {each.name: each.num_rows for each in self.dataset.input_spec.sparse_features}

    @property
    def dense_columns(self) -> tuple[str, ...]:
        """The numeric columns, in the order of ``dense``."""
        return self.dataset.input_spec.dense_features

    def shares(
        self,
        trainer: int,
        num_trainers: int,
        size: int | None,
        sites: Iterable[Site],
        whole: str | None = None,
    ) -> Iterator[Share]:
        """The shares of trainer number ``trainer`` of the next pass.

        Args:
            whole: ``group`` where groups stay whole, or None.

        Raises:
            DataError: they cannot.
        """
        if whole not in (None, GROUP):
            rule = f"is to be {GROUP!r} in prepared data: data.group names its column"
            raise DataError(f"whole = {whole!r} {rule}")
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
                yield Share(self._values(batch), len(batch.labels), batch.global_size, sites)

    def _values(self, batch: Batch) -> dict[str, Any]:
        values = features_of(batch, self.dataset.input_spec)
        for t, task in enumerate(self.tasks):
            values[task] = by_task(batch.labels, len(self.tasks))[:, t]
            if batch.weights is not None:
                values[f"{task}.weights"] = by_task(batch.weights, len(self.tasks))[:, t]
        if batch.groups is not None:
            values[GROUP] = batch.groups
        return values


def features_of(batch: Batch, input_spec: InputSpec) -> dict[str, Any]:
    """What is known of the samples of a batch, as a dict; see :class:`PreparedData`."""
    values: dict[str, Any] = {DENSE: batch.dense_features}
    for k, feature in enumerate(input_spec.sparse_features):
        values |= _feature(feature, k, batch.sparse_features)
    return values


def _feature(feature: FeatureSpec, k: int, sparse: SparseFeatures) -> dict[str, Any]:
    """The ids of one column, and their weights where they have any."""
    name, size, offsets = feature.name, sparse.batch_size, sparse.offsets
    if offsets is None:
        return {name: sparse.ids_L[k * size : (k + 1) * size]}
    ends = offsets[k * size : (k + 1) * size + 1]
    ids = slice(int(ends[0]), int(ends[-1]))
    if not feature.multi_hot:
        return {name: sparse.ids_L[ids]}
    found: dict[str, Any] = {name: Jagged(sparse.ids_L[ids], ends - ends[0])}
    if feature.weighted and sparse.weights_L is not None:
        found[f"{name}.weights"] = Jagged(sparse.weights_L[ids], ends - ends[0])
    return found
