"""A remote dense net across RPC: gradients of the caller's input and of the net's own parameters."""

import pytest
import torch
from support.seeded import random, seeded
from torch import Tensor, nn
from torch.distributed import autograd as dist_autograd

from hybrid import transport
from hybrid.dense.compilation import compiled
from hybrid.dense.hosted_net import HostedNet
from hybrid.protocol.ticket import Purpose, Ticket
from hybrid.protocol.update_rules import UpdateRules
from hybrid.topology import MASTER

pytestmark = pytest.mark.usefixtures("loopback")

RATE, STEPS = 0.5, 4


def two_layers() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))).double()


def hidden(seed: int) -> Tensor:
    return random(5, 3, seed=seed, dtype=torch.float64).requires_grad_()


class TwoLayers(HostedNet):
    def __init__(self, is_script: bool, rules: UpdateRules) -> None:
        net = compiled(two_layers(), "script", [hidden(0)]) if is_script else two_layers()
        super().__init__(net, torch.optim.Adagrad(net.parameters(), lr=RATE, eps=1.0), rules)


def train(net: transport.RemoteNet, trainer: int, step: int, hidden_BH: Tensor) -> Tensor:
    """One trainer's part of a step; the gradient of ``hidden_BH``."""
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [net(Ticket(trainer, step, step), hidden_BH).square().sum()])
        return dist_autograd.get_gradients(context)[hidden_BH]


def predict(net: transport.RemoteNet, step: int) -> Tensor:
    with torch.no_grad():
        return net(Ticket(0, step, step, purpose=Purpose.PREDICT), hidden(99))


@pytest.mark.parametrize(("is_script", "tolerance"), [(False, 0.0), (True, 1e-12)])
def test_trainers_take_one_step_together_as_one_process(is_script: bool, tolerance: float) -> None:
    """Bit for bit, but where TorchScript rounds in its own way."""

    def assert_same(ours: Tensor, theirs: Tensor | None) -> None:
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)

    rules = UpdateRules(2, timeout_seconds=5.0)
    remote = transport.RemoteNet(MASTER, transport.create_module(MASTER, TwoLayers, is_script, rules))
    plain = two_layers()
    optimizer = torch.optim.Adagrad(plain.parameters(), lr=RATE, eps=1.0)
    for step in range(STEPS):
        inputs = [hidden(2 * step + trainer) for trainer in range(2)]
        for hidden_BH in inputs:
            plain(hidden_BH).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        for trainer in (1, 0):
            assert_same(train(remote, trainer, step, hidden(2 * step + trainer)), inputs[trainer].grad)
        assert_same(predict(remote, step + 1), plain(hidden(99)))
    hosted: HostedNet = remote.local_value()
    assert isinstance(hosted.net, torch.jit.ScriptModule) == is_script
    assert hosted.version == STEPS
    remote.call(TwoLayers.close).wait()
