"""The vectors of a forward pass: looked up before the module runs, or when it calls a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybrid.custom_loop.call_sites import CallKey, CallSite, call_key
from hybrid.custom_loop.embedding_modules import TableCall, TableModule
from hybrid.custom_loop.global_batches import LocalBatch
from hybrid.custom_loop.loop_warnings import LoopWarnings
from hybrid.embedding.trainer.lookup import Lookup
from hybrid.embedding.trainer.module_lookups import ModuleTables, TableRequest
from hybrid.engine.hybrid_model import to_device
from hybrid.engine.update_guard import Decided
from hybrid.protocol.ticket import Purpose, Ticket
from hybrid.server.barrier import UpdateBarrier

_ROWS_PER_LOOKUP = 1 << 16


@dataclass
class ForwardPass:
    """A forward pass that is running.

    Attributes:
        batch: the batch of the pass; None for a call without a batch.
        ticket: ticket of its lookups.
        prefetched: the lookup that left before the pass, until its vectors are used.
        vectors: vectors by call.
        lookups: lookups whose vectors were used.
        zeros: the zero of each of these; see :meth:`ModuleTables.lookup`.
    """

    batch: LocalBatch | None
    ticket: Ticket
    prefetched: Lookup | None = None
    vectors: dict[CallKey, Tensor] = field(default_factory=dict)
    lookups: list[Lookup] = field(default_factory=list)
    zeros: list[Tensor] = field(default_factory=list)


class ForwardPasses:
    """The forward passes of one trainer: one that trains at most, and one that evaluates.

    Args:
        tables: tables of the module.
        device: device of the vectors.
        trainer: rank of the trainer.
        loop_warnings: warns about computed ids.
        before_gradients: called before gradients of a lookup leave for the workers.

    Attributes:
        sites: the calls that every batch is expected to have, in the order of their first occurrence.
        training, evaluation: the pass of each kind, or None.
    """

    def __init__(
        self,
        tables: ModuleTables,
        device: torch.device,
        trainer: int,
        loop_warnings: LoopWarnings,
        before_gradients: Callable[..., None],
    ) -> None:
        self._tables = tables
        self._device = device
        self._trainer = trainer
        self._warnings = loop_warnings
        self._before_gradients = before_gradients
        self.sites: dict[CallSite, None] = {}
        self.training: ForwardPass | None = None
        self.evaluation: ForwardPass | None = None

    def evaluate(self, batch: LocalBatch, step: int) -> ForwardPass:
        """Begin a pass without training, and send its lookup."""
        ticket = self._evaluation_ticket(step)
        return ForwardPass(batch, ticket, self._tables.lookup(batch.sparse_features, ticket))

    def _evaluation_ticket(self, step: int) -> Ticket:
        return Ticket(self._trainer, step, step, purpose=Purpose.PREDICT)

    def vectors(self, call: TableCall, step: int) -> Tensor:
        """Return the vectors of a call, (ids or bags, D), on the device."""
        current = self.training if torch.is_grad_enabled() else self.evaluation
        if current is None:
            if torch.is_grad_enabled():
                raise RuntimeError(
                    "a module with tables trains on the batches of cluster.batches(...); call it on other "
                    "tensors under torch.no_grad()"
                )
            current = ForwardPass(None, self._evaluation_ticket(step))
        key = call_key(call)
        if key not in current.vectors:
            self.use_prefetched(current)
        if key not in current.vectors:
            # The prefetched lookup is part 0 of the pass.
            ticket = current.ticket._replace(part=len(current.lookups))
            lookup = self._tables.lookup([call.module.request(call)], ticket)
            (current.vectors[key],) = self._outputs(current, lookup)
            if current.batch is not None and call.ids.numel():
                if (site := CallSite.find(call, current.batch.tensors)) is not None:
                    self.sites[site] = None
                elif current is self.training:
                    self._warnings.computed_ids(call.module.name)
        return to_device(current.vectors[key], self._device)

    def use_prefetched(self, current: ForwardPass) -> None:
        """Wait for the lookup that left before a pass, if it was not used yet."""
        if current.prefetched is not None:
            assert current.batch is not None
            vectors = self._outputs(current, current.prefetched)
            current.vectors.update(zip(current.batch.calls, vectors, strict=True))
            current.prefetched = None

    def _outputs(self, current: ForwardPass, lookup: Lookup) -> Sequence[Tensor]:
        """Wait for the vectors of a lookup of a pass."""
        *vectors, zero = lookup.outputs()
        current.lookups.append(lookup)
        current.zeros.append(zero)
        if zero.grad_fn is not None:
            zero.grad_fn.register_prehook(self._before_gradients)
        return vectors

    def rows(self, module: TableModule, step: int) -> Tensor:
        """Return all rows of a table, (rows, D), as they are now."""
        ticket = self._evaluation_ticket(step)
        blocks = torch.arange(module.num_embeddings).split(_ROWS_PER_LOOKUP)
        requests = ([TableRequest(module.name, ids)] for ids in blocks)
        return torch.cat([self._tables.lookup(request, ticket).outputs()[0] for request in requests])

    def announce_lookups(self, current: ForwardPass, barriers: Sequence[Decided], step: int) -> None:
        """Tell the workers how many lookups will send gradients, if more than the prefetched one."""
        first, *rest = current.lookups
        for lookup in rest:
            lookup.is_followed = first.is_followed
        if rest:
            calls = [
                each.call_barrier(UpdateBarrier.expect, self._trainer, step, len(current.lookups))
                for each in barriers
            ]
            for call in calls:
                call.wait()
