"""A pending lookup: it converts workers' responses to vectors, and gradients of vectors to messages.

In ``sync`` mode, distributed autograd sends the gradients of a lookup. A prefetched lookup is outside of
distributed autograd, and its responses are plain values. The autograd function ``_Assemble`` converts the
responses, and its backward pass sends the gradients. A message with gradients also carries the requests of a
later lookup, if one is attached (``hybrid/engine/step_engine.py``).

Rows in bfloat16 arrive as int16, which can have no gradient. In ``sync`` mode, a response therefore ends with
a tensor of zeros for each tensor of int16. The gradient of the rows is sent as the gradient of these zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid.embedding.bags import Item
from hybrid.embedding.table_source import LookupRequest, TableSource
from hybrid.embedding.trainer.routes import Items, Responses, Slot
from hybrid.errors import ClusterError
from hybrid.primitives.device_copies import to_device
from hybrid.primitives.pending_result import PendingResult
from hybrid.primitives.step_timings import OpenSpan, StepClock
from hybrid.updates.ticket import Purpose, Ticket


class OutputLayout(Protocol):
    """The form of the outputs of a lookup: one matrix, or one tensor per call of ``hybrid.Embedding``."""

    def outputs(self, responses: Responses) -> tuple[Tensor, ...]:
        """Convert the responses of all workers to the outputs."""

    def gradients(self, grads: Sequence[Any]) -> Iterable[tuple[Slot, Tensor]]:
        """Convert the gradients of the outputs to gradients of the responses.

        Args:
            grads: the gradient of each output; with several outputs, None for one that the loss does not use.
        """


class TableSources:
    """The tables of each worker, and the messages with gradients that workers have not confirmed yet."""

    def __init__(self, sources: Mapping[int, TableSource], clock: StepClock) -> None:
        self.by_worker = sources
        self.clock = clock
        self._sent: list[PendingResult[object]] = []

    def add(self, sending: PendingResult[object]) -> None:
        """Add a message that has just been sent. If an earlier message has failed, raise its error."""
        arrived = [each for each in self._sent if each.done()]
        self._sent = [*(each for each in self._sent if each not in arrived), sending]
        for each in arrived:
            each.wait()

    def flush(self) -> None:
        """Wait until workers have confirmed all messages. If a message has failed, raise its error."""
        sent = self._sent
        self._sent = []
        for each in sent:
            each.wait()


class Lookup:
    """A lookup of one trainer on all workers, from its requests to its gradients.

    Attributes:
        is_prefetched: whether :meth:`send_gradients` sends the gradients, instead of distributed autograd.
        ranks_BF: on a GPU, for each sample and feature, the index of the feature's row in the first output.
            None if the first output already has one vector per sample and feature.
    """

    def __init__(self, ticket: Ticket, items: Items, layout: OutputLayout, sources: TableSources) -> None:
        self.is_prefetched = ticket.purpose is Purpose.PREFETCH
        self._ticket = ticket
        self._items = items
        self._layout = layout
        self._sources = sources
        self._clock = sources.clock
        self._next: Lookup | None = None  # its requests are sent with the gradients of this lookup
        self._responses: dict[int, PendingResult[list[Tensor]]] = {}  # by worker
        # Of the received tensors: the type of the vectors that are not rows in bfloat16, and which ones are.
        self._wire_dtype = torch.float32
        self._is_bits: list[bool] = []
        self.ranks_BF: Tensor | None = None

    def send_or_attach(self, previous: Lookup | None) -> Lookup:
        """Send the requests now, or later with the gradients of ``previous`` if it is given. Return self."""
        if previous is not None:
            previous._next = self
            return self
        for worker, items in self._items.items():
            with self._clock.span("send") as span:
                _record_bytes(span, (), items)
                response = self._sources.by_worker[worker].lookup(self._ticket, items)
            self._expect(worker, response)
        return self

    def flush(self) -> None:
        """Wait for the responses. Workers then also have the gradients that were sent with the requests."""
        for response in self._responses.values():
            response.wait()

    def wait(self) -> Tensor:
        """Wait for the responses, and return the vectors of the samples, ``pooled_BE``."""
        output = self.outputs()[0]
        if self.ranks_BF is None:
            return output
        rows_UD = to_device(output, self.ranks_BF.device)
        # Its backward pass adds the gradients of a row in an order that depends on the ids alone.
        return F.embedding(self.ranks_BF, rows_UD).flatten(1)

    def outputs(self) -> tuple[Tensor, ...]:
        """Wait for the responses, and return the outputs. Call this once; it frees the responses.

        Raises:
            ClusterError: the requests, which go with the gradients of an earlier lookup, were never sent.
            Exception: an error of a worker or of its connection.
        """
        if self._responses.keys() != self._items.keys():
            raise ClusterError(
                f"step {self._ticket.step}: no lookup was sent, because the earlier gradients were not"
            )
        responses = [(self._responses[worker].wait(), len(items)) for worker, items in self._items.items()]
        self._responses = {}  # free them early
        tensors = [tensor for response, size in responses for tensor in response[:size]]
        zeros = [tensor for response, size in responses for tensor in response[size:]]
        # Autograd calls _Assemble.backward only if an input requires a gradient; received vectors do not.
        anchor = torch.zeros(0, requires_grad=self.is_prefetched)
        with self._clock.span("assemble"):
            outputs: tuple[Tensor, ...] = _Assemble.apply(anchor, self, *tensors, *zeros)  # type: ignore[no-untyped-call]
        return outputs

    def assemble(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Convert the vectors of all workers to the outputs; ignore the zeros at the end of ``tensors``."""
        self._is_bits = [tensor.dtype is torch.int16 for tensor in tensors]  # rows in bfloat16
        floats = [t.dtype for t, is_bits in zip(tensors, self._is_bits, strict=True) if not is_bits]
        self._wire_dtype = next(iter(floats), self._wire_dtype)
        stored = (t.view(torch.bfloat16) if t.dtype is torch.int16 else t for t in tensors)
        rest = (t.float() if t.dtype is torch.bfloat16 else t for t in stored)
        responses = {worker: list(islice(rest, len(request))) for worker, request in self._items.items()}
        return self._layout.outputs(responses)

    def split_gradients(self, output_grads: Sequence[Tensor | None]) -> dict[int, list[Tensor]]:
        """Convert gradients of the outputs to gradients of each worker's vectors, one tensor per request."""
        with self._clock.span("split gradients"):
            by_slot = {slot: g.to(self._wire_dtype) for slot, g in self._layout.gradients(output_grads)}
        return {w: [by_slot[w, i] for i in range(len(items))] for w, items in self._items.items()}

    def response_gradients(self, by_worker: Mapping[int, Sequence[Tensor]]) -> list[Tensor | None]:
        """Return a gradient for each received tensor: for vectors (None if int16), then for the zeros."""
        grads = list(zip(chain.from_iterable(by_worker.values()), self._is_bits, strict=False))
        of_items = [None if is_bits else grad for grad, is_bits in grads]
        return of_items + [grad for grad, is_bits in grads if is_bits]

    def send_gradients(self, by_worker: Mapping[int, Sequence[Tensor]]) -> None:
        """Send gradients to the workers. If a later lookup is attached, the messages carry its requests."""
        for worker, grads in by_worker.items():
            next_lookup = self._next
            request = (
                None
                if next_lookup is None
                else LookupRequest(next_lookup._ticket, next_lookup._items[worker])
            )
            with self._clock.span("send") as span:
                _record_bytes(span, grads, () if request is None else request.items)
                response = self._sources.by_worker[worker].send_gradients(self._ticket, grads, request)
            if next_lookup is None:
                self._sources.add(response)
            else:
                next_lookup._expect(worker, response)

    def _expect(self, worker: int, response: PendingResult[list[Tensor]]) -> None:
        self._responses[worker] = response
        call = self._clock.begin("call")
        if call is not None:
            response.add_done_callback(lambda _: call.close())


def _record_bytes(span: OpenSpan | None, grads: Sequence[Tensor], items: Sequence[Item]) -> None:
    if span is not None:
        tensors = [part for _, bags in items for part in bags if isinstance(part, Tensor)]
        span.num_bytes = sum(tensor.nbytes for tensor in (*grads, *tensors))


class _Assemble(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, lookup: Lookup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.lookup = lookup
        outputs = lookup.assemble(tensors)
        ctx.set_materialize_grads(len(outputs) == 1)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        lookup: Lookup = ctx.lookup
        by_worker = lookup.split_gradients(grads)
        if lookup.is_prefetched:
            lookup.send_gradients(by_worker)
            return (None,) * len(ctx.needs_input_grad)
        return None, None, *lookup.response_gradients(by_worker)


def contiguous_copy(grad: Tensor) -> Tensor:
    """Return ``grad`` if it is contiguous and fills its storage, else a copy that does.

    RPC sends the whole storage of a view, and crashes on an empty view that starts beyond its storage.
    """
    storage_bytes = grad.untyped_storage().nbytes()
    if grad.is_contiguous() and grad.storage_offset() == 0 and storage_bytes == grad.nbytes:
        return grad
    return grad.clone(memory_format=torch.contiguous_format)
