"""Lookups under way: whose vector lies in which columns, and what the messages of gradients hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from support.shards import LocalTables
from torch import Tensor
from torch.futures import Future

from hybrid.batch import SparseFeatures
from hybrid.embedding.bags import Item
from hybrid.embedding.placement import place
from hybrid.embedding.spec import OptimizerSpec, Pooling, TableSpec
from hybrid.embedding.trainer.embeddings import Embeddings
from hybrid.embedding.trainer.routes import BatchIds, make_routes
from hybrid.embedding.worker.shards import TableShards
from hybrid.errors import ClusterError, DataError
from hybrid.input_spec import FeatureSpec, InputSpec
from hybrid.steps.rules import UpdateRules
from hybrid.steps.ticket import Purpose, Ticket

DTYPE = torch.float64
SIZE = 4
TRAINING = pytest.mark.parametrize("purpose", [Purpose.TRAIN, Purpose.PREFETCH])


def table(name: str, dim: int, worker: int | None, pooling: Pooling = Pooling.SUM) -> TableSpec:
    """A whole table on one worker, or split over all."""
    where = {"placement": "row"} if worker is None else {"workers": (worker,)}
    features = ("s0", "s1") if name == "s" else (name,)
    spec = OptimizerSpec("sgd", 1.0)
    return TableSpec(name, 9, dim, pooling, features, spec, 1.0, **where)


# Both widths on both workers, a split one, and one that two features share.
TABLES = [table("a", 2, 0), table("b", 3, 1), table("c", 2, 1), table("m", 3, None), table("s", 2, 0)]
MULTI_HOT = ("m", "s1")
FEATURES = ("a", "b", "c", "m", "s0", "s1")
TABLE_OF = {feature: each for each in TABLES for feature in each.features}
# Each feature first and last once, and beside others.
ORDERS = [FEATURES[k:] + FEATURES[:k] for k in range(len(FEATURES))]
ORDERS += [order[::-1] for order in ORDERS] + [
    ("a", "c", "s0", "b", "m", "s1"),
    ("s1", "a", "m", "c", "b", "s0"),
]


class Watched(LocalTables):
    """Tables that keep the gradients which reach them, as they are sent."""

    def __init__(self, shards: TableShards, sent: list[Tensor]) -> None:
        super().__init__(shards)
        self._sent = sent

    def lookup(self, ticket: Ticket, items: Sequence[Item]) -> Future[list[Tensor]]:
        answer = super().lookup(ticket, items)
        for tensor in answer.wait():
            if tensor.requires_grad:
                tensor.register_hook(self._sent.append)
        return answer

    def send_gradients(self, ticket: Ticket, grads: Sequence[Tensor]) -> Future[None]:
        self._sent += grads
        return super().send_gradients(ticket, grads)

    def exchange(
        self, ticket: Ticket, grads: Sequence[Tensor], next_ticket: Ticket, items: Sequence[Item]
    ) -> Future[list[Tensor]]:
        self._sent += grads
        return super().exchange(ticket, grads, next_ticket, items)


class Job:
    """Features in some order, with tables on two workers, in this process."""

    def __init__(self, order: Sequence[str], tables: Sequence[TableSpec] = TABLES) -> None:
        self.order, self.tables = order, tables
        self.placement = place(tables, 2)
        self.shards = [TableShards(self.placement, worker, UpdateRules(1), DTYPE) for worker in range(2)]
        for each in self.shards:
            each.initialise(7)
        self.sent: list[Tensor] = []
        spec = InputSpec((), tuple(FeatureSpec(f, 9, f in MULTI_HOT) for f in order))
        hosts = {worker: Watched(each, self.sent) for worker, each in enumerate(self.shards)}
        self.embeddings = Embeddings(tables, spec, self.placement, hosts)

    def rows(self) -> dict[str, Tensor]:
        """All rows, by table."""
        whole = {}
        for each in self.tables:
            whole[each.name] = torch.empty(each.num_rows, each.dim, dtype=DTYPE)
            for shard in self.placement.of_table(each.name):
                part = self.shards[shard.worker].shard_tensors(shard)["weight"]
                whole[each.name][shard.index :: shard.count] = part
        return whole


@contextmanager
def running(order: Sequence[str], tables: Sequence[TableSpec] = TABLES) -> Iterator[Job]:
    job = Job(order, tables)
    try:
        yield job
    finally:
        for each in job.shards:
            each.close()


def bags_of(order: Sequence[str], size: int = SIZE) -> list[list[list[int]]]:
    generator = torch.Generator().manual_seed(5)
    lengths = [[b % 3 if f in MULTI_HOT else 1 for b in range(size)] for f in order]
    return [[torch.randint(0, 9, (n,), generator=generator).tolist() for n in each] for each in lengths]


def plain_vectors(
    bags: Sequence[Sequence[Sequence[int]]], order: Sequence[str], rows: dict[str, Tensor]
) -> Tensor:
    """The features' vectors side by side, by plain indexing."""
    columns = [
        torch.stack([rows[TABLE_OF[feature].name][bag].sum(0) for bag in of_feature])
        for feature, of_feature in zip(order, bags, strict=True)
    ]
    return torch.cat(columns, dim=1)


