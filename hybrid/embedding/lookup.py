"""The trainer's side: from the ids of a batch to pooled vectors, one call a worker a step.

Features that hold exactly one id a sample travel as rows: each distinct row is fetched once and spread
over the samples here, and its gradients are summed here before they go back; on skewed ids that is a
fraction of the bytes. Multi-hot features are pooled by the worker: one vector a sample comes back,
however many ids went there. ``hybrid/embedding/routes.py`` has the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NoReturn, Protocol

import torch
from torch import Tensor

from hybrid.batch import SparseFeatures
from hybrid.embedding.placement import Placement
from hybrid.embedding.routes import BatchIds, Finish, Item, Items, Route, make_routes
from hybrid.embedding.spec import InputSpec, Pooling, TableSpec
from hybrid.errors import DataError
from hybrid.update import Purpose, Ticket


class PendingTensors(Protocol):
    """A worker's answer on its way."""

    def wait(self) -> list[Tensor]: ...


class Sending(Protocol):
    """A message on its way that has no answer but that it has arrived, or an exception."""

    def done(self) -> bool: ...

    def wait(self) -> object: ...


class TableHost(Protocol):
    """Whoever answers lookups for one worker: a stub across RPC, or the tables themselves."""

    def lookup(self, ticket: Ticket, items: Sequence[Item]) -> PendingTensors: ...

    def send_gradients(self, ticket: Ticket, grads: Sequence[Tensor]) -> Sending: ...


class PendingLookup(Protocol):
    """A lookup under way."""

    def wait(self) -> Tensor:
        """``pooled_BE``, the features' vectors side by side, once every worker has answered."""
        ...


class Nothing:
    """The vectors of no samples, for which nobody is asked."""

    def __init__(self, width: int) -> None:
        self._width = width

    def wait(self) -> Tensor:
        return torch.empty(0, self._width)


class _Vectors:
    """A lookup of all features of a batch."""

    def __init__(
        self, answers: Mapping[int, PendingTensors], finishes: Sequence[tuple[Route, Finish]]
    ) -> None:
        self._answers = answers
        self._finishes = finishes

    def wait(self) -> Tensor:
        results = {worker: answer.wait() for worker, answer in self._answers.items()}
        if len(self._finishes) == 1:
            ((route, finish),) = self._finishes
            if list(route.features) == sorted(route.features):
                return finish(results).flatten(1)
        pieces: dict[int, Tensor] = {}
        for route, finish in self._finishes:
            pieces.update(zip(route.features, finish(results).unbind(1), strict=True))
        return torch.cat([pieces[k] for k in sorted(pieces)], dim=1)


class _Prefetched:
    """One worker's answer to a prefetched lookup, whose gradients go back by a message of their own."""

    def __init__(self, answer: PendingTensors, send: Callable[[Sequence[Tensor]], None]) -> None:
        self._answer = answer
        self._send = send

    def wait(self) -> list[Tensor]:
        tensors = self._answer.wait()
        # Autograd records the use of these values only if an input of it requires a gradient.
        anchor = torch.zeros(0, requires_grad=True)
        return list(_SendBack.apply(anchor, self._send, *tensors))  # type: ignore[no-untyped-call]


class _SendBack(torch.autograd.Function):
    """The identity, whose backward pass sends the gradients on as soon as all of them are there."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        anchor: Tensor,
        send: Callable[[Sequence[Tensor]], None],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.send = send  # type: ignore[attr-defined]
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[None, ...]:
        ctx.send([_packed(grad) for grad in grads])  # type: ignore[attr-defined]
        return (None, None, *(None for _ in grads))


class _OfNoSamples:
    """One worker's answer to a lookup for no samples, whose gradients RPC can send."""

    def __init__(self, answer: PendingTensors) -> None:
        self._answer = answer

    def wait(self) -> list[Tensor]:
        return list(_Pack.apply(*self._answer.wait()))  # type: ignore[no-untyped-call]


