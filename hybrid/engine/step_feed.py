"""The steps of one trainer: batches as micro-batches, with lookups that start in time.

::

    sync             step s     look up s ── compute s
                     step s+1                          look up s+1 ── compute s+1

    lookahead,       step s     compute s, send its gradients with the ids of s+2
    async            step s+1   compute s+1, send its gradients with the ids of s+3

In lookahead mode, a worker responds to the lookup of step s+2 once update s+1 is applied.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

from hybrid.embedding.trainer.embeddings import Embeddings, ModuleTables
from hybrid.embedding.trainer.lookup import Lookup
from hybrid.engine.hybrid_model import MicroBatch
from hybrid.primitives.step_timings import StepClock
from hybrid.updates.ticket import Purpose, Ticket
from hybrid.updates.update_rules import UpdateMode, UpdateRules

# A prefetch is sent two steps before its vectors are needed, with the gradients of that earlier step.
_LOOK_AHEAD = 2
AnySamples = TypeVar("AnySamples", bound="Samples")


class Samples(Protocol):
    """What a feed requires of a batch."""

    @property
    def checksum(self) -> int:
        """See :class:`Ticket`."""

    @property
    def sparse_features(self) -> Any:
        """The ids to look up."""

    def split(self, count: int) -> Sequence[Self]: ...


class StepInput(NamedTuple, Generic[AnySamples]):
    """The input of one step of one trainer."""

    batch: AnySamples
    micro_batches: list[MicroBatch[AnySamples]]


class Feed(Iterator[StepInput[AnySamples]]):
    """An iterator over the steps of one trainer. The caller calls :meth:`end_step` before the next step.

    Args:
        clock: measures the time spent here, and records the start of each step.

    Attributes:
        step: number of completed steps, which is also the index of the current or next step.
    """

    def __init__(
        self,
        embeddings: Embeddings | ModuleTables,
        trainer: int,
        rules: UpdateRules,
        clock: StepClock,
    ) -> None:
        self._embeddings = embeddings
        self._trainer = trainer
        self._mode, self._num_micro_batches = rules.mode, rules.micro_batches
        self._should_prefetch = rules.mode is not UpdateMode.SYNC
        self._clock = clock
        self.begin(iter(()), 0)

    def begin(self, batches: Iterator[AnySamples], step: int) -> None:
        """Continue with ``batches``, whose first is the batch of ``step``; drop prefetched lookups."""
        self.step = step
        self._batches = batches
        self._first_step = step
        self._current: StepInput[AnySamples] | None = None  # the step that is being taken
        self._prefetched: deque[StepInput[AnySamples]] = deque()

    def flush(self) -> None:
        """Wait until the workers have the gradients of all steps taken.

        Only this method waits for messages that carry gradients but no lookup.
        """
        pending = [*self._prefetched] if self._current is None else [self._current, *self._prefetched]
        # In lookahead mode, the lookup of the next step waits for these gradients; later ones wait for more.
        for step in pending[:1] if self._mode is UpdateMode.LOOKAHEAD else pending:
            for micro in step.micro_batches:
                if micro.lookup is not None:
                    micro.lookup.flush()
        self._embeddings.flush()

    def has_next(self) -> bool:
        """Whether there is a further step. The call reads the batch of this step."""
        num_ahead = _LOOK_AHEAD if self._should_prefetch else 1
        while len(self._prefetched) < num_ahead and (batch := self._read()) is not None:
            self._prefetched.append(self._step_of(batch, self.step + len(self._prefetched)))
        return bool(self._prefetched)

    def __next__(self) -> StepInput[AnySamples]:
        self._clock.begin_step(self.step)
        if not self.has_next():
            raise StopIteration
        self._current = current = self._prefetched.popleft()
        # The gradients of the current step carry the lookup of the step after the next.
        if self._prefetched and (batch := self._read()) is not None:
            self._prefetched.append(self._step_of(batch, self.step + _LOOK_AHEAD, current))
        return current

    def end_step(self) -> None:
        """Complete the current step."""
        self.step += 1
        self._current = None

    def start(self, micro: MicroBatch[AnySamples], after: Lookup | None = None) -> MicroBatch[AnySamples]:
        """Return a micro-batch with its lookup. If it already has one, return it unchanged.

        Args:
            after: an earlier lookup, whose gradients carry the new lookup. None sends the new lookup now.
        """
        if micro.lookup is not None:
            return micro
        samples, ticket = micro.batch, micro.ticket
        if self._should_prefetch:
            is_async = self._mode is UpdateMode.ASYNC
            version = max(self._first_step, ticket.step - 1) if is_async else ticket.step
            ticket = ticket._replace(version=version, purpose=Purpose.PREFETCH)
        return micro._replace(lookup=self._embeddings.lookup(samples.sparse_features, ticket, after))

    def _read(self) -> AnySamples | None:
        with self._clock.phase("data"):
            return next(self._batches, None)

    def _step_of(
        self, batch: AnySamples, step: int, before: StepInput[AnySamples] | None = None
    ) -> StepInput[AnySamples]:
        """Return the input of a step; prefetched lookups are sent, with the gradients of an earlier step."""
        micro_batches = []
        for index, samples in enumerate(batch.split(self._num_micro_batches)):
            ticket = Ticket(self._trainer, step, step, index, checksum=batch.checksum)
            micro = MicroBatch(samples, ticket, None, index == self._num_micro_batches - 1)
            if self._should_prefetch:
                with self._clock.phase("lookup"):
                    after = None if before is None else before.micro_batches[index].lookup
                    micro = self.start(micro, after)
            micro_batches.append(micro)
        return StepInput(batch, micro_batches)
