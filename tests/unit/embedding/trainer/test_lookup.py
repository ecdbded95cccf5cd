"""Pending lookups: when a trainer sends messages, and their content."""

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
from support.samples import features_of_bags
from support.shards import cluster, is_alone_in_memory
from torch import Tensor
from torch.futures import Future

from hybrid.batch import SparseFeatures
from hybrid.embedding.bags import Item
from hybrid.embedding.placement import place
from hybrid.embedding.table_source import LookupRequest
from hybrid.embedding.table_spec import OptimizerSpec, Pooling, TableSpec
from hybrid.embedding.trainer.embeddings import Embeddings
from hybrid.embedding.worker.table_shards import TableShards
from hybrid.errors import ClusterError
from hybrid.input_spec import FeatureSpec, InputSpec
from hybrid.updates.ticket import Purpose, Ticket

TRAINING = pytest.mark.parametrize("purpose", [Purpose.TRAIN, Purpose.PREFETCH])
IDS = SparseFeatures(torch.tensor([4, 2, 4]), None, None, 1)


def table(name: str, worker: int | None = 0, pooling: Pooling = Pooling.SUM, dim: int = 3) -> TableSpec:
    """Return a whole table on one worker, or a table that is split over all."""
    where = {"placement": "row"} if worker is None else {"workers": (worker,)}
    return TableSpec(name, 9, dim, pooling, (name,), OptimizerSpec("sgd", 1.0), 1.0, **where)


def prefetched(step: int) -> Ticket:
    return Ticket(0, step, max(0, step - 1), purpose=Purpose.PREFETCH)


class Watched(TableShards):
    """Tables that record the gradients that are sent to them."""

    def __init__(self, sent: list[Tensor], *args: Any) -> None:
        super().__init__(*args)
        self._sent = sent

    def lookup(self, ticket: Ticket, items: Sequence[Item]) -> Future[list[Tensor]]:
        response = super().lookup(ticket, items)
        for tensor in response.wait():
            if tensor.requires_grad:
                tensor.register_hook(self._sent.append)
        return response

    def send_gradients(self, ticket: Ticket, grads: Sequence[Tensor], *lookup: Any) -> Future[list[Tensor]]:
        self._sent += grads
        return super().send_gradients(ticket, grads, *lookup)


@TRAINING
@pytest.mark.parametrize("beside", [True, False], ids=["columns of more", "first rows of more"])
@pytest.mark.parametrize("size", [0, 4])
@pytest.mark.parametrize(
    ("tables", "multi_hot"),
    [
        ([table("a", dim=2), table("b", 1), table("c", 1, dim=2), table("m", None)], ["m"]),
        ([table("c")], []),
        ([table("m", None)], ["m"]),
        ([table("m", None, Pooling.MAX), table("b", 0, Pooling.MEAN)], ["m", "b"]),
        ([dataclasses.replace(table("m", None), pooled_by="trainers")], ["m"]),
    ],
    ids=["all", "one id", "split bags", "largest and mean", "pooled by trainers"],
)
def test_sent_gradients_are_no_views(
    stack: ExitStack, tables: list[TableSpec], multi_hot: list[str], size: int, beside: bool, purpose: Purpose
) -> None:
    """RPC sends the whole storage of a view, and crashes on a view beyond an empty storage."""
    sent: list[Tensor] = []
    each = cluster(stack, tables, 2, multi_hot=multi_hot, kind=partial(Watched, sent))
    bags = [[[b] * (b % 3 if f.multi_hot else 1) for b in range(size)] for f in each.features]
    pooled_BE = each.embeddings.lookup(features_of_bags(bags), Ticket(0, 0, 0, 0, purpose)).wait()
    if beside:
        beside_B2 = torch.ones(size, 2, requires_grad=True)
        torch.cat([beside_B2, pooled_BE, beside_B2], dim=1).square().sum().backward()
    else:
        pooled_BE.backward(torch.ones(2 * size, pooled_BE.shape[1])[:size])
    assert sent
    assert all(map(is_alone_in_memory, sent))


