"""A remote dense net across RPC: gradients of the caller's input and of the net's own parameters."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import autograd as dist_autograd

from hybrid import wire
from hybrid.dense.remote import HostedNet
from hybrid.steps.rules import UpdateRules
from hybrid.steps.ticket import Purpose, Ticket
from hybrid.topology import MASTER

pytestmark = pytest.mark.usefixtures("loopback")

RATE = 0.5


def two_layers() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


class TwoLayers(HostedNet):
    def __init__(self, rules: UpdateRules) -> None:
        net = two_layers()
        super().__init__(net, torch.optim.SGD(net.parameters(), lr=RATE), rules)


@pytest.fixture
def remote() -> Iterator[wire.RemoteNet]:
    """A net that two trainers share."""
    rules = UpdateRules(2, timeout_seconds=5.0)
    net = wire.RemoteNet(MASTER, wire.create_module(MASTER, TwoLayers, rules))
    yield net
    net.call(TwoLayers.close).wait()


def hidden(seed: int) -> Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def train(net: wire.RemoteNet, trainer: int, step: int, hidden_BH: Tensor) -> Tensor:
    """One trainer's part of a step; the gradient of ``hidden_BH``."""
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [net(Ticket(trainer, step, step), hidden_BH).square().sum()])
        return dist_autograd.get_gradients(context)[hidden_BH]


def predict(net: wire.RemoteNet, step: int) -> Tensor:
    with torch.no_grad():
        return net(Ticket(0, step, step, purpose=Purpose.PREDICT), hidden(99))


def test_trainers_take_one_step_together_as_one_process_bit_for_bit(remote: wire.RemoteNet) -> None:
    plain = two_layers()
    optimizer = torch.optim.SGD(plain.parameters(), lr=RATE)
    for step in range(4):
        inputs = [hidden(2 * step + trainer) for trainer in range(2)]
        for hidden_BH in inputs:
            plain(hidden_BH).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        for trainer in (1, 0):
            gradient = train(remote, trainer, step, hidden(2 * step + trainer))
            expected = inputs[trainer].grad
            assert expected is not None
            assert torch.equal(gradient, expected)
        assert torch.equal(predict(remote, step + 1), plain(hidden(99)))
