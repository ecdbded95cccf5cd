"""Lookups and updates against ``torch.nn.EmbeddingBag``, with the workers' tables in this process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

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
from hybrid.embedding.worker.shards import TableShards
from hybrid.errors import ClusterError, DataError
from hybrid.input_spec import FeatureSpec, InputSpec
from hybrid.steps.rules import UpdateRules
from hybrid.steps.ticket import Purpose, Ticket

SGD = OptimizerSpec("sgd", 0.5)
TICKET = Ticket(0, 0, 0)
DTYPE = torch.float64


class Tables:
    """Tables on workers, all in this process, and the same rows in plain torch modules."""

    def __init__(
        self,
        tables: list[TableSpec],
        features: list[FeatureSpec],
        num_workers: int,
    ) -> None:
        self.spec = InputSpec((), tuple(features))
        self.placement = place(tables, num_workers)
        self.hosts = {
            worker: TableShards(self.placement, worker, UpdateRules(1), DTYPE)
            for worker in range(num_workers)
            if self.placement.of_worker(worker)
        }
        for host in self.hosts.values():
            host.initialise(seed=7)
        local = {worker: LocalTables(host) for worker, host in self.hosts.items()}
        self.embeddings = Embeddings(tables, self.spec, self.placement, local)
        table_of = {feature: table for table in tables for feature in table.features}
        self.reference = {t.name: self.rows(t).requires_grad_() for t in tables}
        self.table_of = [table_of[f.name] for f in features]

    def rows(self, table: TableSpec) -> Tensor:
        """All rows of a table, put together from its shards."""
        whole = torch.empty(table.num_rows, table.dim, dtype=DTYPE)
        for shard in self.placement.of_table(table.name):
            whole[shard.index :: shard.count] = self.hosts[shard.worker].shard_tensors(shard)["weight"]
        return whole

    def expected(self, sparse: SparseFeatures) -> Tensor:
        """The pooled vectors by ``embedding_bag`` on whole tables."""
        size = sparse.batch_size
        offsets = sparse.offsets if sparse.offsets is not None else torch.arange(len(sparse.ids_L) + 1)
        pieces = []
        for k, table in enumerate(self.table_of):
            bounds = offsets[k * size : (k + 1) * size + 1]
            ids = sparse.ids_L[bounds[0] : bounds[-1]]
            weights = None if sparse.weights_L is None else sparse.weights_L[bounds[0] : bounds[-1]]
            pieces.append(
                torch.nn.functional.embedding_bag(
                    ids,
                    self.reference[table.name],
                    bounds - bounds[0],
                    mode=table.pooling.value,
                    per_sample_weights=weights,
                    include_last_offset=True,
                )
            )
        return torch.cat(pieces, dim=1)

    def close(self) -> None:
        for host in self.hosts.values():
            host.close()


def table(
    name: str, num_rows: int = 11, dim: int = 3, pooling: Pooling = Pooling.SUM, **more: object
) -> TableSpec:
    fields: dict[str, object] = {"features": (name,), "optimizer": SGD, "init_scale": 1.0, **more}
    return TableSpec(name, num_rows, dim, pooling, **fields)  # type: ignore[arg-type]


def random_bags(num_rows: list[int], size: int, longest: int, seed: int) -> list[list[list[int]]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        [
            torch.randint(
                0, rows, (int(torch.randint(0, longest + 1, (), generator=generator)),), generator=generator
            ).tolist()
            for _ in range(size)
        ]
        for rows in num_rows
    ]


def check_steps(tables: Tables, batches: list[SparseFeatures], purpose: Purpose) -> None:
    """Pooled vectors, and rows after SGD steps, equal plain torch's."""
    try:
        for step, sparse in enumerate(batches):
            pooled = tables.embeddings.lookup(sparse, Ticket(0, step, step, purpose=purpose)).wait()
            expected = tables.expected(sparse)
            torch.testing.assert_close(pooled, expected, rtol=1e-12, atol=1e-12)
            grad = torch.linspace(-1, 1, pooled.numel(), dtype=DTYPE).view_as(pooled)
            pooled.backward(grad)
            rows = list(tables.reference.values())
            grads = torch.autograd.grad(expected, rows, grad, allow_unused=True)
            with torch.no_grad():
                for row, row_grad in zip(rows, grads, strict=True):
                    if row_grad is not None:
                        row -= SGD.learning_rate * row_grad
        final = tables.embeddings.lookup(batches[0], evaluation(len(batches))).wait()
        torch.testing.assert_close(final, tables.expected(batches[0]), rtol=1e-12, atol=1e-12)
    finally:
        tables.close()


def evaluation(step: int) -> Ticket:
    return Ticket(0, step, step, purpose=Purpose.PREDICT)


