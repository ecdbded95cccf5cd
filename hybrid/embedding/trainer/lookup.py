"""A lookup under way: from the workers' answers to vectors, and back with their gradients.

Within a distributed autograd context the gradients travel with the backward pass. A lookup ahead of its
step is outside of any: its answers are plain values, and a function at their entry into the local graph
sends their gradients, in one message a worker with the next lookup where there is one::

    step s     compute s:  backward ── gradients of s, ids of s+2 ──►  worker
    step s+1   compute s+1 ...                                         update s, then look up s+2
    step s+2   wait for the vectors of s+2  ◄───────────────────────── answer
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
from hybrid.embedding.trainer.route import Assembler, Items, Results, Slot
from hybrid.errors import ClusterError
from hybrid.primitives.deferred_response import Watched
from hybrid.primitives.step_timings import OpenSpan, StepClock
from hybrid.protocol.ticket import Purpose, Ticket


class TableSource(Protocol):
    """Whoever answers lookups for one worker: a stub across RPC, or the tables themselves."""

    def lookup(self, ticket: Ticket, items: Sequence[Item]) -> Watched[list[Tensor]]: ...

    def send_gradients(self, ticket: Ticket, grads: Sequence[Tensor]) -> Watched[list[Tensor]]:
        """Send gradients; the answer is empty."""
        ...

    def exchange(
        self, ticket: Ticket, grads: Sequence[Tensor], next_ticket: Ticket, items: Sequence[Item]
    ) -> Watched[list[Tensor]]:
        """Send gradients and look up, in one message."""
        ...

    def skip(self) -> Watched[list[Tensor]]:
        """Send nothing, in the place of a lookup ahead, of gradients or of both; the answer is empty.

        Trainers that ask together (``host_aggregation.py``) wait for each other's word.
        """
        ...


class Form(Protocol):
    """What the answers to a lookup become: one matrix, say, or the vectors of each call by themselves."""

    def outputs(self, results: Results) -> tuple[Tensor, ...]:
        """What the lookup gives, of the answers of all workers."""
        ...

    def gradients(self, grads: Sequence[Tensor]) -> Iterable[tuple[Slot, Tensor]]:
        """The gradient of each answer, in no view of a larger tensor, of those of the outputs."""
        ...


class Columns(NamedTuple):
    """The vectors of some features.

    Attributes:
        assembler: has the vectors, and takes their gradients.
        columns_F: where each feature's vector begins among those of all; None if they are all, in order.
    """

    assembler: Assembler
    columns_F: Tensor | None


class SideBySide(NamedTuple):
    """One matrix ``pooled_BE``: the features' vectors side by side.

    Attributes:
        columns: the features, by route; none of no samples.
        width: of all vectors of a sample together.
    """

    columns: Sequence[Columns]
    width: int

    def outputs(self, results: Results) -> tuple[Tensor, ...]:
        if not self.columns:
            return (torch.empty(0, self.width),)
        vectors = [part.assembler.vectors(results) for part in self.columns]
        if self.columns[0].columns_F is None:
            return (vectors[0].flatten(1),)
        pooled_BE = vectors[0].new_empty(len(vectors[0]), self.width)
        for (_, columns_F), vectors_BFD in zip(self.columns, vectors, strict=True):
            assert columns_F is not None
            kernels.place_columns(vectors_BFD.contiguous().numpy(), columns_F.numpy(), pooled_BE.numpy())
        return (pooled_BE,)

    def gradients(self, grads: Sequence[Tensor]) -> Iterator[tuple[Slot, Tensor]]:
        grad_BE = in_memory_of_its_own(*grads)
        for part in self.columns:
            yield from part.assembler.gradients(_of_part(grad_BE, part))


class Outbox:
    """The gradients on their way to all workers, by messages of their own."""

    def __init__(self) -> None:
        self._sent: list[Watched[object]] = []

    def add(self, sending: Watched[object]) -> None:
        """Keep an eye on ``sending``; raise what earlier ones that have arrived have come to."""
        arrived = [each for each in self._sent if each.done()]
        self._sent = [each for each in self._sent if each not in arrived]
        self._sent.append(sending)
        for each in arrived:
            each.wait()

    def settle(self) -> None:
        """Return once all have arrived; raise what they have come to."""
        sent, self._sent = self._sent, []
        for each in sent:
            each.wait()


class Lookup:
    """A lookup under way.

    Args:
        ticket: for which step, and what follows.
        items: what each worker is asked for.
        form: what the answers become.
        is_of_nothing: whether it is of no samples, for which nobody is asked.

    Attributes:
        is_followed, is_closing: what the ticket of its gradients says (:class:`Ticket`).
    """

    def __init__(
        self,
        ticket: Ticket,
        items: Items,
        form: Form,
        sources: Mapping[int, TableSource],
        outbox: Outbox,
        clock: StepClock,
        is_of_nothing: bool = False,
    ) -> None:
        self.is_followed = self.is_closing = False
        self._ticket = ticket
        self._items = items
        self._form = form
        self._sources = sources
        self._outbox = outbox
        self._clock = clock
        self._next: Lookup | None = None
        self._answers: dict[int, Watched[list[Tensor]]] = {}
        self._wire_dtype = torch.float32
        self._sizes = {worker: len(asked) for worker, asked in items.items()}
        self._is_of_nothing = is_of_nothing

    def start(self) -> None:
        """Ask the workers."""
        for worker, source in self._sources.items():
            lookup = partial(source.lookup, self._ticket, self._items[worker])
            self._ask(worker, source.skip if self._is_of_nothing else lookup)

    def start_with_gradients_of(self, earlier: Lookup) -> None:
        """Ask the workers when the gradients of ``earlier`` leave for them."""
        earlier._next = self

    def settle(self) -> None:
        """Return once the workers have answered, and so the gradients have arrived that this left with."""
        for answer in self._answers.values():
            answer.wait()

    def wait(self) -> Tensor:
        """The first output: ``pooled_BE``, of a lookup that gives nothing else."""
        return self.outputs()[0]

    def outputs(self) -> tuple[Tensor, ...]:
        """The outputs of its form, once every worker has answered.

        Raises:
            ClusterError: nobody was asked, since the gradients that this was to leave with have not left.
        """
        if self._answers.keys() != self._sizes.keys():
            raise ClusterError(f"step {self._ticket.step}: its lookup has not left with earlier gradients")
        tensors = [tensor for worker in self._sizes for tensor in self._answers[worker].wait()]
        self._answers = {}  # would hold them longer than anybody needs them
        # Autograd records the use of plain values only if an input of it requires a gradient.
        anchor = torch.zeros(0, requires_grad=self._ticket.purpose is Purpose.PREFETCH)
        with self._clock.span("join"):
            outputs: tuple[Tensor, ...] = _Assemble.apply(anchor, self, *tensors)  # type: ignore[no-untyped-call]
        return outputs

    def assemble(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The outputs, of the tensors of all answers, worker after worker."""
        self._wire_dtype = next((tensor.dtype for tensor in tensors), self._wire_dtype)
        rest = (t.float() if t.dtype is torch.bfloat16 else t for t in tensors)
        results = {worker: list(islice(rest, size)) for worker, size in self._sizes.items()}
        return self._form.outputs(results)

    def take_apart(self, grads_of_outputs: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients of these tensors; none where they are sent."""
        with self._clock.span("take apart"):
            grads: dict[int, dict[int, Tensor]] = {worker: {} for worker in self._sizes}
            for (worker, place), grad in self._form.gradients(grads_of_outputs):
                grads[worker][place] = grad.to(self._wire_dtype)
            in_order = {worker: [of[place] for place in sorted(of)] for worker, of in grads.items()}
        if self._ticket.purpose is not Purpose.PREFETCH:
            return [grad for of_worker in in_order.values() for grad in of_worker]
        for worker, of_worker in in_order.items():
            self._send(worker, of_worker)
        return [None] * sum(self._sizes.values())

    def _send(self, worker: int, grads: Sequence[Tensor]) -> None:
        message, following = self._message(worker, grads), self._next
        if following is None:
            with self._clock.span("serialise") as span:
                _count(span, grads)
                sending = message()
            self._outbox.add(sending)
        else:
            following._ask(worker, message, grads)

    def _message(self, worker: int, grads: Sequence[Tensor]) -> Callable[[], Watched[list[Tensor]]]:
        """Sends gradients, with the next lookup where there is one."""
        source, following = self._sources[worker], self._next
        ticket = self._ticket._replace(followed=self.is_followed, closing=self.is_closing)
        if self._is_of_nothing:
            return source.skip
        if following is None or following._is_of_nothing:
            return partial(source.send_gradients, ticket, grads)
        return partial(source.exchange, ticket, grads, following._ticket, following._items[worker])

    def _ask(
        self, worker: int, send: Callable[[], Watched[list[Tensor]]], grads: Sequence[Tensor] = ()
    ) -> None:
        with self._clock.span("serialise") as span:
            _count(span, grads, self._items[worker])
            self._answers[worker] = answer = send()
        if (call := self._clock.begin("call", flow=self._ticket.flow(worker))) is not None:
            answer.add_done_callback(lambda _: call.close())


def _count(span: OpenSpan | None, grads: Sequence[Tensor], items: Sequence[Item] = ()) -> None:
    """Note the bytes of a message."""
    if span is not None:
        tensors = [part for _, bags in items for part in bags if isinstance(part, Tensor)]
        span.num_bytes = sum(tensor.nbytes for tensor in (*grads, *tensors))


def _of_part(grad_BE: Tensor, part: Columns) -> Tensor:
    if part.columns_F is None:
        return grad_BE.view(part.assembler.shape_BFD)
    grad_BFD = grad_BE.new_empty(part.assembler.shape_BFD)
    kernels.pick_columns(grad_BFD.numpy(), part.columns_F.numpy(), grad_BE.numpy())
    return grad_BFD


class _Assemble(torch.autograd.Function):
    """From the answers of the workers to the outputs of a lookup, and back with their gradients."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, lookup: Lookup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.lookup = lookup
        return lookup.assemble(tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.lookup.take_apart(grads)


def in_memory_of_its_own(grad: Tensor) -> Tensor:
    """``grad``, contiguous: RPC would send all that a view is of.

    And RPC ends the process that is to send an empty view which starts beyond its storage.
    """
    storage_bytes = grad.untyped_storage().nbytes()
    if grad.is_contiguous() and grad.storage_offset() == 0 and storage_bytes == grad.nbytes:
        return grad
    return grad.clone(memory_format=torch.contiguous_format)
