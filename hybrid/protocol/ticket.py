"""What a lookup says of itself: for which step, what it must see, and what follows."""

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
    """Who looks up, for which step, and what it must see.

    Attributes:
        trainer: index of the trainer.
        step: the step that its gradients are part of.
        version: how many updates it must see; all before its step, or one less where it is prefetched. In
            async mode, of how many steps its own trainer's gradients must be applied.
        part: which of the step's micro-batches.
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
        """It as plain values, for :meth:`of`."""
        return (*self[:4], self.purpose.value, self.followed, self.closing)

    @classmethod
    def of(cls, plain: PlainTicket) -> "Ticket":
        """The ticket of these plain values."""
        return cls(*plain[:4], Purpose(plain[4]), *plain[5:])

    def flow(self, worker: int) -> Flow:
        """What the spans of this ticket's call to ``worker`` have in common, on both sides."""
        return self.trainer, self.step, self.part, worker
