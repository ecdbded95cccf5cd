"""A split of a prepared data set that lies elsewhere: its rows are fetched before they are gathered."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybrid.batch import Batch
from hybrid.data.dataset.chunk_cache import ChunkCache
from hybrid.data.dataset.dataset_manifest import DatasetReport
from hybrid.data.dataset.prefetch import Ahead, FetchedAhead, StepRows
from hybrid.data.dataset.prepared_dataset import PreparedDataset
from hybrid.errors import ConfigError
from hybrid.input_spec import InputSpec


class FetchedDataset(PreparedDataset):
    """A split whose rows are here for as long as a step of :meth:`ahead` needs them.

    Groups are not known as a whole, so batches of whole groups cannot be had of it.

    Args:
        samples: the rows.
        weights: those of the samples alone, where they differ: every trainer needs them of the whole step.
        share_of_room: of data.local_cache_gb that the rows have.
        total_ids: of each multi-hot feature.
        read_source_rows: gets where the samples came from.
    """

    def __init__(
        self,
        samples: ChunkCache,
        weights: ChunkCache | None,
        share_of_room: float,
        total_ids: Sequence[int],
        read_source_rows: Callable[[], npt.NDArray[np.int64]],
        input_spec: InputSpec,
        report: DatasetReport,
    ) -> None:
        super().__init__(samples.arrays, input_spec, report)
        self._samples, self._all_weights = samples, weights
        self._share_of_room = share_of_room
        self._total_ids = total_ids
        self._read_source_rows = read_source_rows

    @cached_property
    def source_rows(self) -> npt.NDArray[np.int64]:
        """See :class:`PreparedDataset`; fetched once asked for."""
        return self._read_source_rows()

    @property
    def total_ids(self) -> Sequence[int]:
        """See :class:`PreparedDataset`."""
        return self._total_ids

    @property
    def bytes_fetched(self) -> int:
        """How many have come since it was opened."""
        weights = 0 if self._all_weights is None else self._all_weights.bytes_fetched
        return self._samples.bytes_fetched + weights

    def ahead(self, plan: Callable[[int], StepRows], steps: range, chunks_at_once: int) -> Ahead:
        """See :class:`PreparedDataset`.

        Raises:
            ConfigError: there is no room for so many chunks.
        """
        needed = min(chunks_at_once, self._samples.num_chunks)
        if needed > self._samples.num_slots:
            gib = needed * self._samples.slot_bytes / 2**30 / self._share_of_room
            rule = (
                f"must be at least {math.ceil(gib * 100) / 100:g}, for the rows that a trainer reads at once"
            )
            raise ConfigError("data.local_cache_gb", rule)
        wholes = [] if self._all_weights is None else [self._all_weights]
        return FetchedAhead(plan, steps, [self._samples], wholes)

    def close(self) -> None:
        """See :class:`PreparedDataset`."""
        self._samples.close()
        if self._all_weights is not None:
            self._all_weights.close()

    def total_weights(self, rows: npt.NDArray[np.int64]) -> Tensor | None:
        """See :class:`PreparedDataset`; of the rows of a step."""
        if self._all_weights is None:
            return None
        weights = self._all_weights.arrays["weights"]
        return torch.from_numpy(weights.take(self._all_weights.local(rows), axis=0).sum(0, dtype=np.float64))

    def gather(
        self,
        rows: npt.NDArray[np.int64],
        global_size: int,
        total_weights: Tensor | None = None,
        total_groups: Tensor | None = None,
    ) -> Batch:
        """See :class:`PreparedDataset`; of a trainer's share of a step."""
        return super().gather(self._samples.local(rows), global_size, total_weights, total_groups)
