"""Pooling and row gradients against autograd; the private torch function relied upon."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid.embedding.bags import Bags, concatenate, pool, pool_recorded
from hybrid.embedding.gradients import RowGradients
from hybrid.embedding.spec import Pooling

ROWS, DIM = 13, 3
DTYPES = [torch.float32, torch.float64]
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-14}
EMPTY_INDEX = torch.empty(0, dtype=torch.int64)

# Bags with none, one, several and repeated ids; the first and the last are empty.
BAGS = [[], [3, 3, 12], [0], [], [5, 3, 1, 0], [12, 12], []]


def bags_of(lists: list[list[int]], pooling: Pooling = Pooling.SUM, weighted: bool = False) -> Bags:
    ids_L = torch.tensor([i for bag in lists for i in bag], dtype=torch.int64)
    offsets = torch.tensor([0] + [len(bag) for bag in lists]).cumsum(0)
    weights_L = torch.linspace(-1, 2, len(ids_L)) if weighted else None
    return Bags(ids_L, offsets, weights_L, pooling)


def row_gradients(bags: Bags, grad_BD: Tensor) -> tuple[Tensor, Tensor]:
    gradients = RowGradients(bags, grad_BD, ROWS)
    return gradients.rows_U, gradients.whole()


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def plain_pool(weight_RD: Tensor, bags: Bags) -> Tensor:
    """Pooling bag by bag with plain tensor arithmetic."""
    offsets = bags.offsets.tolist() if bags.offsets is not None else list(range(len(bags.ids_L) + 1))
    pooled = []
    for start, stop in itertools.pairwise(offsets):
        rows_LD = weight_RD[bags.ids_L[start:stop]]
        if bags.weights_L is not None:
            rows_LD = rows_LD * bags.weights_L[start:stop, None].to(rows_LD.dtype)
        if start == stop:
            pooled.append(weight_RD.new_zeros(weight_RD.shape[1]))
        elif bags.pooling is Pooling.SUM:
            pooled.append(rows_LD.sum(0))
        elif bags.pooling is Pooling.MEAN:
            pooled.append(rows_LD.mean(0))
        else:
            # As EmbeddingBag does, the first of equal rows takes the whole gradient.
            pooled.append(rows_LD.gather(0, rows_LD.argmax(0, keepdim=True))[0])
    return torch.stack(pooled) if pooled else weight_RD.new_zeros(0, weight_RD.shape[1])


CASES = [
    pytest.param(bags_of(BAGS, Pooling.SUM), id="sum"),
    pytest.param(bags_of(BAGS, Pooling.MEAN), id="mean"),
    pytest.param(bags_of(BAGS, Pooling.MAX), id="max"),
    pytest.param(bags_of(BAGS, Pooling.SUM, weighted=True), id="weighted"),
    pytest.param(Bags(torch.tensor([4, 0, 4, 12, 0])), id="one id each"),
    *(pytest.param(bags_of([[], [], []], pooling), id=f"empty bags, {pooling}") for pooling in Pooling),
    *(pytest.param(bags_of([], pooling), id=f"no bags, {pooling}") for pooling in Pooling),
    pytest.param(Bags(EMPTY_INDEX), id="no ids"),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bags", CASES)
def test_pooling_and_row_gradients_equal_autograd(bags: Bags, dtype: torch.dtype) -> None:
    weight_RD = random(ROWS, DIM, dtype=dtype).requires_grad_()
    expected_BD = plain_pool(weight_RD, bags)
    pooled_BD, recorded = pool_recorded(weight_RD.detach(), bags)
    assert torch.equal(pool(weight_RD.detach(), bags), pooled_BD)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(pooled_BD, expected_BD.detach(), rtol=tolerance, atol=tolerance)

    grad_BD = random(*pooled_BD.shape, dtype=dtype, seed=1)
    rows_U, grad_UD = row_gradients(recorded, grad_BD)
    assert rows_U.tolist() == sorted(set(bags.ids_L.tolist()))
    dense_RD = torch.zeros(ROWS, DIM, dtype=dtype).index_copy(0, rows_U, grad_UD)
    (expected_RD,) = torch.autograd.grad((expected_BD * grad_BD).sum() + 0 * weight_RD.sum(), weight_RD)
    torch.testing.assert_close(dense_RD, expected_RD, rtol=tolerance, atol=tolerance)


def test_a_part_of_the_gradient_reaches_only_the_first_of_equal_largest_rows() -> None:
    weight_RD = torch.tensor([[1.0, 5.0], [5.0, 1.0], [5.0, 5.0]])
    _, bags = pool_recorded(weight_RD, bags_of([[0, 1, 2]], Pooling.MAX))
    rows_U, grad_UD = row_gradients(bags, torch.tensor([[1.0, 1.0]]))
    assert rows_U.tolist() == [0, 1, 2]
    assert grad_UD.tolist() == [[0.0, 1.0], [1.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("pooling", list(Pooling))
def test_gradients_are_those_of_the_time_of_the_lookup(pooling: Pooling) -> None:
    """Rows that change meanwhile, as in pipelined steps, change no gradient."""
    weight_RD = random(ROWS, DIM, dtype=torch.float64)
    pooled_BD, bags = pool_recorded(weight_RD, bags_of(BAGS, pooling))
    grad_BD = random(*pooled_BD.shape, dtype=torch.float64, seed=1)
    expected_UD = row_gradients(bags, grad_BD)[1]
    weight_RD.neg_()
    assert torch.equal(row_gradients(bags, grad_BD)[1], expected_UD)


def test_gradients_of_concatenated_largest_rows_are_those_of_their_parts() -> None:
    weight_RD = random(ROWS, DIM, dtype=torch.float64)
    parts = [pool_recorded(weight_RD, bags_of(bags, Pooling.MAX))[1] for bags in (BAGS, BAGS[::-1][:4])]
    grads = [random(len(bags), DIM, dtype=torch.float64, seed=s) for s, bags in enumerate((BAGS, BAGS[:4]))]
    expected_RD = torch.zeros(ROWS, DIM, dtype=torch.float64)
    for part, grad_BD in zip(parts, grads, strict=True):
        expected_RD.index_add_(0, *row_gradients(part, grad_BD))
    rows_U, grad_UD = row_gradients(concatenate(parts), torch.cat(grads))
    torch.testing.assert_close(grad_UD, expected_RD[rows_U], rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("pooling", list(Pooling))
def test_the_same_bags_give_the_same_bits(pooling: Pooling) -> None:
    generator = torch.Generator().manual_seed(2)
    ids_L = torch.randint(0, 7, (3000,), generator=generator)
    grad_BD = random(600, 16, dtype=torch.float32)
    weight_RD = random(7, 16, dtype=torch.float32)
    _, bags = pool_recorded(weight_RD, Bags(ids_L, torch.arange(0, 3001, 5), None, pooling))
    first = row_gradients(bags, grad_BD)[1]
    assert all(torch.equal(first, row_gradients(bags, grad_BD)[1]) for _ in range(5))


@pytest.mark.parametrize("weighted", [(False, False), (True, True), (True, False), (False, True)])
def test_concatenated_bags_pool_as_their_parts(weighted: tuple[bool, bool]) -> None:
    weight_RD = random(ROWS, DIM, dtype=torch.float64)
    parts = [bags_of(BAGS, weighted=weighted[0]), bags_of(BAGS[::-1][:4], weighted=weighted[1])]
    expected_BD = torch.cat([pool(weight_RD, part) for part in parts])
    torch.testing.assert_close(pool(weight_RD, concatenate(parts)), expected_BD, rtol=1e-14, atol=1e-14)


def test_concatenating_mixes_bags_with_and_without_offsets() -> None:
    single, many = Bags(torch.tensor([1, 2])), bags_of(BAGS)
    mixed = concatenate([single, many, single])
    assert mixed.offsets is not None
    assert mixed.ids_L.tolist() == [1, 2, *(i for bag in BAGS for i in bag), 1, 2]
    weight_RD = random(ROWS, DIM, dtype=torch.float64)
    expected_BD = torch.cat([pool(weight_RD, b) for b in (single, many, single)])
    torch.testing.assert_close(pool(weight_RD, mixed), expected_BD, rtol=1e-14, atol=1e-14)


def test_concatenating_single_ids_needs_no_offsets() -> None:
    one = Bags(torch.tensor([1, 2]))
    assert concatenate([one]) is one
    both = concatenate([one, one])
    assert both.offsets is None
    assert both.ids_L.tolist() == [1, 2, 1, 2]


def test_torch_still_has_the_private_function_as_used_here() -> None:
    """A torch that changes it must fail here first, loudly."""
    assert str(torch.ops.aten._embedding_bag.default._schema) == (
        "aten::_embedding_bag(Tensor weight, Tensor indices, Tensor offsets, bool scale_grad_by_freq=False, "
        "int mode=0, bool sparse=False, Tensor? per_sample_weights=None, bool include_last_offset=False, "
        "int padding_idx=-1) -> (Tensor, Tensor, Tensor, Tensor)"
    )


def test_torch_numbers_the_poolings_as_here_and_returns_the_largest_rows_last() -> None:
    weight_RD = random(ROWS, DIM, dtype=torch.float64)
    ids_L, starts = torch.tensor([1, 5, 2]), torch.tensor([0, 3])
    for mode, pooling in enumerate(Pooling):
        result = torch.ops.aten._embedding_bag(weight_RD, ids_L, starts, False, mode, False, None, True)
        assert torch.equal(result[0], F.embedding_bag(ids_L[None], weight_RD, mode=pooling.value))
    assert torch.equal(result[3][0], ids_L[weight_RD[ids_L].argmax(0)])