class _Pack(torch.autograd.Function):
    """The identity, whose backward pass makes gradients fit to be sent."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(_packed(grad) for grad in grads)


def _packed(grad: Tensor) -> Tensor:
    # RPC ends the process when it meets an empty view that starts beyond its storage, as columns of
    # the gradient of no samples do.
    return grad.contiguous() if grad.numel() else grad.new_empty(grad.shape)


class Embeddings:
    """All tables of a model, as a trainer sees them.

    Args:
        tables, input_spec: the tables, and the features that read them.
        placement: which worker holds which rows.
        hosts: for every worker that holds a shard, whoever answers for it.
    """

    def __init__(
        self,
        tables: Sequence[TableSpec],
        input_spec: InputSpec,
        placement: Placement,
        hosts: Mapping[int, TableHost],
    ) -> None:
        self._features = input_spec.sparse_features
        table_of = {feature: table for table in tables for feature in table.features}
        self._tables = [table_of[f.name] for f in self._features]
        self._num_rows_K = torch.tensor([t.num_rows for t in self._tables])
        self._placement = placement
        self._hosts = hosts
        self._sent: list[Sending] = []
        self._routes: dict[frozenset[int], list[Route]] = {}

    @property
    def widths(self) -> list[int]:
        """Width of each feature's vector, in feature order."""
        return [t.dim for t in self._tables]

    def lookup(self, sparse: SparseFeatures, ticket: Ticket) -> PendingLookup:
        """Start looking up a batch; nothing waits here.

        Args:
            sparse: ids of K features for B samples.
            ticket: for which step, what the lookup must see, and what follows. Where gradients do, the
                backward pass must reach every lookup exactly once.

        Raises:
            DataError: an id is not a row of its table, a feature that is not multi-hot has other than
                one id in a sample, or weights meet a pooling other than sum.
        """
        ids = BatchIds(sparse)
        self._check(sparse, ids)
        items: Items = {worker: [] for worker in self._hosts}
        finishes = [(route, route.start(ids, items)) for route in self._routes_for(sparse)]
        answers: dict[int, PendingTensors] = {
            worker: host.lookup(ticket, items[worker]) for worker, host in self._hosts.items()
        }
        if ticket.purpose is Purpose.PREFETCH:
            answers = {w: _Prefetched(a, partial(self._send_back, w, ticket)) for w, a in answers.items()}
        elif ticket.purpose is Purpose.TRAIN and not ids.batch_size:
            answers = {w: _OfNoSamples(a) for w, a in answers.items()}
        return _Vectors(answers, finishes)

    def nothing(self) -> PendingLookup:
        """What :meth:`lookup` would give for no samples, without asking anybody."""
        return Nothing(sum(self.widths))

    def _send_back(self, worker: int, ticket: Ticket, grads: Sequence[Tensor]) -> None:
        self._check_sent()
        self._sent.append(self._hosts[worker].send_gradients(ticket, grads))

    def _check_sent(self) -> None:
        """Raise what the sending of earlier gradients has come to; those under way are looked at later."""
        arrived = [sending for sending in self._sent if sending.done()]
        self._sent = [sending for sending in self._sent if sending not in arrived]
        for sending in arrived:
            sending.wait()

    def _routes_for(self, sparse: SparseFeatures) -> list[Route]:
        every = range(len(self._features))
        weighted = sparse.weights_L is not None
        bags = frozenset(
            k for k in every if weighted or (sparse.offsets is not None and self._features[k].multi_hot)
        )
        if bags not in self._routes:
            rows = [k for k in every if k not in bags]
            self._routes[bags] = make_routes(rows, sorted(bags), self._tables, self._placement)
        return self._routes[bags]

    def _check(self, sparse: SparseFeatures, ids: BatchIds) -> None:
        if sparse.num_features != len(self._features):
            raise DataError(f"the batch has {sparse.num_features} sparse features, not {len(self._features)}")
        limits_L = torch.repeat_interleave(self._num_rows_K, ids.counts_K)
        outside_L = (sparse.ids_L < 0) | (sparse.ids_L >= limits_L)
        if outside_L.any():
            self._refuse_id(int(outside_L.nonzero()[0]), sparse, ids)
        if sparse.offsets is not None:
            one_K1 = torch.tensor([not f.multi_hot for f in self._features]).unsqueeze(1)
            wrong_KB = one_K1 & (sparse.offsets.diff().view(len(self._features), -1) != 1)
            if wrong_KB.any():
                k, sample = wrong_KB.nonzero()[0].tolist()
                raise DataError(f"feature {self._features[k].name}: sample {sample} must hold exactly one id")
        if sparse.weights_L is not None and any(t.pooling is not Pooling.SUM for t in self._tables):
            raise DataError("per-sample weights need sum pooling of every table")

    def _refuse_id(self, position: int, sparse: SparseFeatures, ids: BatchIds) -> NoReturn:
        """DataError for an id that is no row of its table, naming where it stands."""
        ends_K = ids.counts_K.cumsum(0)
        k = int((ends_K <= position).sum())
        within = position - int(ends_K[k] - ids.counts_K[k])
        sample = int((ids.offsets(k)[1:] <= within).sum())
        raise DataError(
            f"feature {self._features[k].name}, sample {sample}: id {int(sparse.ids_L[position])} is not a "
            f"row of table {self._tables[k].name} ({self._tables[k].num_rows} rows)"
        )
