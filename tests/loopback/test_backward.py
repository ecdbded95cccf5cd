"""The two backward passes give the same, and only one of them is distributed."""

import pytest
import torch
from torch import nn
from torch.distributed import autograd as dist_autograd

from hybrid.engine.backward import record_graph

pytestmark = pytest.mark.usefixtures("loopback")


def contexts() -> int:
    return int(dist_autograd._get_debug_info()["num_autograd_contexts"])


@pytest.mark.parametrize("spans_processes", [False, True])
def test_parameters_get_their_gradients_and_keep_none(spans_processes: bool) -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    unused = nn.Linear(2, 2)
    net.register_module("unused", unused)
    x = torch.rand(5, 3)
    expected = torch.autograd.grad(
        net[2](net[1](net[0](x))).sum(), [*net[0].parameters(), *net[2].parameters()]
    )
    for _ in range(2):  # nothing is left over from the first
        before = contexts()
        with record_graph(net, spans_processes) as graph:
            assert contexts() - before == spans_processes
            graph.backward(net[2](net[1](net[0](x))).sum())
            found = graph.gradients()
        assert contexts() == before
        assert found.keys() == {*net[0].parameters(), *net[2].parameters()}
        of_parameters = [found[p] for p in (*net[0].parameters(), *net[2].parameters())]
        assert all(map(torch.equal, of_parameters, expected))
        assert all(parameter.grad is None for parameter in net.parameters())