@TRAINING
@pytest.mark.parametrize("order", ORDERS, ids=" ".join)
def test_each_feature_has_its_columns_forward_and_backward(order: Sequence[str], purpose: Purpose) -> None:
    with running(order) as job:
        before = {name: rows_RD.requires_grad_() for name, rows_RD in job.rows().items()}
        bags = bags_of(order)
        expected_BE = plain_vectors(bags, order, before)
        pooled_BE = job.embeddings.lookup(SparseFeatures.from_bags(bags), Ticket(0, 0, 0, 0, purpose)).wait()
        torch.testing.assert_close(pooled_BE, expected_BE, rtol=1e-14, atol=1e-14)
        grad_BE = torch.randn(pooled_BE.shape, dtype=DTYPE, generator=torch.Generator().manual_seed(6))
        pooled_BE.backward(grad_BE)
        expected_BE.backward(grad_BE)
        for each in job.shards:
            each.barrier.drain()
        for name, rows_RD in job.rows().items():
            grad_RD = before[name].grad
            assert grad_RD is not None
            torch.testing.assert_close(before[name].detach() - rows_RD, grad_RD, rtol=1e-14, atol=1e-14)


def is_alone_in_memory(tensor: Tensor) -> bool:
    """Whether RPC sends this tensor and nothing else: it sends all memory that a view is of."""
    starts = tensor.storage_offset() == 0
    return tensor.is_contiguous() and starts and tensor.untyped_storage().nbytes() == tensor.nbytes


ALL_MULTI_HOT = [table(n, 3, w, p) for n, w, p in (("m", None, Pooling.MAX), ("b", 0, Pooling.MEAN))]


@TRAINING
@pytest.mark.parametrize("size", [0, 1, SIZE])
@pytest.mark.parametrize(
    ("order", "tables"),
    [(FEATURES, TABLES), (("c",), [TABLES[2]]), (("m",), [TABLES[3]]), (("m", "b"), ALL_MULTI_HOT)],
    ids=["all", "one id", "split bags", "largest and mean"],
)
def test_gradients_leave_in_no_view_of_more(
    order: Sequence[str], tables: Sequence[TableSpec], size: int, purpose: Purpose
) -> None:
    """Though their own come as columns of a larger tensor."""
    with running(order, tables) as job:
        ids = SparseFeatures.from_bags(bags_of(order, size))
        pooled_BE = job.embeddings.lookup(ids, Ticket(0, 0, 0, 0, purpose)).wait()
        beside_B2 = torch.ones(size, 2, dtype=DTYPE, requires_grad=True)
        torch.cat([beside_B2, pooled_BE, beside_B2], dim=1).square().sum().backward()
        assert job.sent
        assert all(map(is_alone_in_memory, job.sent))


@TRAINING
def test_a_gradient_that_begins_a_larger_one_leaves_alone(purpose: Purpose) -> None:
    with running(("m",), [TABLES[3]]) as job:
        ids = SparseFeatures.from_bags(bags_of(("m",)))
        pooled_BE = job.embeddings.lookup(ids, Ticket(0, 0, 0, 0, purpose)).wait()
        whole = torch.ones(2 * SIZE, pooled_BE.shape[1], dtype=DTYPE)
        pooled_BE.backward(whole[:SIZE])
        assert job.sent
        assert all(map(is_alone_in_memory, job.sent))


@TRAINING
def test_items_leave_in_no_view_of_more(monkeypatch: pytest.MonkeyPatch, purpose: Purpose) -> None:
    asked: list[Item] = []
    take = LocalTables.lookup

    def lookup(tables: LocalTables, ticket: Ticket, items: Sequence[Item]) -> Future[list[Tensor]]:
        asked.extend(items)
        return take(tables, ticket, items)

    monkeypatch.setattr(LocalTables, "lookup", lookup)
    for tables, order in ((TABLES, FEATURES), (ALL_MULTI_HOT, ("m", "b"))):
        with running(order, tables) as job:
            job.embeddings.lookup(SparseFeatures.from_bags(bags_of(order)), Ticket(0, 0, 0, 0, purpose))
    tensors = [part for _, bags in asked for part in bags if isinstance(part, Tensor)]
    assert len(tensors) > 10
    assert all(map(is_alone_in_memory, tensors))
    ids = [part for part in tensors if not part.is_floating_point()]
    assert {each.dtype for each in ids} == {torch.int32}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_may_be_of_any_integers_and_lie_apart(dtype: torch.dtype) -> None:
    """What callers bring of their own is not always contiguous."""
    sparse = SparseFeatures.from_bags(bags_of(FEATURES))
    assert sparse.offsets is not None
    apart = sparse._replace(
        ids_L=torch.stack([sparse.ids_L, -sparse.ids_L], 1).to(dtype)[:, 0],
        offsets=torch.stack([sparse.offsets, sparse.offsets], 1).to(dtype)[:, 0],
    )
    assert not apart.ids_L.is_contiguous()
    with running(FEATURES) as job:
        results = [
            job.embeddings.lookup(each, Ticket(0, 0, 0, 0, Purpose.PREDICT)).wait()
            for each in (sparse, apart)
        ]
    assert torch.equal(*results)


