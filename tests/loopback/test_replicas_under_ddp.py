"""Replicas of a net under DDP, in distributed autograd: the gradients are those of the net by itself."""

import pytest
import torch
from support.replicas import CPUS, NEEDS_CUDA
from support.seeded import random, seeded
from torch import Tensor, nn
from torch.distributed import autograd as dist_autograd
from torch.distributed.nn import RemoteModule
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from hybrid.dense.data_parallel.replicas import DataParallel
from hybrid.topology import MASTER

pytestmark = pytest.mark.usefixtures("loopback", "unsigned")


class Embeddings(nn.Module):
    """What a worker would hold."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4, _weight=random(10, 4, dtype=dtype))

    def forward(self, ids_B: Tensor) -> Tensor:
        vectors_BD: Tensor = self.table(ids_B)
        return vectors_BD


def build_net(dtype: torch.dtype) -> nn.Module:
    net = seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
    net.register_parameter("unused", nn.Parameter(torch.ones(2)))
    return net.to(dtype)


@pytest.mark.parametrize(
    ("devices", "dtype", "tolerance"),
    [
        (CPUS, torch.float64, 1e-12),
        (CPUS, torch.float32, 1e-6),
        pytest.param(["cuda:0", "cpu"], torch.float64, 1e-12, marks=[pytest.mark.gpu, NEEDS_CUDA]),
    ],
)
@pytest.mark.parametrize("batch_size", [7, 1, 0])
def test_gradients_are_those_of_the_net(
    batch_size: int, devices: list[str], dtype: torch.dtype, tolerance: float
) -> None:
    ids_B = torch.arange(batch_size) % 3
    table, net = Embeddings(dtype), build_net(dtype)
    (net(table(ids_B)).square().sum() + 0.0 * net.get_parameter("unused").sum()).backward()
    expected = [parameter.grad for parameter in (*table.parameters(), *net.parameters())]

    remote = RemoteModule(f"{MASTER.rpc_name}/cpu", Embeddings, (dtype,))
    inner = build_net(dtype).to(devices[0])
    ddp = DistributedDataParallel(DataParallel(inner, devices))
    for _ in range(2):
        with dist_autograd.context() as context:
            loss = ddp(remote.forward(ids_B)).square().sum()
            dist_autograd.backward(context, [loss])
            gradients = dist_autograd.get_gradients(context)
        of_table = remote.remote_parameters()[0].local_value()
        ours = [gradients[parameter] for parameter in (of_table, *inner.parameters())]
        assert_close(ours, expected, rtol=tolerance, atol=tolerance, check_device=False)