class Message:
    """A pending message; tests set whether it has arrived, and its error."""

    def __init__(self) -> None:
        self.has_arrived = False
        self.error: Exception | None = None

    def done(self) -> bool:
        return self.has_arrived

    def wait(self) -> list[Tensor]:
        assert self.has_arrived, "nothing waits for gradients to arrive"
        if self.error:
            raise self.error
        return []

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        raise NotImplementedError("nothing is recorded here")


class FakeHost:
    """Responds to lookups with zeros, and leaves messages with gradients pending."""

    def __init__(self) -> None:
        self.tickets: list[Ticket] = []
        self.sent: list[tuple[Ticket, list[Tensor], Message]] = []
        self.exchanged: list[tuple[Ticket, Ticket]] = []

    def lookup(self, ticket: Ticket, items: Sequence[Item]) -> Future[list[Tensor]]:
        self.tickets.append(ticket)
        response: Future[list[Tensor]] = Future()
        response.set_result([torch.zeros(len(bags.ids_L), 3) for _, bags in items])
        return response

    def send_gradients(
        self, ticket: Ticket, grads: Sequence[Tensor], attached: LookupRequest | None = None
    ) -> Message | Future[list[Tensor]]:
        self.sent.append((ticket, list(grads), Message()))
        if attached is None:
            return self.sent[-1][2]
        self.exchanged.append((ticket, attached.ticket))
        return self.lookup(*attached)


@pytest.fixture
def host() -> FakeHost:
    return FakeHost()


@pytest.fixture
def embeddings(host: FakeHost) -> Embeddings:
    tables = [table("a")]
    return Embeddings(tables, InputSpec((), (FeatureSpec("a", 9),)), place(tables, 1), {0: host})


def train(embeddings: Embeddings, step: int) -> None:
    embeddings.lookup(IDS, prefetched(step)).wait().sum().backward()


def test_gradients_and_the_next_lookup_share_a_message(host: FakeHost, embeddings: Embeddings) -> None:
    first = embeddings.lookup(IDS, prefetched(0))
    second = embeddings.lookup(IDS, prefetched(2), first)
    assert host.tickets == [prefetched(0)]  # it waits for the gradients
    first.wait().sum().backward()
    assert host.exchanged == [(prefetched(0), prefetched(2))]
    assert host.tickets == [prefetched(0), prefetched(2)]
    assert second.wait().shape == (3, 3)


def test_errors_of_completed_messages_are_raised(host: FakeHost, embeddings: Embeddings) -> None:
    for step in range(3):
        train(embeddings, step)
    _, failed, fine = (message for *_, message in host.sent)
    failed.error = ClusterError("the worker has failed")
    failed.has_arrived = fine.has_arrived = True
    with pytest.raises(ClusterError, match="failed"):
        train(embeddings, 3)
    train(embeddings, 4)  # the error is raised once


def test_flush_waits_for_all_sent_gradients(host: FakeHost, embeddings: Embeddings) -> None:
    """Otherwise a checkpoint would lack the last steps."""
    embeddings.sources.flush()  # none were
    for step in range(2):
        train(embeddings, step)
    first, second = (message for *_, message in host.sent)
    first.has_arrived = True
    with pytest.raises(AssertionError, match="nothing waits"):
        embeddings.sources.flush()
    train(embeddings, 2)
    host.sent[-1][2].has_arrived = second.has_arrived = True
    embeddings.sources.flush()


def test_lookup_that_was_not_sent_raises(embeddings: Embeddings) -> None:
    first = embeddings.lookup(IDS, prefetched(0))
    second = embeddings.lookup(IDS, prefetched(2), first)
    first.wait()  # and no backward pass
    with pytest.raises(ClusterError, match="step 2"):
        second.wait()
