"""Tickets: for which step a lookup is, which updates it must see, and what follows it."""

from enum import StrEnum
from typing import NamedTuple, TypeAlias

from hybrid.primitives.step_timings import Flow

# A ticket as plain values; see Ticket.plain.
PlainTicket: TypeAlias = tuple[int, int, int, int, str, bool, bool]


class Purpose(StrEnum):
    """What follows a lookup."""

    PREDICT = "predict"  # nothing
    TRAIN = "train"  # gradients, by the backward pass of distributed autograd
    PREFETCH = "prefetch"  # gradients, by a call of their own


class Ticket(NamedTuple):
    """The identity of a lookup, and the updates that it must see.

    Attributes:
        trainer: index of the trainer.
        step: the step that its gradients are part of.
        version: the number of updates it must see: all before its step, or one less if it is prefetched. In
            async mode, the number of steps of its own trainer whose gradients must be applied.
        part: index of the micro-batch.
        purpose: what follows.
        followed: whether the trainer has looked up the next step before these gradients come.
        closing: whether a checkpoint may follow the update of these gradients: it is to have the rows as they
            were before that, too, since the next step is computed with those.
    """

    trainer: int
    step: int
    version: int
    part: int = 0
    purpose: Purpose = Purpose.TRAIN
    followed: bool = False
    closing: bool = False

    @property
    def plain(self) -> PlainTicket:
        """The ticket as plain values, for :meth:`of`."""
        return (*self[:4], self.purpose.value, self.followed, self.closing)

    @classmethod
    def of(cls, plain: PlainTicket) -> "Ticket":
        """Return the ticket of plain values."""
        return cls(*plain[:4], Purpose(plain[4]), *plain[5:])

    def flow(self, worker: int) -> Flow:
        """Return the identifier that spans of the call to ``worker`` share on both sides."""
        return self.trainer, self.step, self.part, worker
