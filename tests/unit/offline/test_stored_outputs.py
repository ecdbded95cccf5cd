"""Outputs on the disk are tied as those in memory are, however little is looked at together."""

from pathlib import Path

import pytest
import torch

from hybrid.metrics import Predictions
from workers.offline.output_file import StoredOutputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows_at_once", [1000, 7])
@pytest.mark.parametrize("kinds", [1, 12, 1 << 40])
@pytest.mark.parametrize("row_shape", [(), (3,)])
def test_equal_samples_get_the_same_outputs(
    tmp_path: Path, dtype: torch.dtype, rows_at_once: int, kinds: int, row_shape: tuple[int, ...]
) -> None:
    draw = torch.Generator().manual_seed(1)
    outputs_NO = torch.randn(100, *row_shape, generator=draw).to(dtype)
    keys_N = torch.randint(-kinds, kinds, (100,), generator=draw)
    stored = StoredOutputs(tmp_path, 100, row_shape[0] if row_shape else 1, dtype, rows_at_once)
    for some in torch.arange(100).split(13):
        stored.append(outputs_NO[some], keys_N[some])
    stored.tie()
    found_NO = stored.outputs(0, 100)
    expected_NO = Predictions(outputs_NO, torch.empty(0), keys_N).tied().outputs
    assert found_NO.dtype == dtype
    if rows_at_once == 1000:
        assert torch.equal(found_NO, expected_NO)
    assert found_NO.shape == expected_NO.shape
    assert torch.allclose(found_NO, expected_NO, rtol=1e-6)
    for key in keys_N.unique():
        assert len(found_NO[keys_N == key].unique(dim=0)) == 1
    assert torch.equal(stored.outputs(20, 30), found_NO[20:30])
