"""What one trainer alone gathers; of several, tests/comparison/test_models.py."""

import torch
import torch.distributed as dist

from hybrid.custom_loop.all_gather import gather

ALONE = dist.ProcessGroup(0, 1)  # type: ignore[call-arg]
CPU = torch.device("cpu")


def test_what_is_trained_keeps_its_gradients_and_the_rest_has_none() -> None:
    leaf = torch.arange(4.0, requires_grad=True)
    values = leaf * 3
    assert gather(values, ALONE, CPU) is values
    assert not gather(values.detach(), ALONE, CPU).requires_grad
    with torch.no_grad():
        assert not gather(values, ALONE, CPU).requires_grad
