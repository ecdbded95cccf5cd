"""Lookups of a trainer: where ids go, when messages are sent, how responses become vectors, errors."""

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
from support.samples import features_of_bags
from support.shards import Cluster, check_step, cluster, is_alone_in_memory, requests_of
from torch import Tensor
from torch.futures import Future

from hybrid.batch import SparseFeatures
from hybrid.embedding.bags import Item
from hybrid.embedding.placement import place
from hybrid.embedding.table_source import LookupRequest
from hybrid.embedding.table_spec import OptimizerSpec, Pooling, TableSpec
from hybrid.embedding.trainer.batch_ids import BatchIds
from hybrid.embedding.trainer.embeddings import Embeddings
from hybrid.embedding.worker.table_shards import TableShards
from hybrid.errors import ClusterError, DataError
from hybrid.input_spec import FeatureSpec, InputSpec
from hybrid.updates.ticket import Purpose, Ticket

DTYPE = torch.float64
SIZE, ROWS, MAX_IDS = 4, 9, 3
Ids = list[list[list[int]]]  # by feature, sample and position
SGD = OptimizerSpec("sgd", 0.5)
POOLED = pytest.mark.parametrize("pooled_by", ["workers", "trainers"])
TRAINING = pytest.mark.parametrize("purpose", [Purpose.TRAIN, Purpose.PREFETCH])
PLACED = pytest.mark.parametrize(
    ("placement", "workers"), [("table", 1), ("table", 3), ("row", 2), ("row", 3)]
)


def table(name: str, dim: int, worker: int | None, pooling: Pooling = Pooling.SUM) -> TableSpec:
    """Return a whole table on one worker, or a table that is split over all."""
    where = {"placement": "row"} if worker is None else {"workers": (worker,)}
    features = ("s0", "s1") if name == "s" else (name,)
    return TableSpec(name, ROWS, dim, pooling, features, SGD, 1.0, **where)


def placed(of: TableSpec, placement: str, pooled_by: str) -> TableSpec:
    return dataclasses.replace(of, placement=placement, pooled_by=pooled_by)


# Both widths on both workers, one of each kind that is split, and one that two features share.
A, B, C, D, M, S = TABLES = [
    table("a", 2, 0),
    table("b", 3, 1),
    table("c", 2, 1),
    table("d", 2, None),
    table("m", 3, None),
    table("s", 2, 0),
]
MULTI_HOT = ("m", "s1")
FEATURES = ("a", "b", "c", "d", "m", "s0", "s1")
# Each feature first and last once, and beside others.
ORDERS = [FEATURES[k:] + FEATURES[:k] for k in range(len(FEATURES))]
ORDERS += [FEATURES[::-1], ("a", "c", "s0", "b", "m", "s1", "d"), ("s1", "a", "m", "c", "d", "b", "s0")]