def test_weights_of_one_id_a_sample_count() -> None:
    order = ("a", "b", "c")
    ids = torch.randint(0, 9, (3 * SIZE,), generator=torch.Generator().manual_seed(1))
    weights_L = torch.linspace(-1, 2, 3 * SIZE, dtype=DTYPE)
    with running(order, TABLES[:3]) as job:
        before = job.rows()
        sparse = SparseFeatures(ids, None, weights_L, 3)
        pooled_BE = job.embeddings.lookup(sparse, Ticket(0, 0, 0)).wait()
        expected = [
            weights_L[k * SIZE : (k + 1) * SIZE, None] * before[name][ids[k * SIZE : (k + 1) * SIZE]]
            for k, name in enumerate(order)
        ]
        torch.testing.assert_close(pooled_BE, torch.cat(expected, 1), rtol=1e-14, atol=1e-14)
        pooled_BE.sum().backward()
        for each in job.shards:
            each.barrier.drain()
        for k, name in enumerate(order):
            of_feature = slice(k * SIZE, (k + 1) * SIZE)
            moved_R = torch.zeros(9, dtype=DTYPE).index_add(0, ids[of_feature], weights_L[of_feature])
            moved_RD = before[name] - job.rows()[name]
            torch.testing.assert_close(moved_RD, moved_R[:, None].expand_as(moved_RD))


class Asked:
    """A worker of which nobody waits for an answer."""

    def __init__(self) -> None:
        self.items: list[Item] = []

    def lookup(self, ticket: Ticket, items: Sequence[Item]) -> Future[list[Tensor]]:
        self.items += items
        return Future()

    def send_gradients(self, ticket: Ticket, grads: Sequence[Tensor]) -> Future[None]:
        raise AssertionError

    def exchange(
        self, ticket: Ticket, grads: Sequence[Tensor], next_ticket: Ticket, items: Sequence[Item]
    ) -> Future[list[Tensor]]:
        raise AssertionError


@pytest.mark.parametrize("multi_hot", [False, True])
@pytest.mark.parametrize(("placement", "ids_dtype"), [("table", torch.int64), ("row", torch.int32)])
def test_tables_may_have_more_rows_than_32_bits_count(
    placement: str, ids_dtype: torch.dtype, multi_hot: bool
) -> None:
    """Ids travel as 32 bits where the rows of each worker are few enough; their addresses never wrap."""
    num_rows = 3 * 2**30
    spec = OptimizerSpec("sgd", 1.0)
    large = TableSpec("large", num_rows, 2, Pooling.SUM, ("large",), spec, 1.0, placement, (0, 1))
    small = TableSpec("small", 5, 2, Pooling.SUM, ("small",), spec, 1.0, "table", (1,))
    hosts = {0: Asked(), 1: Asked()}
    features = InputSpec((), tuple(FeatureSpec(t.name, t.num_rows, multi_hot) for t in (large, small)))
    embeddings = Embeddings([large, small], features, place([large, small], 2), hosts)
    ids = [num_rows - 1, 0, num_rows - 2, 2**31]
    embeddings.lookup(SparseFeatures.from_bags([[[i] for i in ids], [[4], [0], [4], [1]]]), Ticket(0, 0, 0))
    asked = {
        w: [(bags.ids_L.dtype, set(bags.ids_L.tolist())) for _, bags in h.items] for w, h in hosts.items()
    }
    if placement == "table":
        assert asked[0] == [(ids_dtype, set(ids))]
        assert asked[1] == [(torch.int32, {0, 1, 4})]
    else:
        half = num_rows // 2
        found = {w: set().union(*(rows for _, rows in of_worker)) for w, of_worker in asked.items()}
        assert {dtype for of_worker in asked.values() for dtype, _ in of_worker} == {ids_dtype}
        assert found == {0: {0, half - 1, 2**30}, 1: {half - 1, half, half + 1, half + 4}}


