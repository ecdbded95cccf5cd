"""Initial rows of tables."""

import pytest
import torch
from torch import Tensor

from hybrid.embedding.worker.initial_rows import initialise_rows


def rows(num_rows: int, dim: int, seed: int = 1, table: str = "t", index: int = 0, count: int = 1) -> Tensor:
    out_RD = torch.empty(num_rows, dim)
    initialise_rows(out_RD, seed, table, 1.0, index, count)
    return out_RD


def test_initial_rows_are_uniform() -> None:
    values_N = rows(50_000, 4).flatten().double().sort().values
    size = len(values_N)
    assert values_N[0] >= -1.0
    assert values_N[-1] <= 1.0
    assert abs(values_N.mean()) < 4 / (3 * size) ** 0.5
    assert values_N.var() == pytest.approx(1 / 3, rel=0.01)
    # Kolmogorov-Smirnov distance to the uniform distribution; a true sample exceeds this once in 10^5.
    ranks_N = (torch.arange(size, dtype=torch.float64) + 0.5) / size
    assert ((values_N + 1) / 2 - ranks_N).abs().max() < 2.5 / size**0.5


@pytest.mark.parametrize(
    ("seed", "table"), [(2, "t"), (0, "t"), (1, "u"), (1, "C2")], ids=["seed", "seed 0", "table", "other"]
)
def test_tables_and_seeds_are_uncorrelated(seed: int, table: str) -> None:
    first, other = rows(10_000, 8).flatten(), rows(10_000, 8, seed, table).flatten()
    assert not set(first[:1000].tolist()) >= set(other[:1000].tolist())
    assert abs(torch.corrcoef(torch.stack([first, other]))[0, 1]) < 4 / 80_000**0.5


@pytest.mark.parametrize("count", [2, 3, 7])
def test_shards_have_the_rows_of_the_whole(count: int) -> None:
    whole = rows(100, 5)
    for index in range(count):
        assert torch.equal(rows(len(whole[index::count]), 5, index=index, count=count), whole[index::count])


def test_initial_rows_do_not_change_between_versions() -> None:
    """A run resumed or compared across versions starts from the same table."""
    golden = torch.tensor(
        [[0.44376230239868164, -0.6476776599884033], [0.20472872257232666, 0.7959177494049072]]
    )
    torch.testing.assert_close(rows(2, 2, seed=42, table="C1"), golden, rtol=0, atol=0)


def test_normal_rows_are_normal_in_whole_and_shards() -> None:
    whole = torch.empty(20_000, 4)
    initialise_rows(whole, 1, "t", 0.5, init="normal")
    values_N = whole.flatten().double().sort().values
    size = len(values_N)
    ranks_N = (torch.arange(size, dtype=torch.float64) + 0.5) / size
    assert (torch.special.ndtr(values_N / 0.5) - ranks_N).abs().max() < 2.5 / size**0.5
    assert whole.isfinite().all()
    for index in range(3):
        shard = torch.empty(len(whole[index::3]), 4)
        initialise_rows(shard, 1, "t", 0.5, index, 3, "normal")
        assert torch.equal(shard, whole[index::3])


def test_zeros_init_fills_zeros() -> None:
    out_RD = torch.ones(3, 2)
    initialise_rows(out_RD, 1, "t", 0.5, init="zeros")
    assert not out_RD.any()
