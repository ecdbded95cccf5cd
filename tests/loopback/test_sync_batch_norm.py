"""Batch normalization over trainers, here of one, equals that of torch."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hybrid.dense.sync_batch_norm import SyncBatchNorm, local_statistics

pytestmark = pytest.mark.usefixtures("loopback", "group")


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SyncBatchNorm, "group", dist.group.WORLD)


@pytest.mark.parametrize(
    ("shape", "options", "dtype", "tolerance"),
    [
        ((5, 3), {}, torch.float64, 1e-12),
        ((5, 3, 2), {"momentum": None}, torch.float64, 1e-12),
        ((5, 3), {"affine": False, "track_running_stats": False}, torch.float64, 1e-12),
        ((5, 3), {"eps": 0.1}, torch.bfloat16, 5e-2),
    ],
    ids=["samples", "positions", "no parameters", "half precision"],
)
def test_layer_equals_that_of_torch(
    shape: tuple[int, ...], options: dict[str, Any], dtype: torch.dtype, tolerance: float
) -> None:
    wide = torch.promote_types(dtype, torch.float32)
    plain, layer = (kind(3, **options).to(wide) for kind in (nn.BatchNorm1d, SyncBatchNorm))
    for step in range(3):
        values = torch.randn(shape, generator=torch.Generator().manual_seed(step)).to(dtype)
        results: list[list[Any]] = []
        for norm in (plain, layer):
            inputs = values.clone().requires_grad_()
            output = norm(inputs)
            norm.zero_grad()
            (output**3).sum().backward()
            results.append([output, inputs.grad, *(p.grad for p in norm.parameters()), *norm.buffers()])
        for found, expected in zip(*results, strict=True):
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    plain.eval()
    layer.eval()
    torch.testing.assert_close(plain(values), layer(values), rtol=tolerance, atol=tolerance)


def test_one_value_per_channel_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"1$"):
        SyncBatchNorm(3)(torch.zeros(1, 3))


def test_a_trainer_can_compute_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does so to find the layer of an error, while others wait."""
    monkeypatch.setattr(SyncBatchNorm, "group", object())  # which a reduction refuses
    layer, values = SyncBatchNorm(3), torch.eye(3)
    with local_statistics():
        torch.testing.assert_close(layer(values), nn.BatchNorm1d(3)(values))
        layer(values[:1])
    assert torch.equal(layer.get_buffer("running_mean"), torch.zeros(3))
