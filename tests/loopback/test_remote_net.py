"""A remote dense net that several trainers share: the step of one may fall into the pass of another."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import autograd as dist_autograd

from hybrid import wire
from hybrid.dense.optimizer import make_optimizer
from hybrid.topology import MASTER

pytestmark = pytest.mark.usefixtures("loopback")


class TwoLayers(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def gradients(net: wire.RemoteNet, hidden_BH: Tensor) -> Tensor:
    """The gradient of ``hidden_BH``, with a step of another trainer between the two passes."""
    hidden_BH = hidden_BH.clone().requires_grad_()
    with dist_autograd.context() as context, ThreadPoolExecutor(1) as other_trainer:
        output_BH = net(hidden_BH)
        other_trainer.submit(one_step, net).result(10)
        dist_autograd.backward(context, [output_BH.sum()])
        return dist_autograd.get_gradients(context)[hidden_BH]


def one_step(net: wire.RemoteNet) -> None:
    optimizer = net.optimizer(make_optimizer, "SGD", 0.5)
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [net(torch.ones(2, 3)).sum()])
        optimizer.step(context)


def test_a_pass_keeps_the_weights_it_began_with() -> None:
    net = wire.RemoteNet(MASTER, wire.create_module(MASTER, TwoLayers))
    plain = TwoLayers()
    plain.load_state_dict(net.remote().call("state_dict").wait())
    hidden_BH = torch.randn(5, 3, generator=torch.Generator().manual_seed(1)).requires_grad_()
    plain(hidden_BH).sum().backward()
    assert hidden_BH.grad is not None
    assert torch.equal(gradients(net, hidden_BH.detach()), hidden_BH.grad)
    stepped = net.remote().call("state_dict").wait()
    assert not torch.equal(stepped["2.bias"], plain.state_dict()["2.bias"])  # has a gradient for any weights
