"""Item ids drawn at random in each step, as negatives for ``hybrid.models.two_towers.sampled_softmax``."""

import numpy as np
import torch
from torch import Tensor

from hybrid.embedding.initial_rows import random_salt
from hybrid.primitives.key_hashes import next_random, splitmix64


class Negatives:
    """Item ids drawn in each step, with replacement, for ``negatives`` of :meth:`Cluster.batches`.

    The draws of a step depend only on the arguments, ``run.seed``, the step and the name of the column, and
    so are the same for any number of trainers and workers, and after a restart. Every trainer draws all
    ids, and looks up all of their rows.

    Args:
        number: number of draws per step, at most the number of items.
        log_q: logarithm of the probability of each item, (items,), up to a constant: zeros for uniform draws,
            ``hybrid.models.two_towers.log_popularity(...)`` for draws by frequency; -inf excludes an item.

    Raises:
        ValueError: ``number`` is below 1 or above the number of items, or ``log_q`` is no vector, is empty,
            has NaN or inf, or is -inf for all items.
    """

    def __init__(self, number: int, log_q: Tensor) -> None:
        if log_q.dim() != 1 or not len(log_q) or not log_q.max() < torch.inf or log_q.max() == -torch.inf:
            raise ValueError("log_q must have one number per item, below inf, and not -inf for all items")
        if not 1 <= number <= len(log_q):
            raise ValueError(f"number must be at least 1 and at most the {len(log_q)} items, not {number}")
        self._number = number
        self._log_q_I = log_q.detach().cpu()
        cumulative_I = np.cumsum(np.exp(self._log_q_I.double().numpy() - float(log_q.max())))
        self._cumulative_I = cumulative_I / cumulative_I[-1]

    def columns(self, name: str, seed: int, step: int) -> dict[str, Tensor]:
        """Return the columns of a step: ids (N,) as ``NAME``, and their ``log_q`` as ``NAME.log_q``."""
        counters_N = np.arange(self._number, dtype=np.uint64)
        counters_N += next_random(np.array([random_salt(seed, name)], np.uint64) + np.uint64(step))
        bits_N = splitmix64(counters_N) >> np.uint64(11)
        ids_N = torch.from_numpy(self._cumulative_I.searchsorted(bits_N * 2.0**-53, side="right"))
        return {name: ids_N, f"{name}.log_q": self._log_q_I[ids_N]}
