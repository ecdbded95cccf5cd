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

        If the ticket's purpose is ``TRAIN``, the vectors require gradients, and the backward pass must reach
        each lookup exactly once. If the purpose is ``PREFETCH``, the vectors are plain values, and the caller
        sends gradients by :meth:`send_gradients`. If it is ``PREDICT``, no gradients follow.

        Rows in bfloat16 can arrive as int16, for which autograd computes no gradients. So for ``TRAIN``, the
        result ends with a tensor of zeros for each int16 tensor. The zeros receive the gradient.
        """

    def send_gradients(
        self, ticket: Ticket, grads: Sequence[Tensor], next_lookup: LookupRequest | None = None
    ) -> PendingResult[list[Tensor]]:
        """Send the gradients of a prefetched lookup, one per item, in the order of the items.

        Args:
            next_lookup: a lookup of a later step, which is sent in the same message.

        Returns:
            The vectors of ``next_lookup``; an empty list if ``next_lookup`` is None.
        """
