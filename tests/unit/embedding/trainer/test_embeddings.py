"""What a trainer looks up: ids that are refused, and a step that costs no more for more tables."""

import itertools
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import pytest
import torch
from support.shards import Cluster, LocalTables, cluster
from torch import Tensor
from torch.futures import Future

from hybrid.batch import SparseFeatures
from hybrid.embedding.bags import Item
from hybrid.embedding.table_spec import OptimizerSpec, Pooling, TableSpec
from hybrid.embedding.trainer.batch_ids import BatchIds
from hybrid.embedding.worker.table_shards import TableShards
from hybrid.errors import DataError
from hybrid.protocol.ticket import Purpose, Ticket
from hybrid.protocol.update_rules import UpdateMode, UpdateRules

TICKET = Ticket(0, 0, 0)


def table(
    name: str, pooling: Pooling = Pooling.SUM, num_rows: int = 11, placement: str = "table"
) -> TableSpec:
    return TableSpec(name, num_rows, 2, pooling, (name,), OptimizerSpec("adagrad", 0.1), 1.0, placement)


def two_tables(stack: ExitStack, *multi_hot: str) -> Cluster:
    return cluster(stack, [table("a"), table("b")], 2, multi_hot=multi_hot)


@pytest.mark.parametrize("bad", [-1, 11])
@pytest.mark.parametrize(
    ("place", "named"), [(0, "a, sample 0"), (1, "a, sample 1"), (2, "b, sample 0"), (3, "b, sample 1")]
)
def test_id_out_of_range_is_refused(stack: ExitStack, bad: int, place: int, named: str) -> None:
    each = two_tables(stack)
    ids = torch.tensor([0, 10, 10, 0])
    ids[place] = bad
    message = rf"^feature {named}: id {bad} is not a row of table {named[0]} \(11 rows\)"
    with pytest.raises(DataError, match=message):
        each.embeddings.lookup(SparseFeatures(ids, None, None, 2), TICKET)
    assert all(host.version == 0 for host in each.hosts.values())


@pytest.mark.parametrize(
    ("bags", "named"),
    [
        ([[[], [11], [2, 3]], [[], [4, 5], [6]]], "feature a, sample 1: id 11 is not a row of table a"),
        ([[[1], [], [2, 3]], [[], [11, 5], [6]]], "feature b, sample 1: id 11 is not a row of table b"),
        ([[[1], [], [2, 3]], [[], [4, 5], [6, 11]]], "feature b, sample 2: id 11 is not a row of table b"),
    ],
    ids=["first of all", "first of its feature", "last of all"],
)
def test_invalid_id_of_a_bag_names_its_sample(
    stack: ExitStack, bags: list[list[list[int]]], named: str
) -> None:
    with pytest.raises(DataError, match=named):
        two_tables(stack, "a", "b").embeddings.lookup(SparseFeatures.from_bags(bags), TICKET)


def test_weights_with_max_pooling_are_refused(stack: ExitStack) -> None:
    each = cluster(stack, [table("a", Pooling.MAX)], 1, multi_hot=["a"])
    with pytest.raises(DataError, match="feature a: weighted ids have no max pooling"):
        each.embeddings.lookup(SparseFeatures.from_bags([[[1, 2]]], [[[1.0, 2.0]]]), TICKET)


@pytest.mark.parametrize("bags", [[[1, 2], []], [[], [3]], [[1, 2], [3]]])
def test_other_features_than_multi_hot_need_exactly_one_id(stack: ExitStack, bags: list[list[int]]) -> None:
    """Two ids here and none there would otherwise pass for one each, of the wrong samples."""
    each = two_tables(stack, "a")
    with pytest.raises(DataError, match=r"^feature b: sample \d must have exactly one id$"):
        each.embeddings.lookup(SparseFeatures.from_bags([[[5], [6]], bags]), TICKET)
    assert len(each.embeddings.lookup(SparseFeatures.from_bags([[], []]), TICKET).wait()) == 0


FEW, MANY = 4, 300
WORKERS, SIZE, STEPS = 2, 3, 2


