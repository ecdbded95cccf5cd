"""A pending lookup: from the responses of the workers to vectors, and from their gradients to messages.

In ``sync`` mode a lookup is part of a distributed autograd context, which carries its gradients. A prefetched
lookup is outside of any context: its responses are plain values, and an autograd function at their entry into
the local graph sends their gradients, in one message per worker with the next lookup if there is one::

    step s     compute s:  backward ── gradients of s, ids of s+2 ──►  worker
    step s+1   compute s+1 ...                                         update s, then look up s+2
    step s+2   wait for the vectors of s+2  ◄───────────────────────── response
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hybrid.embedding import kernels
from hybrid.embedding.bags import Item
from hybrid.embedding.trainer.row_routes import Assembler, Items, Responses, Slot
from hybrid.errors import ClusterError
from hybrid.primitives.deferred_response import ObservableResult
from hybrid.primitives.step_timings import OpenSpan, StepClock
from hybrid.protocol.ticket import Purpose, Ticket


class TableSource(Protocol):
    """What answers the lookups of one worker: a stub of a remote worker, or the tables themselves."""

    def lookup(self, ticket: Ticket, items: Sequence[Item]) -> ObservableResult[list[Tensor]]: ...

    def send_gradients(self, ticket: Ticket, grads: Sequence[Tensor]) -> ObservableResult[list[Tensor]]:
        """Send gradients; the response is empty."""
        ...

    def exchange(
        self, ticket: Ticket, grads: Sequence[Tensor], next_ticket: Ticket, items: Sequence[Item]
    ) -> ObservableResult[list[Tensor]]:
        """Send gradients and look up, in one message."""
        ...

    def skip(self) -> ObservableResult[list[Tensor]]:
        """Send nothing in place of a prefetched lookup or its gradients; the response is empty.

        With aggregation per host (``host_aggregation.py``), the other trainers of the host wait for this
        call.
        """
        ...


class OutputLayout(Protocol):
    """How responses become the outputs of a lookup: one matrix, or a tensor per call."""

    def outputs(self, responses: Responses) -> tuple[Tensor, ...]:
        """Return the outputs, given the responses of all workers."""
        ...

    def gradients(self, grads: Sequence[Tensor]) -> Iterable[tuple[Slot, Tensor]]:
        """Return the gradient of each response tensor, given those of the outputs; none is a view."""
        ...


class ConcatenatedFeatures(NamedTuple):
    """One output ``pooled_BE`` with the vectors of all features of a sample concatenated.

    Attributes:
        routes: the assembler of each route, and the first output column of each of its features; None for all
            features, in order. Empty without samples.
        width: E, number of output columns.
    """

    routes: Sequence[tuple[Assembler, Tensor | None]]
    width: int

    def outputs(self, responses: Responses) -> tuple[Tensor, ...]:
        if not self.routes:
            return (torch.empty(0, self.width),)
        vectors = [assembler.vectors(responses) for assembler, _ in self.routes]
        if self.routes[0][1] is None:
            return (vectors[0].flatten(1),)
        pooled_BE = vectors[0].new_empty(len(vectors[0]), self.width)
        for (_, columns_F), vectors_BFD in zip(self.routes, vectors, strict=True):
            assert columns_F is not None
            kernels.scatter_columns(vectors_BFD.contiguous().numpy(), columns_F.numpy(), pooled_BE.numpy())
        return (pooled_BE,)

    def gradients(self, grads: Sequence[Tensor]) -> Iterator[tuple[Slot, Tensor]]:
        grad_BE = contiguous_copy(*grads)
        for assembler, columns_F in self.routes:
            if columns_F is None:
                grad_BFD = grad_BE.view(assembler.shape_BFD)
            else:
                grad_BFD = grad_BE.new_empty(assembler.shape_BFD)
                kernels.gather_columns(grad_BFD.numpy(), columns_F.numpy(), grad_BE.numpy())
            yield from assembler.gradients(grad_BFD)


class Outbox:
    """Connections to the workers, and pending messages with gradients and no lookup.

    Args:
        sources: by worker that holds a shard, what answers requests.
        clock: records timings.
    """

    def __init__(self, sources: Mapping[int, TableSource], clock: StepClock) -> None:
        self.sources = sources
        self.clock = clock
        self._sent: list[ObservableResult[object]] = []

    def add(self, sending: ObservableResult[object]) -> None:
        """Add a pending message; raise the error of a completed one."""
        arrived = [each for each in self._sent if each.done()]
        self._sent = [each for each in self._sent if each not in arrived]
        self._sent.append(sending)
        for each in arrived:
            each.wait()

    def flush(self) -> None:
        """Wait until all messages have arrived; raise their errors."""
        sent, self._sent = self._sent, []
        for each in sent:
            each.wait()


class Lookup:
    """A pending lookup.

    Args:
        ticket: identifies trainer, step and purpose.
        items: the request to each worker.
        layout: how responses become outputs.
        outbox: sends the messages.
        is_empty: whether there are no samples, so that workers get no request.

    Attributes:
        is_followed, is_closing: fields of the ticket of its gradients (:class:`Ticket`).
    """

    def __init__(
        self,
        ticket: Ticket,
        items: Items,
        layout: OutputLayout,
        outbox: Outbox,
        is_empty: bool = False,
    ) -> None:
        self.is_followed = self.is_closing = False
        self._ticket = ticket
        self._items = items
        self._layout = layout
        self._outbox = outbox
        self._clock = outbox.clock
        self._next: Lookup | None = None
        self._responses: dict[int, ObservableResult[list[Tensor]]] = {}
        self._wire_dtype = torch.float32
        self._sizes = {worker: len(request) for worker, request in items.items()}
        self._is_empty = is_empty

    def start(self, after: Lookup | None = None) -> Lookup:
        """Send the requests, now or with the gradients of an earlier lookup; return this lookup."""
        if after is not None:
            after._next = self
            return self
        for worker, request in self._items.items():
            source = self._outbox.sources[worker]
            lookup = partial(source.lookup, self._ticket, request)
            self._send_request(worker, source.skip if self._is_empty else lookup)
        return self

    def flush(self) -> None:
        """Wait for the responses; the gradients that were sent with the requests have then arrived."""
        for response in self._responses.values():
            response.wait()

    def wait(self) -> Tensor:
        """Return the first output, ``pooled_BE`` of a lookup with one output."""
        return self.outputs()[0]

    def outputs(self) -> tuple[Tensor, ...]:
        """Wait for the responses, and return the outputs.

        Raises:
            ClusterError: no request was sent, because the earlier gradients were not.
        """
        if self._responses.keys() != self._sizes.keys():
            raise ClusterError(f"step {self._ticket.step}: its lookup was not sent with earlier gradients")
        tensors = [tensor for worker in self._sizes for tensor in self._responses[worker].wait()]
        self._responses = {}  # free them early
        # Autograd records a function of plain values only if one of its inputs requires a gradient.
        anchor = torch.zeros(0, requires_grad=self._ticket.purpose is Purpose.PREFETCH)
        with self._clock.span("join"):
            outputs: tuple[Tensor, ...] = _Assemble.apply(anchor, self, *tensors)  # type: ignore[no-untyped-call]
        return outputs

    def assemble(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the outputs, given the tensors of all responses, worker by worker."""
        self._wire_dtype = next((tensor.dtype for tensor in tensors), self._wire_dtype)
        rest = (t.float() if t.dtype is torch.bfloat16 else t for t in tensors)
        responses = {worker: list(islice(rest, size)) for worker, size in self._sizes.items()}
        return self._layout.outputs(responses)

    def response_gradients(self, output_grads: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the gradients of these tensors; None for each if they are sent here."""
        with self._clock.span("take apart"):
            grads: dict[int, dict[int, Tensor]] = {worker: {} for worker in self._sizes}
            for (worker, index), grad in self._layout.gradients(output_grads):
                grads[worker][index] = grad.to(self._wire_dtype)
            ordered = {worker: [of[index] for index in sorted(of)] for worker, of in grads.items()}
        if self._ticket.purpose is not Purpose.PREFETCH:
            return [grad for of_worker in ordered.values() for grad in of_worker]
        for worker, of_worker in ordered.items():
            self._send_gradients(worker, of_worker)
        return [None] * sum(self._sizes.values())

    def _send_gradients(self, worker: int, grads: Sequence[Tensor]) -> None:
        """Send gradients to a worker, in one message with the next lookup if there is one."""
        source, following = self._outbox.sources[worker], self._next
        ticket = self._ticket._replace(followed=self.is_followed, closing=self.is_closing)
        send: Callable[[], ObservableResult[list[Tensor]]]
        if self._is_empty:
            send = source.skip
        elif following is None or following._is_empty:
            send = partial(source.send_gradients, ticket, grads)
        else:
            send = partial(source.exchange, ticket, grads, following._ticket, following._items[worker])
        if following is not None:
            following._send_request(worker, send, grads)
            return
        with self._clock.span("serialise") as span:
            _note_bytes(span, grads)
            message = send()
        self._outbox.add(message)

    def _send_request(
        self, worker: int, send: Callable[[], ObservableResult[list[Tensor]]], grads: Sequence[Tensor] = ()
    ) -> None:
        with self._clock.span("serialise") as span:
            _note_bytes(span, grads, self._items[worker])
            self._responses[worker] = response = send()
        if (call := self._clock.begin("call", flow=self._ticket.flow(worker))) is not None:
            response.add_done_callback(lambda _: call.close())


def _note_bytes(span: OpenSpan | None, grads: Sequence[Tensor], items: Sequence[Item] = ()) -> None:
    """Record the bytes of a message."""
    if span is not None:
        tensors = [part for _, bags in items for part in bags if isinstance(part, Tensor)]
        span.num_bytes = sum(tensor.nbytes for tensor in (*grads, *tensors))


class _Assemble(torch.autograd.Function):
    """From response tensors to the outputs of a lookup."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, lookup: Lookup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.lookup = lookup
        return lookup.assemble(tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.lookup.response_gradients(grads)


def contiguous_copy(grad: Tensor) -> Tensor:
    """Return ``grad`` in contiguous memory that holds nothing else; a copy if it is a view.

    RPC sends the whole storage of a view, and crashes on an empty view that starts beyond its storage.
    """
    storage_bytes = grad.untyped_storage().nbytes()
    if grad.is_contiguous() and grad.storage_offset() == 0 and storage_bytes == grad.nbytes:
        return grad
    return grad.clone(memory_format=torch.contiguous_format)