PLACEMENTS = ["table", "row"]
CASES = list(itertools.product(PLACEMENTS, [1, 2, 3]))
TRAINING = [Purpose.TRAIN, Purpose.PREFETCH]


@pytest.mark.parametrize("purpose", TRAINING)
@pytest.mark.parametrize(("placement", "workers"), CASES)
def test_one_id_a_sample(placement: str, workers: int, purpose: Purpose) -> None:
    specs = [table("a", placement=placement), table("b", 5, placement=placement), table("c", 40)]
    tables = Tables(specs, [FeatureSpec("a", 11), FeatureSpec("b", 5), FeatureSpec("c", 40)], workers)
    batches = []
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        ids = [torch.randint(0, rows, (6,), generator=generator) for rows in (11, 5, 40)]
        batches.append(SparseFeatures(torch.cat(ids), None, None, 3))
    check_steps(tables, batches, purpose)


@pytest.mark.parametrize("purpose", TRAINING)
@pytest.mark.parametrize("pooling", list(Pooling))
@pytest.mark.parametrize(("placement", "workers"), CASES)
def test_bags_some_of_them_empty(pooling: Pooling, placement: str, workers: int, purpose: Purpose) -> None:
    specs = [table("a", pooling=pooling, placement=placement), table("b", 23, 3, pooling)]
    tables = Tables(specs, [FeatureSpec("a", 11, True), FeatureSpec("b", 23, True)], workers)
    bags = [random_bags([11, 23], 5, 4, seed) for seed in range(4)]
    assert any(not bag for feature in bags[0] for bag in feature)
    check_steps(tables, [SparseFeatures.from_bags(b) for b in bags], purpose)


@pytest.mark.parametrize("purpose", TRAINING)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_weights_within_bags(placement: str, purpose: Purpose) -> None:
    tables = Tables([table("a", placement=placement)], [FeatureSpec("a", 11, True)], 2)
    bags = random_bags([11], 5, 4, seed=3)
    weights = [[[0.5 + i for i, _ in enumerate(bag)] for bag in feature] for feature in bags]
    sparse = SparseFeatures.from_bags(bags, weights)
    assert sparse.weights_L is not None
    check_steps(tables, [sparse._replace(weights_L=sparse.weights_L.double())] * 3, purpose)


@pytest.mark.parametrize("purpose", TRAINING)
def test_mixed_widths_kinds_and_a_shared_table(purpose: Purpose) -> None:
    specs = [
        table("shared", 13, 4, features=("x", "y"), placement="row"),
        table("wide", 17, 6, Pooling.MEAN),
        table("single", 9, 4),
    ]
    features = [
        FeatureSpec("x", 13),
        FeatureSpec("wide", 17, True),
        FeatureSpec("y", 13, True),
        FeatureSpec("single", 9),
    ]
    tables = Tables(specs, features, 2)
    batches = []
    for seed in range(3):
        one = torch.randint(0, 9, (2, 5), generator=torch.Generator().manual_seed(seed)).tolist()
        wide, y = random_bags([17, 13], 5, 3, seed)
        batches.append(SparseFeatures.from_bags([[[i] for i in one[0]], wide, y, [[i] for i in one[1]]]))
    check_steps(tables, batches, purpose)


@pytest.mark.parametrize("purpose", TRAINING)
def test_an_empty_batch_takes_part_in_the_step(purpose: Purpose) -> None:
    tables = Tables([table("a"), table("b")], [FeatureSpec("a", 11), FeatureSpec("b", 11)], 2)
    none = SparseFeatures(torch.empty(0, dtype=torch.int64), None, None, 2)
    check_steps(tables, [none, SparseFeatures(torch.arange(6), None, None, 2), none], purpose)


@pytest.mark.parametrize("bad", [-1, 11])
@pytest.mark.parametrize(
    ("place", "named"), [(0, "a, sample 0"), (1, "a, sample 1"), (2, "b, sample 0"), (3, "b, sample 1")]
)
def test_an_id_out_of_range_is_refused_before_it_is_sent(bad: int, place: int, named: str) -> None:
    tables = Tables([table("a"), table("b")], [FeatureSpec("a", 11), FeatureSpec("b", 11)], 2)
    ids = [0, 10, 10, 0]
    ids[place] = bad
    message = rf"^feature {named}: id {bad} is not a row of table {named[0]} \(11 rows\)"
    try:
        with pytest.raises(DataError, match=message):
            tables.embeddings.lookup(SparseFeatures(torch.tensor(ids), None, None, 2), TICKET)
        assert all(host.version == 0 for host in tables.hosts.values())
    finally:
        tables.close()


