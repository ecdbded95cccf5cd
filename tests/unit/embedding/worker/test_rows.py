"""Rows taken out, put back and added to, against indexing in torch."""

import pytest
import torch

from hybrid.embedding.worker.row_blocks import add, put, take


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(9,), (9, 1), (9, 16), (50, 17), (0, 3)], ids=str)
def test_some_rows_are_taken_put_and_added(
    shape: tuple[int, ...], ids_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    """In widths that vector registers hold and do not, at scales whose products round."""
    generator = torch.Generator().manual_seed(0)
    for size in {0, shape[0] // 2, shape[0]}:
        whole = torch.randn(shape, dtype=dtype, generator=generator)
        rows_U = torch.randperm(shape[0], generator=generator)[:size].to(ids_dtype)
        assert torch.equal(take(whole, rows_U), whole[rows_U])

        part = torch.randn(size, *shape[1:], dtype=dtype, generator=generator)
        expected = whole.index_copy(0, rows_U.long(), part)
        put(whole, rows_U, part)
        assert torch.equal(whole, expected)
        if len(shape) == 2:
            for scale in (1.0, -0.3, 1e-3):
                expected[rows_U] = expected[rows_U].add_(part, alpha=scale)
                add(whole, rows_U, part, scale)
                assert torch.equal(whole, expected)
