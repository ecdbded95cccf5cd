"""The steps of one trainer: micro-batches, each with a lookup and a ticket that identifies its calls.

::

    sync        step s     look up s ── compute s, send its gradients
                step s+1                          look up s+1 ── compute s+1, send its gradients

    lookahead   step s     compute s, send its gradients with the lookup of s+1
    async       step s     compute s, send its gradients with the lookup of s+2

A lookup that is sent before its step begins is **prefetched**. When a pass over batches begins, no gradients
are left to send, so the lookup of its first step (in async mode, of its first two steps) has its own message.
In lookahead mode, a worker responds to the lookup of step s+1 once update s is applied.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

from hybrid.embedding.trainer.embeddings import Embeddings, ModuleTables
from hybrid.engine.hybrid_model import MicroBatch
from hybrid.primitives.step_timings import StepClock
from hybrid.updates.ticket import Purpose, Ticket
from hybrid.updates.update_rules import UpdateMode, UpdateRules

AnySamples = TypeVar("AnySamples", bound="Samples")


class Samples(Protocol):
    """What a feed requires of a batch."""

    @property
    def checksum(self) -> int:
        """Checksum of the global batch, which workers compare among trainers; 0 for no comparison."""

    @property
    def sparse_features(self) -> Any:
        """The ids, for the ``lookup`` of :class:`Embeddings` or :class:`ModuleTables`."""

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
        self, embeddings: Embeddings | ModuleTables, trainer: int, rules: UpdateRules, clock: StepClock
    ) -> None:
        self._embeddings = embeddings
        self._trainer = trainer
        self._mode = rules.mode
        self._num_micro_batches = rules.micro_batches
        self._should_prefetch = rules.mode is not UpdateMode.SYNC
        # The number of steps that are read before the first of them begins.
        self._num_ahead = 2 if rules.mode is UpdateMode.ASYNC else 1
        self._clock = clock
        self.begin(iter(()), 0)

    def begin(self, batches: Iterator[AnySamples], step: int) -> None:
        """Continue with ``batches``; the first batch is for ``step``. Drop steps that were read ahead."""
        self.step = step
        self._batches = batches
        self._first_step = step
        # The current step until it ends, and then the steps that were read ahead.
        self._steps: deque[StepInput[AnySamples]] = deque()

    def flush(self) -> None:
        """Wait until the workers have all gradients of completed steps; raise an error if a message is lost.

        The response to a prefetched lookup shows that the gradients in the same message have arrived.
        """
        for step in self._steps:
            for micro in step.micro_batches:
                if micro.lookup is not None:
                    micro.lookup.flush()
        self._embeddings.sources.flush()

    def has_next(self) -> bool:
        """Return whether there is a further step. Call this method only between steps.

        In sync mode, the call reads the next batch. In other modes, the first call after :meth:`begin` reads
        the batches of the first steps, and sends their lookups.
        """
        while len(self._steps) < self._num_ahead and self._read_step():
            pass
        return bool(self._steps)

    def __next__(self) -> StepInput[AnySamples]:
        self._clock.begin_step(self.step)
        if not self.has_next():
            raise StopIteration
        current = self._steps[0]
        if self._should_prefetch and len(self._steps) == self._num_ahead:  # it is less once the batches end
            self._read_step(current)
        return current

    def end_step(self) -> None:
        """Count the current step as completed, and drop its input."""
        self._steps.popleft()
        self.step += 1

    def with_lookup(self, micro: MicroBatch[AnySamples]) -> MicroBatch[AnySamples]:
        """Return a micro-batch with its lookup, which is sent now if it was not prefetched."""
        if micro.lookup is not None:
            return micro
        return micro._replace(lookup=self._embeddings.lookup(micro.batch.sparse_features, micro.ticket))

    def _read_step(self, carrier: StepInput[AnySamples] | None = None) -> bool:
        """Read a batch, and append its step; return whether there was a batch.

        Args:
            carrier: the step whose gradients carry the prefetched lookups; None sends the lookups now.
        """
        with self._clock.phase("data"):
            batch = next(self._batches, None)
        if batch is None:
            return False
        step = self.step + len(self._steps)
        micro_batches = []
        for index, samples in enumerate(batch.split(self._num_micro_batches)):
            # For the calls during the step, which must see all earlier updates.
            ticket = Ticket(self._trainer, step, version=step, lookup_index=index, checksum=batch.checksum)
            lookup = None
            if self._should_prefetch:
                # In async mode, a lookup does not wait for the gradients of the step before.
                version = max(self._first_step, step - 1) if self._mode is UpdateMode.ASYNC else step
                prefetch = ticket._replace(version=version, purpose=Purpose.PREFETCH)
                sent_with = None if carrier is None else carrier.micro_batches[index].lookup
                with self._clock.phase("lookup"):
                    lookup = self._embeddings.lookup(samples.sparse_features, prefetch, sent_with)
            is_last = index == self._num_micro_batches - 1
            micro_batches.append(MicroBatch(samples, ticket, lookup, is_last))
        self._steps.append(StepInput(batch, micro_batches))
        return True
