"""The compiled loops against numpy and against plain loops, bit for bit where they add."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings, strategies as st

from hybrid.embedding import kernels
from hybrid.embedding.kernels import Floats, Ints

INT32_ROWS = [1, 2, 2**11 - 1, 2**11, 2**11 + 1, 2**22, 2**22 + 1, 2**31 - 1]
INT64_ROWS = [*INT32_ROWS, 2**31, 2**31 + 1, 2**33 + 5, 2**40]
ID_TYPES: list[tuple[type[np.signedinteger[Any]], list[int]]] = [
    (np.int32, INT32_ROWS),
    (np.int64, INT64_ROWS),
]
id_types = pytest.mark.parametrize("id_dtype", [np.int32, np.int64])
float_types = pytest.mark.parametrize("dtype", [np.float32, np.float64])
seeds = st.integers(0, 2**32 - 1)

examples = settings(max_examples=25, deadline=None, derandomize=True)


def some_ids(random: np.random.Generator, num_rows: int, size: int) -> npt.NDArray[np.int64]:
    """Ids below ``num_rows``: repeated ones, the smallest, the largest, and any."""
    few = random.integers(0, num_rows, 5)
    edges = np.array([0, num_rows - 1])
    return random.choice(np.concatenate([few, edges, random.integers(0, num_rows, size)]), size)


def order_of(ids_L: Ints) -> Ints:
    return np.argsort(ids_L, kind="stable").astype(np.int32)


class TestGrouping:
    @pytest.mark.parametrize(
        ("dtype", "num_rows"),
        [pytest.param(t, n, id=f"{t.__name__}-{n}") for t, rows in ID_TYPES for n in rows],
    )
    @given(seed=seeds, size=st.integers(0, 300))
    @settings(max_examples=10, deadline=None, derandomize=True)
    def test_group_ids_is_a_stable_sort(
        self, dtype: type[np.signedinteger[Any]], num_rows: int, seed: int, size: int
    ) -> None:
        ids_L = some_ids(np.random.default_rng(seed), num_rows, size).astype(dtype)
        given_L = ids_L.copy()
        rows_U, starts_V, order_L = kernels.group_ids(ids_L, num_rows)
        expected_U, first_U = np.unique(ids_L[order_of(ids_L)], return_index=True)
        assert rows_U.dtype == dtype
        assert starts_V.dtype == order_L.dtype == np.int32
        assert rows_U.tolist() == expected_U.tolist()
        assert starts_V.tolist() == [*first_U.tolist(), size]
        assert order_L.tolist() == order_of(ids_L).tolist()
        assert ids_L.tolist() == given_L.tolist()

        ranks_L = kernels.ranks(starts_V, order_L)
        assert rows_U[ranks_L].tolist() == ids_L.tolist()

    @given(seed=seeds, lengths=st.lists(st.integers(0, 4), max_size=20))
    @examples
    def test_each_sorted_id_has_its_bag(self, seed: int, lengths: list[int]) -> None:
        random = np.random.default_rng(seed)
        order_L = order_of(random.integers(0, 7, sum(lengths)))
        bag_L = np.repeat(np.arange(len(lengths)), lengths)
        for dtype in (np.int32, np.int64):
            offsets: Ints = np.array([0, *itertools.accumulate(lengths)], dtype)
            assert kernels.bags_in_order(offsets, order_L).tolist() == bag_L[order_L].tolist()


@given(
    seed=seeds,
    counts=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    size=st.integers(0, 4),
    with_positions=st.booleans(),
)
@id_types
@examples
def test_bag_addresses_are_sample_by_sample(
    seed: int,
    id_dtype: type[np.signedinteger[Any]],
    counts: list[int],
    size: int,
    with_positions: bool,
) -> None:
    random = np.random.default_rng(seed)
    num_features = len(counts) + 2  # two more than are asked for, in any order
    features_F = random.permutation(num_features)[: len(counts)]
    lengths = random.integers(0, 4, num_features * size)
    offsets = np.array([0, *lengths.cumsum()], np.int64)
    ids_L = random.integers(0, 1000, int(offsets[-1]))
    bases_FS = random.integers(0, 2**40 if id_dtype is np.int64 else 2**20, (len(counts), max(counts)))
    found: list[int] = []
    ends, positions = [0], list[int]()
    for b in range(size):
        for f, feature in enumerate(features_F.tolist()):
            bag = range(*offsets[feature * size + b : feature * size + b + 2].tolist())
            ids = [int(ids_L[p]) for p in bag]
            found += [int(bases_FS[f, i % counts[f]]) + i // counts[f] for i in ids]
            positions += bag
            ends.append(len(found))
    out_L, out_offsets = np.empty(len(found), id_dtype), np.empty(len(ends), np.int32)
    out_positions = np.empty(len(found) * with_positions, np.int64)
    out = out_L, out_offsets, out_positions
    kernels.bag_addresses(ids_L, offsets, size, features_F, bases_FS, np.array(counts), *out)
    assert out_L.tolist() == found
    assert out_offsets.tolist() == ends
    assert out_positions.tolist() == (positions if with_positions else [])


class Sorted:
    """Ids of random bags as a worker has them, sorted, with a gradient for each bag."""

    def __init__(self, seed: int, size: int, dim: int, dtype: type[np.floating[Any]]) -> None:
        random = np.random.default_rng(seed)
        num_bags = max(1, size // 3)
        bag_L = np.sort(random.integers(0, num_bags, size))
        ids_L = random.integers(0, 6, size).astype(np.int32)  # some twice in a bag
        self.rows_U, self.starts_V, order_L = kernels.group_ids(ids_L, 6)
        self.sources_L = bag_L[order_L].astype(np.int32)
        # Of so many sizes that another order of summation has other bits.
        self.grad_BD = (random.normal(size=(num_bags, dim)) * 10.0 ** random.integers(-3, 4)).astype(dtype)
        self.weights_L = random.normal(size=size).astype(dtype)
        self.winners_BD = random.integers(0, 6, (num_bags, dim)).astype(np.int32)

    def runs(self) -> Iterator[tuple[int, range]]:
        for u, (first, end) in enumerate(itertools.pairwise(self.starts_V.tolist())):
            yield u, range(first, end)


cases = given(seed=seeds, size=st.integers(0, 60), dim=st.sampled_from([1, 3, 8, 17]))


def assert_total(total: float, out_UD: Floats) -> None:
    """A total of all values, added up in any order."""
    tolerance = 1e-4 if out_UD.dtype == np.float32 else 1e-12
    assert total == pytest.approx(
        out_UD.sum(dtype=np.float64), abs=tolerance * max(1.0, float(np.abs(out_UD).sum()))
    )


class TestSums:
    @float_types
    @cases
    @examples
    def test_sum_rows_adds_in_order_bit_for_bit(
        self, dtype: type[np.floating[Any]], seed: int, size: int, dim: int
    ) -> None:
        case = Sorted(seed, size, dim, dtype)
        expected_UD = np.zeros((len(case.rows_U), dim), dtype)
        for u, run in case.runs():
            for i in run:
                expected_UD[u] = expected_UD[u] + case.grad_BD[case.sources_L[i]]
        out_UD = np.full_like(expected_UD, np.nan)
        assert_total(kernels.sum_rows(case.starts_V, case.sources_L, case.grad_BD, out_UD), expected_UD)
        assert out_UD.tolist() == expected_UD.tolist()

    @float_types
    @cases
    @examples
    def test_sum_weighted_rows_adds_in_order(
        self, dtype: type[np.floating[Any]], seed: int, size: int, dim: int
    ) -> None:
        """Each product rounds once together with its sum, or once more before it."""
        case = Sorted(seed, size, dim, dtype)
        wide: type[np.floating[Any]] = np.float64 if dtype is np.float32 else np.longdouble
        fused_UD = np.zeros((len(case.rows_U), dim), dtype)
        apart_UD = fused_UD.copy()
        for u, run in case.runs():
            for i in run:
                weight, grad_D = case.weights_L[i], case.grad_BD[case.sources_L[i]]
                exact_D = fused_UD[u].astype(wide) + weight.astype(wide) * grad_D.astype(wide)
                fused_UD[u] = exact_D.astype(dtype)
                apart_UD[u] = apart_UD[u] + weight * grad_D
        out_UD = np.full_like(fused_UD, np.nan)
        total = kernels.sum_weighted_rows(case.starts_V, case.sources_L, case.weights_L, case.grad_BD, out_UD)
        assert_total(total, fused_UD)
        if dtype is np.float32:  # long doubles round twice, now and then
            assert out_UD.tolist() in (fused_UD.tolist(), apart_UD.tolist())
        np.testing.assert_allclose(out_UD, fused_UD, rtol=0, atol=1e-5 * np.abs(case.grad_BD).max(initial=1))

    @float_types
    @id_types
    @cases
    @examples
    def test_sum_largest_rows_adds_winners_bit_for_bit(
        self,
        dtype: type[np.floating[Any]],
        id_dtype: type[np.signedinteger[Any]],
        seed: int,
        size: int,
        dim: int,
    ) -> None:
        case = Sorted(seed, size, dim, dtype)
        expected_UD = np.zeros((len(case.rows_U), dim), dtype)
        for u, run in case.runs():
            for source in sorted({int(case.sources_L[i]) for i in run}):
                won_D = case.winners_BD[source] == case.rows_U[u]
                expected_UD[u] = expected_UD[u] + np.where(won_D, case.grad_BD[source], dtype(0))
        out_UD = np.full_like(expected_UD, np.nan)
        total = kernels.sum_largest_rows(
            case.starts_V,
            case.sources_L,
            case.rows_U.astype(id_dtype),
            case.winners_BD.astype(id_dtype),
            case.grad_BD,
            out_UD,
        )
        assert_total(total, expected_UD)
        assert out_UD.tolist() == expected_UD.tolist()

    @float_types
    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_total_of_non_finite_gradients_is_not_finite(
        self, dtype: type[np.floating[Any]], bad: float
    ) -> None:
        for u, d in itertools.product(range(4), range(5)):
            grad_BD = np.ones((4, 5), dtype)
            grad_BD[u, d] = bad
            each_L = np.arange(4, dtype=np.int32)
            out_UD = np.empty_like(grad_BD)
            starts_V, weights_L = np.arange(5, dtype=np.int32), np.ones(4, dtype)
            totals = [
                kernels.sum_rows(starts_V, each_L, grad_BD, out_UD),
                kernels.sum_weighted_rows(starts_V, each_L, weights_L, grad_BD, out_UD),
                kernels.sum_largest_rows(
                    starts_V, each_L, each_L, np.repeat(each_L, 5).reshape(4, 5), grad_BD, out_UD
                ),
            ]
            assert not np.isfinite(totals).any()
