"""Sequences: the vectors of a sample's ids beside each other, and their number, as plain torch pads them."""

import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack

import pytest
import torch
from support.shards import Cluster, check_step, cluster, is_alone_in_memory

from hybrid.batch import SparseFeatures
from hybrid.embedding.bags import Item
from hybrid.embedding.placement import place
from hybrid.embedding.table_spec import OptimizerSpec, Pooling, TableSpec
from hybrid.embedding.trainer.batch_ids import BatchIds
from hybrid.embedding.trainer.embeddings import make_routes
from hybrid.errors import DataError
from hybrid.protocol.ticket import Purpose, Ticket

DTYPE = torch.float64
ROWS, MOST = 9, 3
SGD = OptimizerSpec("sgd", 0.5)
PLACED = pytest.mark.parametrize(
    ("placement", "workers"), [("table", 1), ("table", 3), ("row", 2), ("row", 3)]
)
# An item and a history of one table, a history of another width, and a bag, and one id, of both widths.
ITEM = TableSpec("item", ROWS, 2, Pooling.SUM, ("item", "seen"), SGD, 1.0, sequences=(0, MOST))
WORDS = TableSpec("words", ROWS, 3, Pooling.MAX, ("words",), SGD, 1.0, sequences=(MOST,))
USER = TableSpec("user", ROWS, 2, Pooling.SUM, ("user",), SGD, 1.0)
CITY = TableSpec("city", ROWS, 3, Pooling.SUM, ("city",), SGD, 1.0)
TAGS = TableSpec("tags", ROWS, 2, Pooling.MEAN, ("tags",), SGD, 1.0)
TABLES = [ITEM, WORDS, USER, CITY, TAGS]
MULTI_HOT = ("seen", "words", "tags")
FEATURES = ("item", "seen", "words", "user", "city", "tags")
ORDERS = [FEATURES[k:] + FEATURES[:k] for k in range(len(FEATURES))] + [FEATURES[::-1]]


def random_bags(each: Cluster, size: int = 5, seed: int = 5) -> list[list[list[int]]]:
    """By feature and sample; histories and bags are of all lengths from 0 to the most."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [
            torch.randint(0, ROWS, (b % (MOST + 1) if f.multi_hot else 1,), generator=generator).tolist()
            for b in range(size)
        ]
        for f in each.features
    ]


def placed(placement: str) -> list[TableSpec]:
    return [dataclasses.replace(table, placement=placement) for table in TABLES]


@pytest.mark.parametrize("purpose", [Purpose.TRAIN, Purpose.PREFETCH])
@pytest.mark.parametrize("order", ORDERS, ids=" ".join)
def test_each_feature_has_its_columns_forward_and_backward(
    stack: ExitStack, order: Sequence[str], purpose: Purpose
) -> None:
    each = cluster(stack, TABLES, 2, dtype=DTYPE, multi_hot=MULTI_HOT, order=order)
    assert sum(each.embeddings.widths) == 2 + (MOST * 2 + 1) + (MOST * 3 + 1) + 2 + 3 + 2
    check_step(each, SparseFeatures.from_bags(random_bags(each)), purpose)


@PLACED
def test_sequences_equal_torch_in_every_placement(stack: ExitStack, placement: str, workers: int) -> None:
    each = cluster(stack, placed(placement), workers, dtype=DTYPE, multi_hot=MULTI_HOT)
    for step in range(3):
        check_step(each, SparseFeatures.from_bags(random_bags(each, 7, step)), step=step)


@pytest.mark.parametrize("placement", ["table", "row"])
def test_weights_multiply_vectors_of_sequences(stack: ExitStack, placement: str) -> None:
    """Also of a table that takes the largest: a sequence has no pooling."""
    each = cluster(stack, placed(placement), 2, dtype=DTYPE, multi_hot=MULTI_HOT)
    sparse = SparseFeatures.from_bags(random_bags(each, 7))
    assert sparse.offsets is not None
    # Of all features, or of one of the sequences.
    for step, (first, last) in enumerate([(0, len(FEATURES)), (1, 2), (2, 3)]):
        weights_L = torch.ones(len(sparse.ids_L), dtype=DTYPE)
        of_features = slice(int(sparse.offsets[7 * first]), int(sparse.offsets[7 * last]))
        weights_L[of_features] = torch.linspace(0, 2, len(weights_L[of_features]), dtype=DTYPE)
        check_step(each, sparse._replace(weights_L=weights_L), step=step)


def test_empty_sequences_and_batches_take_part_in_the_step(stack: ExitStack) -> None:
    each = cluster(stack, [ITEM, WORDS], 2, dtype=DTYPE, multi_hot=MULTI_HOT)
    nothing_seen: list[list[list[int]]] = [[[4], [4]], [[], []], [[], []]]
    check_step(each, SparseFeatures.from_bags(nothing_seen))
    check_step(each, SparseFeatures.from_bags([[], [], []]), step=1)
    none = SparseFeatures(torch.empty(0, dtype=torch.int64), None, None, 3)
    check_step(each, none, step=2)
    one_id_each = SparseFeatures(torch.tensor([1, 2, 2, 8, 0, 0]), None, None, 3)
    check_step(each, one_id_each, step=3)


def asked(bags: list[list[list[int]]], tables: Sequence[TableSpec]) -> list[Item]:
    """What one worker is asked for, of features that are all sequences or of one id."""
    items: dict[int, list[Item]] = {0: []}
    placement = place(list({table.name: table for table in tables}.values()), 1)
    ids = BatchIds(SparseFeatures.from_bags(bags))
    for route in make_routes(range(len(tables)), [], tables, placement):
        route.start(ids, items)
    return items[0]


def test_row_shared_by_history_and_candidate_travels_once() -> None:
    bags = [[[4], [7]], [[7, 4, 7], []], [[1], [1]]]
    (item,) = asked(bags, [ITEM.read_by("item"), ITEM.read_by("seen"), USER])
    (_, rows) = item
    assert rows.ids_L.tolist() == [4, 7, ROWS + 1]
    assert (rows.offsets, rows.weights_L) == (None, None)
    assert is_alone_in_memory(rows.ids_L)


@pytest.mark.parametrize("sample", [0, 2])
def test_too_long_sequence_is_refused(stack: ExitStack, sample: int) -> None:
    each = cluster(stack, [ITEM], 1, multi_hot=MULTI_HOT)
    bags = [[[1]] * 3, [[1], [1, 2, 3], [4]]]
    bags[1][sample] = [1, 2, 3, 4]
    with pytest.raises(DataError) as caught:
        each.embeddings.lookup(SparseFeatures.from_bags(bags), Ticket(0, 0, 0))
    assert str(caught.value) == (
        f"feature seen, sample {sample}: 4 ids are more than the 3 of a sequence (columns.seen.max_ids)"
    )