@TRAINING
@pytest.mark.parametrize("feature", ["a", "m", "s0"], ids=["one id", "split bags", "shared"])
def test_a_table_may_have_a_single_row(feature: str, purpose: Purpose) -> None:
    only = dataclasses.replace(TABLE_OF[feature], num_rows=1)
    order = [f for f in FEATURES if f in only.features]
    with running(order, [only]) as job:
        before = job.rows()[only.name].clone()
        bags = [[[0] * (1 + b * (f in MULTI_HOT)) for b in range(SIZE)] for f in order]
        sparse = SparseFeatures.from_bags(bags)
        pooled_BE = job.embeddings.lookup(sparse, Ticket(0, 0, 0, 0, purpose)).wait()
        times_BK = torch.tensor([[len(bag) for bag in of_feature] for of_feature in bags], dtype=DTYPE).T
        expected_BE = (times_BK.unsqueeze(2) * before[0]).flatten(1)
        torch.testing.assert_close(pooled_BE, expected_BE)
        pooled_BE.sum().backward()
        for each in job.shards:
            each.barrier.drain()
        moved_RD = before - job.rows()[only.name]
        torch.testing.assert_close(moved_RD, times_BK.sum().expand_as(moved_RD))


BAD_OFFSETS = [
    [0, 5, 2, 3],
    [0, 1, 2, 10**6],
    [0, 3_000_000, 2, 3],
    [1, 2, 3, 3],
    [0, 1, 1, 2],
    [0, -1, 2, 3],
]


@pytest.mark.parametrize("offsets", BAD_OFFSETS, ids=str)
def test_offsets_that_are_not_those_of_the_ids_are_refused(offsets: list[int]) -> None:
    """Compiled loops would read and write what lies beyond."""
    sparse = SparseFeatures(torch.tensor([1, 2, 3]), torch.tensor(offsets), None, 1)
    with pytest.raises(
        DataError, match=r"^the offsets of a batch must rise from 0 to 3, the number of its ids$"
    ):
        BatchIds(sparse)


@pytest.mark.parametrize(
    ("offsets", "weights", "message"),
    [
        ([0, 1, 3], [1.0, 1.0], "a batch has 2 weights of 3 ids"),
        ([0, 1, 2, 3], None, "a batch of 2 sparse features has 3 bags of ids"),
        (None, None, "a batch of 2 sparse features has 3 bags of ids"),
    ],
)
def test_bags_and_weights_are_those_of_the_ids(
    offsets: list[int] | None, weights: list[float] | None, message: str
) -> None:
    sparse = SparseFeatures(
        torch.tensor([1, 2, 3]),
        None if offsets is None else torch.tensor(offsets),
        None if weights is None else torch.tensor(weights),
        2,
    )
    with pytest.raises(DataError, match=f"^{message}$"):
        BatchIds(sparse)


def test_a_lookup_whose_gradients_have_not_left_says_so() -> None:
    table = TableSpec("a", 9, 2, Pooling.SUM, ("a",), OptimizerSpec("sgd", 1.0), 1.0)
    placement = place([table], 1)
    host = TableShards(placement, 0, UpdateRules(1))
    try:
        host.initialise(1)
        spec = InputSpec((), (FeatureSpec("a", 9, True),))
        embeddings = Embeddings([table], spec, placement, {0: LocalTables(host)})
        ids = SparseFeatures.from_bags([[[1], [2]]])
        first = embeddings.lookup(ids, Ticket(0, 0, 0, purpose=Purpose.PREFETCH))
        second = embeddings.lookup(ids, Ticket(0, 2, 1, purpose=Purpose.PREFETCH), first)
        first.wait()  # and no backward pass
        with pytest.raises(ClusterError, match=r"^step 2: its lookup has not left with earlier gradients$"):
            second.wait()
    finally:
        host.close()


def test_a_worker_is_asked_only_for_groups_that_hold_a_table_of_the_features() -> None:
    """An empty item would make it merge the group as if it were read in two ways."""
    sgd = OptimizerSpec("sgd", 1.0)
    tables = [
        TableSpec(name, 9, 2, Pooling.SUM, (name,), sgd, 1.0, workers=(worker,))
        for worker, name in enumerate(("one", "many"))
    ]
    placement = place(tables, 2)
    specs = {"one": tables[0], "many": tables[1]}
    sparse = SparseFeatures.from_bags([[[1], [2]], [[3, 4], [5]]])
    items: dict[int, list[Item]] = {0: [], 1: []}
    for route in make_routes([0], [1], list(specs.values()), placement):
        route.start(BatchIds(sparse), items)
    assert {worker: len(asked) for worker, asked in items.items()} == {0: 1, 1: 1}