@pytest.mark.parametrize(
    ("bags", "named"),
    [
        ([[[], [11], [2, 3]], [[], [4, 5], [6]]], "feature a, sample 1: id 11 is not a row of table a"),
        ([[[1], [], [2, 3]], [[], [11, 5], [6]]], "feature b, sample 1: id 11 is not a row of table b"),
        ([[[1], [], [2, 3]], [[], [4, 5], [6, 11]]], "feature b, sample 2: id 11 is not a row of table b"),
    ],
    ids=["first of all", "first of its feature", "last of all"],
)
def test_the_sample_of_a_wrong_id_among_bags_is_named(bags: list[list[list[int]]], named: str) -> None:
    tables = Tables([table("a"), table("b")], [FeatureSpec("a", 11, True), FeatureSpec("b", 11, True)], 1)
    try:
        with pytest.raises(DataError, match=named):
            tables.embeddings.lookup(SparseFeatures.from_bags(bags), TICKET)
    finally:
        tables.close()


def test_weights_with_mean_pooling_are_refused() -> None:
    tables = Tables([table("a", pooling=Pooling.MEAN)], [FeatureSpec("a", 11, True)], 1)
    try:
        with pytest.raises(DataError, match="weights need sum pooling"):
            tables.embeddings.lookup(SparseFeatures.from_bags([[[1, 2]]], [[[1.0, 2.0]]]), TICKET)
    finally:
        tables.close()


def test_initial_rows_do_not_depend_on_the_placement() -> None:
    specs = [table("a", 50, 4), table("b", 30, 4)]
    rows = []
    for placement, workers in (("table", 1), ("table", 3), ("row", 2), ("row", 3)):
        placed = [table(t.name, t.num_rows, t.dim, placement=placement) for t in specs]
        tables = Tables(placed, [FeatureSpec("a", 50), FeatureSpec("b", 30)], workers)
        rows.append(torch.cat([tables.rows(t) for t in placed]))
        tables.close()
    assert all(torch.equal(rows[0], other) for other in rows[1:])
    assert rows[0].abs().max() <= 1.0
    assert rows[0].unique().numel() > 300  # 320 values, hardly any twice


@pytest.mark.parametrize("bags", [[[1, 2], []], [[], [3]], [[1, 2], [3]]])
def test_a_feature_that_is_not_multi_hot_holds_exactly_one_id(bags: list[list[int]]) -> None:
    """Two ids here and none there would otherwise pass for one each, of the wrong samples."""
    tables = Tables([table("a"), table("b")], [FeatureSpec("a", 11, True), FeatureSpec("b", 11)], 2)
    try:
        with pytest.raises(DataError, match=r"^feature b: sample \d must hold exactly one id$"):
            tables.embeddings.lookup(SparseFeatures.from_bags([[[5], [6]], bags]), TICKET)
        assert len(tables.embeddings.lookup(SparseFeatures.from_bags([[], []]), TICKET).wait()) == 0
    finally:
        tables.close()


class Message:
    """A message under way until it is told to have arrived, perhaps to an error."""

    def __init__(self) -> None:
        self.has_arrived = False
        self.error: Exception | None = None

    def done(self) -> bool:
        return self.has_arrived

    def wait(self) -> None:
        assert self.has_arrived, "nothing waits for gradients to arrive"
        if self.error:
            raise self.error

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        raise NotImplementedError("nothing is recorded here")


class FakeHost:
    """Answers every lookup with zeros, and lets messages of gradients hang in the air."""

    def __init__(self) -> None:
        self.tickets: list[Ticket] = []
        self.arrived: list[Tensor] = []  # gradients by the backward pass
        self.sent: list[tuple[Ticket, list[Tensor], Message]] = []
        self.exchanged: list[tuple[Ticket, Ticket]] = []

    def lookup(self, ticket: Ticket, items: Sequence[Item]) -> Future[list[Tensor]]:
        self.tickets.append(ticket)
        answer: Future[list[Tensor]] = Future()
        results = [torch.zeros(len(bags.ids_L), 3) for _, bags in items]
        if ticket.purpose is Purpose.TRAIN:
            for result in results:
                result.requires_grad_().register_hook(self.arrived.append)
        answer.set_result(results)
        return answer

    def send_gradients(self, ticket: Ticket, grads: Sequence[Tensor]) -> Message:
        self.sent.append((ticket, list(grads), Message()))
        return self.sent[-1][2]

    def exchange(
        self, ticket: Ticket, grads: Sequence[Tensor], next_ticket: Ticket, items: Sequence[Item]
    ) -> Future[list[Tensor]]:
        self.exchanged.append((ticket, next_ticket))
        self.sent.append((ticket, list(grads), Message()))
        return self.lookup(next_ticket, items)


