"""Kernels against numpy and plain loops, bit for bit."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from hybrid.embedding import kernels

INT32_ROWS = [1, 2, 2**11 - 1, 2**11, 2**11 + 1, 2**22, 2**22 + 1, 2**31 - 1]
INT64_ROWS = [*INT32_ROWS, 2**31, 2**31 + 1, 2**33 + 5, 2**40]
id_types = pytest.mark.parametrize("id_dtype", [np.int32, np.int64])
float_types = pytest.mark.parametrize("dtype", [np.float32, np.float64])
seeds = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize(
    ("dtype", "num_rows"), [*((np.int32, n) for n in INT32_ROWS), *((np.int64, n) for n in INT64_ROWS)]
)
@given(seed=seeds, size=st.integers(0, 300))
@settings(max_examples=10, deadline=None, derandomize=True)
def test_group_ids_is_stable(dtype: type[np.signedinteger[Any]], num_rows: int, seed: int, size: int) -> None:
    random = np.random.default_rng(seed)
    few, edges = random.integers(0, num_rows, 5), np.array([0, num_rows - 1])
    choices = np.concatenate([few, edges, random.integers(0, num_rows, size)])
    ids_L = random.choice(choices, size).astype(dtype)
    given_ids, stable_L = ids_L.tolist(), np.argsort(ids_L, kind="stable")
    rows_U, starts_V, order_L = kernels.group_ids(ids_L, num_rows)
    expected_U, first_U = np.unique(ids_L[stable_L], return_index=True)
    assert rows_U.dtype == dtype
    assert starts_V.dtype == order_L.dtype == np.int32
    assert rows_U.tolist() == expected_U.tolist()
    assert starts_V.tolist() == [*first_U.tolist(), size]
    assert order_L.tolist() == stable_L.tolist()
    assert ids_L.tolist() == given_ids
    assert rows_U[kernels.rank_ids(starts_V, order_L)].tolist() == given_ids


@pytest.mark.parametrize("kind", ["sum", "weighted", "max"])
@float_types
@id_types
@given(seed=seeds, size=st.integers(0, 60), dim=st.sampled_from([1, 3, 8, 17]))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_sum_rows_adds_in_order_bit_for_bit(
    kind: str,
    id_dtype: type[np.signedinteger[Any]],
    dtype: type[np.floating[Any]],
    seed: int,
    size: int,
    dim: int,
) -> None:
    random = np.random.default_rng(seed)
    num_bags = max(1, size // 3)
    bag_L = np.sort(random.integers(0, num_bags, size))
    ids_L = random.integers(0, 6, size).astype(id_dtype)  # some twice in a bag
    rows_U, starts_V, order_L = kernels.group_ids(ids_L, 6)
    sources_L = bag_L[order_L].astype(np.int32)
    # Of so many sizes that another order of summation has other bits.
    grad_BD = (random.normal(size=(num_bags, dim)) * 10.0 ** random.integers(-3, 4)).astype(dtype)
    # Powers of two: a product rounds like a fused multiply-add.
    weights_L = 2.0 ** random.integers(-2, 3, size).astype(dtype) if kind == "weighted" else None
    winners_BD = random.integers(0, 6, (num_bags, dim)).astype(id_dtype) if kind == "max" else None
    expected_UD = np.zeros((len(rows_U), dim), dtype)
    for u, (first, end) in enumerate(itertools.pairwise(starts_V.tolist())):
        for i in range(first, end):
            grad_D = grad_BD[sources_L[i]]
            if weights_L is not None:
                grad_D = weights_L[i] * grad_D
            if winners_BD is not None:  # a row gets its gradient once, also if it occurs twice in a bag
                is_first = i == first or sources_L[i] != sources_L[i - 1]
                grad_D = np.where(is_first & (winners_BD[sources_L[i]] == rows_U[u]), grad_D, dtype(0))
            expected_UD[u] = expected_UD[u] + grad_D
    out_UD = np.full_like(expected_UD, np.nan)
    arguments, number = (starts_V, sources_L, grad_BD, out_UD, weights_L), grad_BD.dtype.type
    of_max = None if winners_BD is None else rows_U
    total = kernels.sum_rows(*arguments, of_max, winners_BD, None, number(1), number(1))
    assert out_UD.tolist() == expected_UD.tolist()
    tolerance = (1e-4 if dtype is np.float32 else 1e-12) * max(1.0, float(np.abs(out_UD).sum()))
    assert total == pytest.approx(out_UD.sum(dtype=np.float64), abs=tolerance)
    table_RD, scale, rate = random.normal(size=(6, dim)).astype(dtype), number(0.5), number(-0.25)
    added_RD = table_RD.copy()
    added_RD[rows_U] += rate * (scale * out_UD)
    assert kernels.sum_rows(*arguments, rows_U, winners_BD, table_RD, scale, rate) == total
    assert table_RD.tolist() == added_RD.tolist()