def random_bags(each: Cluster, size: int = SIZE, seed: int = 5) -> Ids:
    """Return ids by feature and sample; a multi-hot feature has 0 to 3 ids."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [[b % 4 if f.multi_hot else 1 for b in range(size)] for f in each.features]
    rows = [table.num_rows for table in each.table_of_feature]
    return [
        [torch.randint(0, n, (length,), generator=generator).tolist() for length in of_feature]
        for n, of_feature in zip(rows, lengths, strict=True)
    ]


@TRAINING
@POOLED
@pytest.mark.parametrize("order", ORDERS, ids=" ".join)
def test_each_feature_has_its_columns_forward_and_backward(
    stack: ExitStack, order: Sequence[str], pooled_by: str, purpose: Purpose
) -> None:
    tables = [*TABLES[:-1], dataclasses.replace(S, pooled_by=pooled_by)]  # of two with bags
    each = cluster(stack, tables, 2, dtype=DTYPE, multi_hot=MULTI_HOT, order=order)
    check_step(each, features_of_bags(random_bags(each)), purpose)


@POOLED
@PLACED
def test_poolings_of_a_table_differ(stack: ExitStack, placement: str, workers: int, pooled_by: str) -> None:
    poolings = (Pooling.MEAN, Pooling.MAX)
    shared = dataclasses.replace(placed(table("s", 2, None), placement, pooled_by), poolings=poolings)
    each = cluster(stack, [shared, A], workers, dtype=DTYPE, multi_hot=("s0", "s1"))
    assert [of.pooling for of in each.table_of_feature] == [*poolings, Pooling.SUM]
    for step in range(2):
        check_step(each, features_of_bags(random_bags(each, 7, step)), step=step)


@TRAINING
@pytest.mark.parametrize("by_trainers", ["", "a", "abcd"], ids=["none", "one", "all"])
@pytest.mark.parametrize("placement", ["table", "row"])
def test_features_have_weights(stack: ExitStack, placement: str, by_trainers: str, purpose: Purpose) -> None:
    poolings = {"a": Pooling.SUM, "b": Pooling.MEAN, "c": Pooling.MAX, "d": Pooling.MEAN, "e": Pooling.SUM}
    tables = [
        placed(table(name, 3, None, pooling), placement, "trainers" if name in by_trainers else "workers")
        for name, pooling in poolings.items()
    ]
    each = cluster(stack, tables, 2, dtype=DTYPE, multi_hot=("a", "b", "c", "d"))
    sparse = features_of_bags(random_bags(each, 7))
    assert sparse.offsets is not None
    ends = sparse.offsets[[7, 14, 21, 28]].tolist()  # a and d have weights
    weights_L = torch.ones(len(sparse.ids_L), dtype=DTYPE)
    weights_L[: ends[0]] = torch.linspace(0, 2, ends[0], dtype=DTYPE)
    weights_L[ends[2] : ends[3]] = torch.linspace(0.5, 3, ends[3] - ends[2], dtype=DTYPE)
    weighted = sparse._replace(weights_L=weights_L)
    assert BatchIds(weighted).weighted_features == {0, 3}
    check_step(each, weighted, purpose)


@POOLED
@pytest.mark.parametrize("only", [A, M, S], ids=["one id", "split bags", "shared"])
def test_a_table_may_have_a_single_row(stack: ExitStack, only: TableSpec, pooled_by: str) -> None:
    of_one = dataclasses.replace(only, num_rows=1, pooled_by=pooled_by)
    each = cluster(stack, [of_one], 2, dtype=DTYPE, multi_hot=MULTI_HOT)
    check_step(each, features_of_bags(random_bags(each)))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_may_be_any_integers_and_not_contiguous(stack: ExitStack, dtype: torch.dtype) -> None:
    each = cluster(stack, TABLES, 2, dtype=DTYPE, multi_hot=MULTI_HOT)
    sparse = features_of_bags(random_bags(each))
    assert sparse.offsets is not None
    apart = sparse._replace(
        ids_L=torch.stack([sparse.ids_L, -sparse.ids_L], 1).to(dtype)[:, 0],
        offsets=torch.stack([sparse.offsets, sparse.offsets], 1).to(dtype)[:, 0],
    )
    assert not apart.ids_L.is_contiguous()
    check_step(each, apart)


def requests_for(tables: Sequence[TableSpec], bags: Ids, multi_hot: Sequence[bool]) -> list[list[Item]]:
    """Return the requests to each of two workers; ``tables`` has the table of each feature."""
    features = [k for k, is_multi_hot in enumerate(multi_hot) if is_multi_hot]
    placement = place(list(dict.fromkeys(tables)), 2)
    return requests_of(tables, features, features_of_bags(bags), placement)


@POOLED
@pytest.mark.parametrize("multi_hot", [False, True])
@pytest.mark.parametrize(("placement", "ids_dtype"), [("table", torch.int64), ("row", torch.int32)])
def test_tables_may_have_more_rows_than_32_bits_count(
    placement: str, ids_dtype: torch.dtype, multi_hot: bool, pooled_by: str
) -> None:
    """Ids are sent as 32 bits if the rows of each worker are few enough; their addresses never wrap."""
    num_rows = 3 * 2**30
    large = TableSpec("large", num_rows, 2, Pooling.SUM, ("large",), SGD, 1.0, placement, (0, 1))
    small = TableSpec("small", 5, 2, Pooling.SUM, ("small",), SGD, 1.0, "table", (1,))
    large, small = (dataclasses.replace(each, pooled_by=pooled_by) for each in (large, small))
    ids = [num_rows - 1, 0, num_rows - 2, 2**31]
    items = requests_for([large, small], [[[i] for i in ids], [[4], [0], [4], [1]]], [multi_hot] * 2)
    found = [[(bags.ids_L.dtype, set(bags.ids_L.tolist())) for _, bags in of_worker] for of_worker in items]
    if placement == "table":
        assert found == [[(ids_dtype, set(ids))], [(torch.int32, {0, 1, 4})]]
    else:
        half = num_rows // 2
        rows = [{0, half - 1, 2**30}, {half - 1, half, half + 1, half + 4}]
        assert {dtype for of_worker in found for dtype, _ in of_worker} == {ids_dtype}
        assert [set().union(*(ids for _, ids in of_worker)) for of_worker in found] == rows


def test_sent_items_are_no_views() -> None:
    generator = torch.Generator().manual_seed(5)
    items: list[Item] = []
    largest_and_mean = [table("m", 3, None, Pooling.MAX), table("b", 3, 0, Pooling.MEAN)]
    by_trainers = [dataclasses.replace(each, pooled_by="trainers") for each in largest_and_mean]
    for tables, multi_hot in (
        ([*TABLES, S], [*[False] * 4, True, False, True]),
        (largest_and_mean, [True] * 2),
        (by_trainers, [True] * 2),
    ):
        lengths = [[b % 3 if many else 1 for b in range(SIZE)] for many in multi_hot]
        bags = [
            [torch.randint(0, ROWS, (n,), generator=generator).tolist() for n in each] for each in lengths
        ]
        for of_worker in requests_for(tables, bags, multi_hot):
            items += of_worker
    tensors = [part for _, bags in items for part in bags if isinstance(part, Tensor)]
    assert len(tensors) > 10
    assert all(map(is_alone_in_memory, tensors))
    assert {each.dtype for each in tensors if not each.is_floating_point()} == {torch.int32}


@PLACED
@POOLED
def test_first_of_equal_rows_gets_the_gradient_in_every_placement(
    stack: ExitStack, placement: str, workers: int, pooled_by: str
) -> None:
    of = placed(dataclasses.replace(table("m", 3, None, Pooling.MAX), init="zeros"), placement, pooled_by)
    each = cluster(stack, [of], workers, dtype=DTYPE, multi_hot=("m",))
    pooled_BE = each.embeddings.lookup(
        features_of_bags([[[3, 2], [4, 5, 4], [8, 0]]]), Ticket(0, 0, 0)
    ).wait()
    pooled_BE.sum().backward()
    each.drain()
    moved_R = each.whole()["m.weight"].sum(1)
    assert moved_R.nonzero().flatten().tolist() == [3, 4, 8]


# An item and a history of one table, a history of another width, and a bag, and one id, of both widths.
ITEM = TableSpec("item", ROWS, 2, Pooling.SUM, ("item", "seen"), SGD, 1.0, sequences=(0, MAX_IDS))
WORDS = TableSpec("words", ROWS, 3, Pooling.MAX, ("words",), SGD, 1.0, sequences=(MAX_IDS,))
USER = TableSpec("user", ROWS, 2, Pooling.SUM, ("user",), SGD, 1.0)
CITY = TableSpec("city", ROWS, 3, Pooling.SUM, ("city",), SGD, 1.0)
TAGS = TableSpec("tags", ROWS, 2, Pooling.MEAN, ("tags",), SGD, 1.0)
SEQUENCE_TABLES = [ITEM, WORDS, USER, CITY, TAGS]
SEQUENCES_AND_TAGS = ("seen", "words", "tags")
SEQUENCE_FEATURES = ("item", "seen", "words", "user", "city", "tags")
SEQUENCE_ORDERS = [SEQUENCE_FEATURES[k:] + SEQUENCE_FEATURES[:k] for k in range(len(SEQUENCE_FEATURES))] + [
    SEQUENCE_FEATURES[::-1]
]


@TRAINING
@pytest.mark.parametrize("order", SEQUENCE_ORDERS, ids=" ".join)
def test_each_sequence_has_its_columns(stack: ExitStack, order: Sequence[str], purpose: Purpose) -> None:
    each = cluster(stack, SEQUENCE_TABLES, 2, dtype=DTYPE, multi_hot=SEQUENCES_AND_TAGS, order=order)
    check_step(each, features_of_bags(random_bags(each)), purpose)


@PLACED
def test_sequences_equal_torch_in_every_placement(stack: ExitStack, placement: str, workers: int) -> None:
    tables = [dataclasses.replace(each, placement=placement) for each in SEQUENCE_TABLES]
    each = cluster(stack, tables, workers, dtype=DTYPE, multi_hot=SEQUENCES_AND_TAGS)
    for step in range(3):
        check_step(each, features_of_bags(random_bags(each, 7, step)), step=step)


@pytest.mark.parametrize("placement", ["table", "row"])
def test_weights_multiply_vectors_of_sequences(stack: ExitStack, placement: str) -> None:
    """A sequence has no pooling, also if the table has max pooling."""
    tables = [dataclasses.replace(each, placement=placement) for each in SEQUENCE_TABLES]
    each = cluster(stack, tables, 2, dtype=DTYPE, multi_hot=SEQUENCES_AND_TAGS)
    sparse = features_of_bags(random_bags(each, 7))
    assert sparse.offsets is not None
    # Of all features, or of one of the sequences.
    for step, (first, last) in enumerate([(0, len(SEQUENCE_FEATURES)), (1, 2), (2, 3)]):
        weights_L = torch.ones(len(sparse.ids_L), dtype=DTYPE)
        of_features = slice(int(sparse.offsets[7 * first]), int(sparse.offsets[7 * last]))
        weights_L[of_features] = torch.linspace(0, 2, len(weights_L[of_features]), dtype=DTYPE)
        check_step(each, sparse._replace(weights_L=weights_L), step=step)


def test_empty_sequences_and_batches_take_part_in_the_step(stack: ExitStack) -> None:
    each = cluster(stack, [ITEM, WORDS], 2, dtype=DTYPE, multi_hot=SEQUENCES_AND_TAGS)
    empty_history: Ids = [[[4], [4]], [[], []], [[], []]]
    check_step(each, features_of_bags(empty_history))
    check_step(each, features_of_bags([[], [], []]), step=1)
    none = SparseFeatures(torch.empty(0, dtype=torch.int64), None, None, 3)
    check_step(each, none, step=2)
    one_id_each = SparseFeatures(torch.tensor([1, 2, 2, 8, 0, 0]), None, None, 3)
    check_step(each, one_id_each, step=3)


def test_row_shared_by_history_and_candidate_is_requested_once() -> None:
    bags = [[[4], [7]], [[7, 4, 7], []], [[1], [1]]]
    tables = [dataclasses.replace(each, workers=(0,)) for each in (ITEM, USER)]
    of_features = [tables[0].for_feature("item"), tables[0].for_feature("seen"), tables[1]]
    (((_, rows),),) = requests_of(of_features, [], features_of_bags(bags), place(tables, 1))
    assert rows.ids_L.tolist() == [4, 7, ROWS + 1]
    assert (rows.offsets, rows.weights_L) == (None, None)
    assert is_alone_in_memory(rows.ids_L)


@pytest.mark.parametrize(
    ("bags", "named"),
    [
        ([[[9], [8]], [[8], [0]]], "a, sample 0: id 9"),
        ([[[0], [-1]], [[8], [0]]], "a, sample 1: id -1"),
        ([[[0], [8]], [[-1], [0]]], "b, sample 0: id -1"),
        ([[[0], [8]], [[8], [9]]], "b, sample 1: id 9"),
        ([[[], [9], [2, 3]], [[], [4, 5], [6]]], "a, sample 1: id 9"),
        ([[[1], [], [2, 3]], [[], [-1, 5], [6]]], "b, sample 1: id -1"),
        ([[[1], [], [2, 3]], [[], [4, 5], [6, 9]]], "b, sample 2: id 9"),
    ],
)
def test_invalid_id_names_its_feature_and_sample(stack: ExitStack, bags: Ids, named: str) -> None:
    sparse, has_one_id = features_of_bags(bags), len(bags[0]) == 2
    each = cluster(stack, [A, B], 2, multi_hot="" if has_one_id else "ab")
    with pytest.raises(DataError, match=f"^feature {named} "):
        each.embeddings.lookup(sparse._replace(offsets=None) if has_one_id else sparse, Ticket(0, 0, 0))


@pytest.mark.parametrize(
    ("bags", "expected"), [((), 1), (range(4), 1), (range(2), 2)], ids=["one id", "bags", "both"]
)
@pytest.mark.parametrize("worker", [0, None], ids=["table", "row"])
def test_the_number_of_requests_does_not_depend_on_the_number_of_tables(
    worker: int | None, bags: Sequence[int], expected: int
) -> None:
    for num_tables in (4, 300):
        tables = [table(f"t{k}", 2, None if worker is None else k % 2) for k in range(num_tables)]
        multi_hot = [k for k in range(num_tables) if k % 4 in bags]
        sparse = features_of_bags([[[b % 2] for b in range(3)]] * num_tables)
        requests = requests_of(tables, multi_hot, sparse, place(tables, 2))
        assert list(map(len, requests)) == [expected] * 2


@pytest.mark.parametrize(
    ("offsets", "weights_L", "num_features", "message"),
    [
        ([0, 5, 2, 3], None, 1, "offsets"),
        ([0, 1, 2, 10**6], None, 1, "offsets"),
        ([0, 3_000_000, 2, 3], None, 1, "offsets"),
        ([1, 2, 3, 3], None, 1, "offsets"),
        ([0, 1, 1, 2], None, 1, "offsets"),
        ([0, -1, 2, 3], None, 1, "offsets"),
        ([0, 1, 3], torch.ones(2), 2, "2 weights"),
        ([0, 1, 2, 3], None, 2, "3 bags"),
        (None, None, 2, "3 bags"),
    ],
    ids=str,
)
def test_invalid_offsets_and_weights_are_refused(
    offsets: list[int] | None, weights_L: Tensor | None, num_features: int, message: str
) -> None:
    """Compiled kernels would read and write beyond the arrays."""
    ends = None if offsets is None else torch.tensor(offsets)
    with pytest.raises(DataError, match=message):
        BatchIds(SparseFeatures(torch.tensor([1, 2, 3]), ends, weights_L, num_features))


IDS = SparseFeatures(torch.tensor([4, 2, 4]), None, None, 1)


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
        ([table("a", 2, 0), table("b", 3, 1), table("c", 2, 1), table("m", 3, None)], ["m"]),
        ([table("c", 3, 0)], []),
        ([table("m", 3, None)], ["m"]),
        ([table("m", 3, None, Pooling.MAX), table("b", 3, 0, Pooling.MEAN)], ["m", "b"]),
        ([dataclasses.replace(table("m", 3, None), pooled_by="trainers")], ["m"]),
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
        self, ticket: Ticket, grads: Sequence[Tensor], next_lookup: LookupRequest | None = None
    ) -> Message | Future[list[Tensor]]:
        self.sent.append((ticket, list(grads), Message()))
        if next_lookup is None:
            return self.sent[-1][2]
        self.exchanged.append((ticket, next_lookup.ticket))
        return self.lookup(*next_lookup)


@pytest.fixture
def host() -> FakeHost:
    return FakeHost()


@pytest.fixture
def embeddings(host: FakeHost) -> Embeddings:
    tables = [table("a", 3, 0)]
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
