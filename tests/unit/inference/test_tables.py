"""Rows in fewer bits: how far they are from those that they are made of, and that tables give them."""

import pytest
import torch

from hybrid.export.table_export import NarrowTable, stored_rows


def rows(num_rows: int = 70_000) -> torch.Tensor:
    """More than are converted at once; one row is of zeros, and rows are of different sizes."""
    rows_RD = torch.randn(num_rows, 3, generator=torch.Generator().manual_seed(1))
    rows_RD *= torch.linspace(1e-3, 10, num_rows).unsqueeze(1)
    rows_RD[5] = 0.0
    return rows_RD


def test_int8_is_off_by_half_a_step_at_most() -> None:
    rows_RD = rows()
    stored = stored_rows(rows_RD, "int8")
    assert stored.rows_RD.dtype == torch.int8
    found_RD = stored.values(0, len(rows_RD))
    step_R1 = rows_RD.abs().amax(1, keepdim=True) / 127
    assert ((found_RD - rows_RD).abs() <= step_R1 / 2 * (1 + 1e-5)).all()
    assert (found_RD[5] == 0).all()
    assert stored.largest_change(rows_RD) == pytest.approx((found_RD - rows_RD).abs().max().item(), rel=1e-6)


def test_bfloat16_has_eight_bits_of_precision() -> None:
    rows_RD = rows(100)
    stored = stored_rows(rows_RD, "bfloat16")
    assert ((stored.values(0, 100) - rows_RD).abs() <= rows_RD.abs() * 2.0**-8).all()


def test_float32_is_what_it_was() -> None:
    assert stored_rows(rows(9), "float32").largest_change(rows(9)) == 0.0


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_a_table_gives_the_rows_that_it_holds(kind: str) -> None:
    stored = stored_rows(rows(20), kind)
    ids = torch.tensor([3, 19, 3, 5])
    assert torch.equal(NarrowTable(stored, torch.float32)(ids), stored.values(0, 20)[ids])
