"""The calls from a trainer to the tables of one worker."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from hybrid.embedding.bags import Item
from hybrid.primitives.pending_result import PendingResult
from hybrid.updates.ticket import Ticket


class LookupRequest(NamedTuple):
    """The arguments of :meth:`TableSource.lookup`, for a message that also carries gradients."""

    ticket: Ticket
    items: Sequence[Item]


class TableSource(Protocol):
    """The tables of one worker, or a stub of them."""

    def lookup(self, ticket: Ticket, items: Sequence[Item]) -> PendingResult[list[Tensor]]:
        """Return pooled vectors, one tensor per item, once the updates that the ticket requires are applied.

        Unless vectors are rounded, rows in bfloat16 are sent as int16. For ``Purpose.TRAIN``, the result then
        ends with zeros for each such tensor, which have the gradients of the rows, because autograd gives
        integers none. A message has one value for all of these zeros.

        For ``Purpose.TRAIN``, the vectors require gradients. The backward pass must reach each lookup exactly
        once. The lookup's gradients then become part of the update of the ticket's step. For
        ``Purpose.PREFETCH``, the vectors are plain values, and :meth:`send_gradients` takes their gradients.
        """

    def send_gradients(
        self, ticket: Ticket, grads: Sequence[Tensor], following: LookupRequest | None = None
    ) -> PendingResult[list[Tensor]]:
        """Send the gradients of a prefetched lookup, one per item, in the order of the items.

        Args:
            following: a lookup in the same message, whose vectors are the result. If given, this call
                applies an update that the gradients complete; see :meth:`UpdateBarrier.contribute`.
        """
