"""Pooling against plain tensor arithmetic; the private torch function relied upon."""

import pytest
import torch
import torch.nn.functional as F
from support.bags import BAGS, bags_of, every_kind, plain_pool, some_rows

from hybrid.embedding import kernels
from hybrid.embedding.bags import Bags, concatenate, pack_items, pool, pool_and_record, unpack_items
from hybrid.embedding.row_gradients import RowGradients
from hybrid.embedding.table_spec import Pooling


@every_kind
def test_pooling_equals_plain_arithmetic(bags: Bags) -> None:
    weight_RD = some_rows()
    pooled_BD, _ = pool_and_record(weight_RD, bags)
    assert torch.equal(pool(weight_RD, bags), pooled_BD)
    torch.testing.assert_close(pooled_BD, plain_pool(weight_RD, bags), rtol=1e-14, atol=1e-14)


SINGLE = Bags(torch.tensor([1, 2]))


@pytest.mark.parametrize(
    "parts",
    [
        *(
            [bags_of(BAGS, weighted=first), bags_of(BAGS[::-1][:4], weighted=second)]
            for first in (False, True)
            for second in (False, True)
        ),
        [SINGLE, bags_of(BAGS), SINGLE],
    ],
    ids=["unweighted", "second weighted", "first weighted", "weighted", "single ids among bags"],
)
def test_concatenated_bags_pool_as_their_parts(parts: list[Bags]) -> None:
    weight_RD = some_rows()
    expected_BD = torch.cat([pool(weight_RD, part) for part in parts])
    torch.testing.assert_close(pool(weight_RD, concatenate(parts)), expected_BD, rtol=1e-14, atol=1e-14)


def test_concatenated_bags_keep_winners() -> None:
    parts = [pool_and_record(some_rows(), bags_of(bags, Pooling.MAX))[1] for bags in (BAGS, BAGS[::-1][:4])]
    whole = pool_and_record(some_rows(), bags_of([*BAGS, *BAGS[::-1][:4]], Pooling.MAX))[1].winners_BD
    winners_BD = concatenate(parts).winners_BD
    assert whole is not None
    assert winners_BD is not None
    assert torch.equal(winners_BD, whole)


def test_torch_has_the_private_embedding_bag() -> None:
    """A torch that changes it must fail here first, loudly."""
    assert str(torch.ops.aten._embedding_bag.default._schema) == (
        "aten::_embedding_bag(Tensor weight, Tensor indices, Tensor offsets, bool scale_grad_by_freq=False, "
        "int mode=0, bool sparse=False, Tensor? per_sample_weights=None, bool include_last_offset=False, "
        "int padding_idx=-1) -> (Tensor, Tensor, Tensor, Tensor)"
    )


def test_torch_numbers_poolings_as_here() -> None:
    weight_RD = some_rows()
    ids_L, starts = torch.tensor([1, 5, 2]), torch.tensor([0, 3])
    for mode, pooling in enumerate(Pooling):
        result = torch.ops.aten._embedding_bag(weight_RD, ids_L, starts, False, mode, False, None, True)
        assert torch.equal(result[0], F.embedding_bag(ids_L[None], weight_RD, mode=pooling.value))
    assert torch.equal(result[3][0], ids_L[weight_RD[ids_L].argmax(0)])


def test_unpacked_items_equal_packed_ones() -> None:
    ids, offsets, weights = torch.tensor([3, 1, 2]), torch.tensor([0, 1, 3]), torch.tensor([0.5, 1.0, 2.0])
    items = [
        (0, Bags(ids)),
        (2, Bags(ids, offsets, weights)),
        (1, Bags(ids, offsets, None, Pooling.MAX)),
        (0, Bags(ids, offsets, None, Pooling.MEAN)),
    ]
    plain, tensors = pack_items(items)
    assert [type(value) for item in plain for value in item] == [int, str, bool, bool] * len(items)
    assert unpack_items(plain, tensors) == items


@pytest.mark.parametrize("pooling", list(Pooling))
def test_gradients_are_of_the_rows_that_were_read(pooling: Pooling) -> None:
    """Rows that change meanwhile, as in pipelined steps, change no gradient."""
    weight_RD = some_rows()
    _, bags = pool_and_record(weight_RD, bags_of(BAGS, pooling))
    grad_BD = torch.randn(bags.num_bags, weight_RD.shape[1], dtype=torch.float64)
    grouped = kernels.group_ids(bags.ids_L.numpy(), len(weight_RD))
    expected_UD = RowGradients(bags, grad_BD, grouped).whole()
    weight_RD.neg_()
    assert torch.equal(RowGradients(bags, grad_BD, grouped).whole(), expected_UD)
