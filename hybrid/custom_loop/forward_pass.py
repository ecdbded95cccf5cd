"""The vectors of a forward pass: looked up before it where its calls are known, else when they are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybrid.custom_loop.call_sites import Key, Site, key_of
from hybrid.custom_loop.embedding_modules import Call, TableModule
from hybrid.custom_loop.global_batches import Share
from hybrid.custom_loop.loop_warnings import LoopWarnings
from hybrid.embedding.trainer.lookup import Lookup
from hybrid.embedding.trainer.module_lookups import Asked, AskedTables
from hybrid.engine.hybrid_model import to_device
from hybrid.engine.update_guard import Decided
from hybrid.protocol.ticket import Purpose, Ticket
from hybrid.server.barrier import UpdateBarrier

_ROWS_AT_ONCE = 1 << 16


@dataclass
class Pass:
    """A forward pass under way.

    Attributes:
        share: the batch that it is of; None where there is none.
        ticket: of lookups that it makes.
        before_gradients: called before gradients of a lookup go to the workers.
        ahead: the lookup that was made before it.
        found: vectors, by call.
        lookups: those whose vectors were taken.
        zeros: of each of these; see :meth:`AskedTables.lookup`.
    """

    share: Share | None
    ticket: Ticket
    before_gradients: Callable[..., None]
    ahead: Lookup | None = None
    found: dict[Key, Tensor] = field(default_factory=dict)
    lookups: list[Lookup] = field(default_factory=list)
    zeros: list[Tensor] = field(default_factory=list)

    def take_ahead(self) -> None:
        """Wait for what was looked up before the pass, if that is not done."""
        if self.ahead is None:
            return
        assert self.share is not None
        *vectors, zero = self.ahead.outputs()
        self.found.update(zip(self.share.calls, vectors, strict=True))
        self.add(self.ahead, zero)
        self.ahead = None

    def add(self, lookup: Lookup, zero: Tensor) -> None:
        """Note a lookup whose vectors were taken."""
        self.lookups.append(lookup)
        self.zeros.append(zero)
        if zero.grad_fn is not None:
            zero.grad_fn.register_prehook(self.before_gradients)


class Passes:
    """The passes of one trainer: one that trains at most, and those that evaluate.

    Args:
        tables: where vectors come from.
        device: where they go.
        trainer: its index.
        before_gradients: see :class:`Pass`.

    Attributes:
        sites: the calls that every batch is expected to have, in the order in which they were found.
        trained, evaluated: the pass of each kind, or None.
    """

    def __init__(
        self,
        tables: AskedTables,
        device: torch.device,
        trainer: int,
        loop_warnings: LoopWarnings,
        before_gradients: Callable[..., None],
    ) -> None:
        self._tables = tables
        self._before_gradients = before_gradients
        self._warnings = loop_warnings
        self._device = device
        self._trainer = trainer
        self.sites: dict[Site, None] = {}
        self.trained: Pass | None = None
        self.evaluated: Pass | None = None

    def evaluate(self, share: Share, step: int) -> Pass:
        """A pass without training over a share, whose lookup leaves now."""
        ticket = self._evaluating(step)
        return self.begin(share, ticket, self._tables.lookup(share.sparse_features, ticket))

    def begin(self, share: Share | None, ticket: Ticket, ahead: Lookup | None = None) -> Pass:
        """A pass, whose lookup ``ahead`` is under way."""
        return Pass(share, ticket, self._before_gradients, ahead)

    def _evaluating(self, step: int) -> Ticket:
        return Ticket(self._trainer, step, step, purpose=Purpose.PREDICT)

    def vectors(self, call: Call, step: int) -> Tensor:
        """The vectors of a call of a table, on the device; see :class:`Asker`."""
        current = self.trained if torch.is_grad_enabled() else self.evaluated
        if current is None:
            if torch.is_grad_enabled():
                raise RuntimeError(
                    "a module with tables is trained on batches of cluster.batches(...), and called on "
                    "others under torch.no_grad()"
                )
            current = self.begin(None, self._evaluating(step))
        key = key_of(call)
        if key not in current.found:
            current.take_ahead()
        if key not in current.found:
            self._look_up_now(current, call, key)
        return to_device(current.found[key], self._device)

    def _look_up_now(self, current: Pass, call: Call, key: Key) -> None:
        # What was looked up before the pass is part 0.
        ticket = current.ticket._replace(part=len(current.lookups))
        lookup = self._tables.lookup([call.module.asked(call)], ticket)
        current.found[key], zero = lookup.outputs()
        current.add(lookup, zero)
        if current.share is not None and call.ids.numel():
            site = Site.find(call, current.share.tensors)
            if site is not None:
                self.sites[site] = None
            elif current is self.trained:
                self._warnings.computed_ids(call.module.name)

    def rows(self, module: TableModule, step: int) -> Tensor:
        """All rows of a table, (rows, D), as they are now."""
        ticket = self._evaluating(step)
        blocks = torch.arange(module.num_embeddings).split(_ROWS_AT_ONCE)
        return torch.cat(
            [self._tables.lookup([Asked(module.name, ids)], ticket).outputs()[0] for ids in blocks]
        )

    def expect(self, current: Pass, hosted: Sequence[Decided], step: int) -> None:
        """Tell the workers of a pass's lookups that they know nothing of, and of what follows."""
        first, *rest = current.lookups
        for lookup in rest:
            lookup.is_followed = first.is_followed
        if rest:
            number = len(current.lookups)
            told = [each.call_barrier(UpdateBarrier.expect, self._trainer, step, number) for each in hosted]
            for each in told:
                each.wait()
