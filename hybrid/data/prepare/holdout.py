"""Selection of the training rows that are held out: at random, by a column, or the latest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from hybrid.config import RunConfig
from hybrid.config.splits import TEST
from hybrid.data.parse.sources import SplitValues
from hybrid.primitives.splitmix64 import next_of

MAX_SAMPLED = 1 << 20  # times that are kept in memory to find the last training row


@dataclass(frozen=True)
class Split:
    """The rule that selects the rows of a split.

    Attributes:
        name: "test" or "validation".
        by: random, column or time.
        seed: the seed of random rows, and of sampled times.
        fraction: the fraction of rows that is held out.
        latest: with ``by = "time"``, the time of the last row that is not held out, estimated from a random
            sample if there are more than ``MAX_SAMPLED`` rows.
    """

    name: str
    by: str
    seed: int
    fraction: float
    latest: float = 0.0

    @classmethod
    def all_of(
        cls,
        config: RunConfig,
        read: Callable[[], Iterable[tuple[npt.NDArray[np.int64], Mapping[str, SplitValues]]]],
    ) -> tuple[Split, ...]:
        """Return the splits that are held out, in the order in which they take rows.

        Args:
            read: returns row numbers and :attr:`RawBlock.held_out_by`, block by block; called once for each
                split by time.
        """
        splits: tuple[Split, ...] = ()
        for held in config.data.holdouts:
            seed = config.run.seed if held.split == TEST else config.run.seed + 2**63
            split = cls(held.split, held.by, seed, held.fraction)
            if split.by == "time":
                split = replace(split, latest=split._find_latest(splits, read()))
            splits = (*splits, split)
        return splits

    def _find_latest(
        self,
        earlier: Iterable[Split],
        blocks: Iterable[tuple[npt.NDArray[np.int64], Mapping[str, SplitValues]]],
    ) -> float:
        """Return the time of the last row that neither this split nor an ``earlier`` one holds out."""
        times, hashes, limit = np.empty(0), np.empty(0, np.uint64), 2**64 - 1
        for rows_B, values in blocks:
            is_left_B = np.ones(len(rows_B), np.bool_)
            for split in earlier:
                is_left_B &= ~split.selects(rows_B, values)
            times = np.append(times, values[self.name][is_left_B])
            hashes = np.append(hashes, self._hash(rows_B[is_left_B]))
            keep = hashes <= np.uint64(limit)
            while keep.sum() > MAX_SAMPLED:
                limit //= 2
                keep = hashes <= np.uint64(limit)
            times, hashes = times[keep], hashes[keep]
        return float(np.quantile(times, 1 - self.fraction, method="inverted_cdf")) if len(times) else 0.0

    def selects(
        self, rows_B: npt.NDArray[np.int64], held_out_by: Mapping[str, SplitValues]
    ) -> npt.NDArray[np.bool_]:
        """Select the rows of the split in a block.

        Args:
            rows_B: numbers of the rows in the input.
            held_out_by: see :class:`RawBlock`.
        """
        if self.by == "time":
            is_later: npt.NDArray[np.bool_] = held_out_by[self.name] > self.latest
            return is_later
        hashed_B = self._hash(rows_B if self.by == "random" else held_out_by[self.name])
        is_below: npt.NDArray[np.bool_] = hashed_B < np.uint64(self.fraction * 2**64)
        return is_below

    def _hash(self, values_B: SplitValues) -> npt.NDArray[np.uint64]:
        key = next_of(np.array([self.seed % 2**64], np.uint64))
        return next_of(values_B.astype(np.int64).view(np.uint64) ^ key)
