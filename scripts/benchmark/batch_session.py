"""A session that trains on batches from a function, for the benchmark and for comparison tests."""

import sys
from collections.abc import Callable, Iterable, Iterator

from hybrid.batch import Batch
from workers.controller.remote_trainer import Trainer, TrainerReport
from workers.controller.session import Session


class BatchTrainer(Trainer):
    def train_on(
        self, make_batches: Callable[[int], Iterable[Batch]], steps_before: int, is_aligned: bool
    ) -> TrainerReport:
        self.close()
        batches: Iterator[Batch] = iter(make_batches(self._index))
        if is_aligned:
            self._engine.begin(batches, steps_before)
        else:
            self._begin_aligned(batches, steps_before)
        return self.train_on_unit(sys.maxsize, steps_before)


class BatchSession(Session):
    """A session without a data set: its batches come from a function, and their ids are row numbers."""

    trainer_class = BatchTrainer

    def train_on(
        self, make_batches: Callable[[int], Iterable[Batch]], steps_before: int, *, is_aligned: bool = False
    ) -> list[TrainerReport]:
        """Train until no trainer has further batches; a step takes one batch of every trainer that has one.

        Args:
            make_batches: returns the batches of a trainer by its index; called on every trainer.
            is_aligned: whether all trainers have equally many batches, each with the totals of its step.
        """
        no_limit = 0.0  # seconds; RPC then never raises a timeout
        return self._on_trainers(no_limit, BatchTrainer.train_on, make_batches, steps_before, is_aligned)
