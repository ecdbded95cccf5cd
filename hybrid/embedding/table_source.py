"""The calls from a trainer to the tables of one worker."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from hybrid.embedding.bags import Item
from hybrid.primitives.pending_result import PendingResult
from hybrid.updates.ticket import Ticket


class LookupRequest(NamedTuple):
    """A lookup that is sent in one message with the gradients of an earlier step."""

    ticket: Ticket
    items: Sequence[Item]


class TableSource(Protocol):
    """The tables of one worker, or a stub that sends the calls to the worker."""

    def lookup(self, ticket: Ticket, items: Sequence[Item]) -> PendingResult[list[Tensor]]:
        """Look up the vectors of each item, (bags, D), once the updates that the ticket requires are applied.

        For ``Purpose.TRAIN``, the vectors require gradients. The backward pass must reach each lookup exactly
        once. The lookup's gradients then become part of the update of the ticket's step. For
        ``Purpose.PREFETCH``, the vectors are plain values, and :meth:`send_gradients` takes their gradients.
        Rows in bfloat16 are sent as int16, unless ``embedding.wire_dtype`` rounds vectors for training, or
        the run is in float64. Autograd computes no gradients of integers. So for ``Purpose.TRAIN``, the
        result ends with a tensor of zeros for each int16 tensor, which receives the gradient of the rows.
        """

    def send_gradients(
        self, ticket: Ticket, grads: Sequence[Tensor], attached: LookupRequest | None = None
    ) -> PendingResult[list[Tensor]]:
        """Send the gradients of a prefetched lookup, one per item, in the order of the items.

        Args:
            attached: a lookup of a later step, to send in the same message. The result is its vectors, or
                an empty list without a lookup. The trainer waits for the vectors anyway, so the receiving
                thread may apply an update that these gradients complete.
        """