class TestMessages:
    """When a trainer sends what, and what becomes of errors."""

    @pytest.fixture
    def host(self) -> FakeHost:
        return FakeHost()

    @pytest.fixture
    def embeddings(self, host: FakeHost) -> Embeddings:
        tables = [table("a")]
        return Embeddings(tables, InputSpec((), (FeatureSpec("a", 11),)), place(tables, 1), {0: host})

    def train(self, embeddings: Embeddings, step: int) -> None:
        ids = SparseFeatures(torch.tensor([4, 2, 4]), None, None, 1)
        embeddings.lookup(ids, prefetched(step)).wait().sum().backward()

    def test_gradients_of_prefetched_rows_go_once_with_their_ticket(
        self, host: FakeHost, embeddings: Embeddings
    ) -> None:
        self.train(embeddings, 3)
        ((ticket, (grad_UD,), _),) = host.sent
        assert ticket == host.tickets[0] == prefetched(3)
        assert grad_UD.is_contiguous()
        assert grad_UD.tolist() == [[1.0] * 3, [2.0] * 3]  # of the distinct rows 2 and 4

    def test_gradients_and_the_next_lookup_are_one_message(
        self, host: FakeHost, embeddings: Embeddings
    ) -> None:
        ids = SparseFeatures(torch.tensor([4, 2, 4]), None, None, 1)
        first = embeddings.lookup(ids, prefetched(0))
        first.is_followed = True
        second = embeddings.lookup(ids, prefetched(2), first)
        assert host.tickets == [prefetched(0)]  # it waits for the gradients
        first.wait().sum().backward()
        assert host.exchanged == [(prefetched(0)._replace(followed=True), prefetched(2))]
        assert host.tickets == [prefetched(0), prefetched(2)]
        assert second.wait().shape == (3, 3)

    def test_errors_of_gradients_that_have_arrived_are_raised_and_others_not_waited_for(
        self, host: FakeHost, embeddings: Embeddings
    ) -> None:
        for step in range(3):
            self.train(embeddings, step)
        _, failed, fine = (message for *_, message in host.sent)
        failed.error = ClusterError("the worker has failed")
        failed.has_arrived = fine.has_arrived = True
        with pytest.raises(ClusterError, match=r"^the worker has failed$"):
            self.train(embeddings, 3)
        self.train(embeddings, 4)  # it is told once

    def test_settling_waits_for_all_gradients_that_were_sent(
        self, host: FakeHost, embeddings: Embeddings
    ) -> None:
        """A checkpoint would lack the last steps else."""
        embeddings.settle()  # none were
        for step in range(2):
            self.train(embeddings, step)
        first, second = (message for *_, message in host.sent)
        first.has_arrived = True
        with pytest.raises(AssertionError, match="nothing waits"):
            embeddings.settle()
        self.train(embeddings, 2)
        host.sent[-1][2].has_arrived = second.has_arrived = True
        embeddings.settle()

    def test_nothing_is_looked_up_without_asking_anybody(
        self, host: FakeHost, embeddings: Embeddings
    ) -> None:
        assert embeddings.nothing(prefetched(0)).wait().shape == (0, 3)
        assert host.tickets == []

    @pytest.mark.parametrize("purpose", TRAINING)
    def test_gradients_of_no_samples_start_within_their_storage(
        self, host: FakeHost, purpose: Purpose
    ) -> None:
        """RPC ends the process where they do not, as columns of an empty matrix do not."""
        tables = [table("a"), table("b")]
        spec = InputSpec((), (FeatureSpec("a", 11, True), FeatureSpec("b", 11, True)))
        embeddings = Embeddings(tables, spec, place(tables, 1), {0: host})
        ticket = Ticket(0, 0, 0, purpose=purpose)
        pooled_BE = embeddings.lookup(SparseFeatures.from_bags([[], []]), ticket).wait()
        torch.cat([torch.zeros(0, 4, requires_grad=True), pooled_BE], dim=1).square().sum().backward()
        arrived = host.arrived if purpose is Purpose.TRAIN else host.sent[0][1]
        assert [(tuple(g.shape), g.storage_offset()) for g in arrived] == [((0, 3), 0)]

    @pytest.mark.parametrize("purpose", list(Purpose))
    def test_only_what_is_trained_records_its_use(self, purpose: Purpose) -> None:
        tables = Tables([table("a")], [FeatureSpec("a", 11)], 1)
        try:
            ids = SparseFeatures(torch.tensor([4, 2, 4]), None, None, 1)
            pooled_BE = tables.embeddings.lookup(ids, TICKET._replace(purpose=purpose)).wait()
            assert pooled_BE.requires_grad == (purpose is not Purpose.PREDICT)
        finally:
            tables.close()


def prefetched(step: int) -> Ticket:
    return Ticket(0, step, max(0, step - 1), purpose=Purpose.PREFETCH)
