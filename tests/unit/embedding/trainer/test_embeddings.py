"""Lookups of a trainer: invalid ids, and the number of requests."""

from collections.abc import Sequence
from contextlib import ExitStack

import pytest
import torch
from support.samples import features_of_bags
from support.shards import Cluster, cluster, requests_of
from torch import Tensor

from hybrid.batch import SparseFeatures
from hybrid.embedding.placement import place
from hybrid.embedding.table_spec import OptimizerSpec, Pooling, TableSpec
from hybrid.embedding.trainer.batch_ids import BatchIds
from hybrid.errors import DataError
from hybrid.updates.ticket import Ticket

TICKET = Ticket(0, 0, 0)


def table(
    name: str, pooling: Pooling = Pooling.SUM, num_rows: int = 11, placement: str = "table"
) -> TableSpec:
    return TableSpec(name, num_rows, 2, pooling, (name,), OptimizerSpec("adagrad", 0.1), 1.0, placement)


def two_tables(stack: ExitStack, *multi_hot: str) -> Cluster:
    return cluster(stack, [table("a"), table("b")], 2, multi_hot=multi_hot)


@pytest.mark.parametrize(
    ("bags", "named"),
    [
        ([[[11], [10]], [[10], [0]]], "a, sample 0: id 11"),
        ([[[0], [-1]], [[10], [0]]], "a, sample 1: id -1"),
        ([[[0], [10]], [[-1], [0]]], "b, sample 0: id -1"),
        ([[[0], [10]], [[10], [11]]], "b, sample 1: id 11"),
        ([[[], [11], [2, 3]], [[], [4, 5], [6]]], "a, sample 1: id 11"),
        ([[[1], [], [2, 3]], [[], [-1, 5], [6]]], "b, sample 1: id -1"),
        ([[[1], [], [2, 3]], [[], [4, 5], [6, 11]]], "b, sample 2: id 11"),
    ],
)
def test_invalid_id_names_its_feature_and_sample(
    stack: ExitStack, bags: list[list[list[int]]], named: str
) -> None:
    sparse, has_one_id = features_of_bags(bags), len(bags[0]) == 2
    each = two_tables(stack, *("" if has_one_id else "ab"))
    with pytest.raises(DataError, match=f"^feature {named} "):
        each.embeddings.lookup(sparse._replace(offsets=None) if has_one_id else sparse, TICKET)


@pytest.mark.parametrize(
    ("bags", "expected"), [((), 1), (range(4), 1), (range(2), 2)], ids=["one id", "bags", "both"]
)
@pytest.mark.parametrize("placement", ["table", "row"])
def test_the_number_of_requests_does_not_depend_on_the_number_of_tables(
    placement: str, bags: Sequence[int], expected: int
) -> None:
    for num_tables in (4, 300):
        tables = [table(f"t{k}", num_rows=2, placement=placement) for k in range(num_tables)]
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
