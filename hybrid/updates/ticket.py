"""Tickets, which identify lookups: trainer, step, index, required updates, and purpose."""

from enum import StrEnum
from typing import NamedTuple, TypeAlias

# A ticket as plain values; see Ticket.plain.
PlainTicket: TypeAlias = tuple[int, int, int, int, str, int]

# The end of an error message that names two trainers.
DIFFERENT_BATCHES = (
    "read different batches. All trainers must read the same batches; each gets its slice. Use the same seed "
    "on all trainers where the script shuffles or samples the data (samplers of torch already have it)"
)


class Purpose(StrEnum):
    """The purpose of a lookup: prediction, training, or training with a lookup before the step begins."""

    PREDICT = "predict"  # no gradients follow
    TRAIN = "train"  # the backward pass brings the gradients
    PREFETCH = "prefetch"  # a separate call brings the gradients


class LookupKey(NamedTuple):
    """The fields of a ticket that identify the lookup."""

    trainer: int
    step: int
    lookup_index: int
    purpose: Purpose


class Ticket(NamedTuple):
    """The identity of a lookup, the updates that must precede it, and a checksum of its global batch."""

    trainer: int
    step: int  # the step that uses the rows; its update applies the gradients
    # Number of updates that must precede the lookup. In async mode, the number of steps of this trainer whose
    # gradients must be applied.
    version: int
    # Index among the lookups of this trainer and step. A configured run has one lookup per micro-batch; a
    # custom loop may have several per batch.
    lookup_index: int = 0
    purpose: Purpose = Purpose.TRAIN  # whether gradients follow, and how they are sent
    # Checksum of the global batch, if every trainer reads all of it; 0 if trainers read only their slices.
    checksum: int = 0

    @property
    def key(self) -> LookupKey:
        """The identity of the lookup. A lookup for a new batch of the same step has the same key."""
        return LookupKey(self.trainer, self.step, self.lookup_index, self.purpose)

    @property
    def plain(self) -> PlainTicket:
        """The ticket as plain values; :meth:`of` is the inverse."""
        return self.trainer, self.step, self.version, self.lookup_index, self.purpose.value, self.checksum

    @classmethod
    def of(cls, plain: PlainTicket) -> "Ticket":
        trainer, step, version, lookup_index, purpose, checksum = plain
        return cls(trainer, step, version, lookup_index, Purpose(purpose), checksum)