class Counting(LocalTables):
    """Tables that write down how many items each message asks for."""

    def __init__(self, asked: list[int], shards: TableShards) -> None:
        super().__init__(shards)
        self._asked = asked

    def lookup(self, ticket: Ticket, items: Sequence[Item]) -> Future[list[Tensor]]:
        self._asked.append(len(items))
        return super().lookup(ticket, items)

    def exchange(
        self, ticket: Ticket, grads: Sequence[Tensor], next_ticket: Ticket, items: Sequence[Item]
    ) -> Future[list[Tensor]]:
        self._asked.append(len(items))
        return super().exchange(ticket, grads, next_ticket, items)


def train(each: Cluster, purpose: Purpose) -> None:
    """Two steps, the second of which is looked up ahead where that is the purpose."""
    bags = [[[b % 2] * (1 + feature.multi_hot) for b in range(SIZE)] for feature in each.features]
    ids, is_ahead = SparseFeatures.from_bags(bags), purpose is Purpose.PREFETCH
    first = each.embeddings.lookup(ids, Ticket(0, 0, 0, purpose=purpose))
    ahead = each.embeddings.lookup(ids, Ticket(0, 1, 0, purpose=purpose), first) if is_ahead else None
    for lookup in (first, ahead):
        lookup = lookup or each.embeddings.lookup(ids, Ticket(0, 1, 1, purpose=purpose))
        lookup.wait().square().sum().backward()
        each.drain()


@pytest.mark.parametrize("purpose", [Purpose.TRAIN, Purpose.PREFETCH])
@pytest.mark.parametrize(
    ("kind", "placement"), list(itertools.product(["one id", "bags", "both"], ["table", "row"]))
)
def test_the_number_of_requests_does_not_depend_on_the_number_of_tables(
    stack: ExitStack, kind: str, placement: str, purpose: Purpose
) -> None:
    mode = UpdateMode.PIPELINED if purpose is Purpose.PREFETCH else UpdateMode.SYNC
    for num_tables in (FEW, MANY):
        asked: list[int] = []
        tables = [table(f"t{k}", num_rows=2, placement=placement) for k in range(num_tables)]
        bags = {"one id": 0, "bags": 4, "both": 2}[kind]  # of four tables each
        each = cluster(
            stack,
            tables,
            WORKERS,
            rules=UpdateRules(1, mode),
            multi_hot=[t.name for k, t in enumerate(tables) if k % 4 < bags],
            local=partial(Counting, asked),
        )
        train(each, purpose)
        assert [host.version for host in each.hosts.values()] == [STEPS] * WORKERS
        assert asked == [2 if kind == "both" else 1] * WORKERS * STEPS


@pytest.mark.parametrize(
    "offsets",
    [[0, 5, 2, 3], [0, 1, 2, 10**6], [0, 3_000_000, 2, 3], [1, 2, 3, 3], [0, 1, 1, 2], [0, -1, 2, 3]],
    ids=str,
)
def test_invalid_offsets_are_refused(offsets: list[int]) -> None:
    """Compiled loops would read and write what lies beyond."""
    sparse = SparseFeatures(torch.tensor([1, 2, 3]), torch.tensor(offsets), None, 1)
    with pytest.raises(
        DataError, match=r"^the offsets of a batch must rise from 0 to 3, the number of its ids$"
    ):
        BatchIds(sparse)


@pytest.mark.parametrize(
    ("offsets", "weights_L", "message"),
    [
        (torch.tensor([0, 1, 3]), torch.ones(2), "a batch has 2 weights for 3 ids"),
        (torch.arange(4), None, "a batch of 2 sparse features has 3 bags of ids"),
        (None, None, "a batch of 2 sparse features has 3 bags of ids"),
    ],
)
def test_wrong_numbers_of_bags_or_weights_are_refused(
    offsets: Tensor | None, weights_L: Tensor | None, message: str
) -> None:
    with pytest.raises(DataError, match=f"^{message}$"):
        BatchIds(SparseFeatures(torch.tensor([1, 2, 3]), offsets, weights_L, 2))
