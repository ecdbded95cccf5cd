"""A hosted dense net of several trainers, without RPC, equals one process."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
import torch
from support.seeded import random, seeded
from support.shards import PATIENCE_SECONDS, evaluate, train
from torch import Tensor, nn

from hybrid.checkpoint import checkpoint_folders
from hybrid.checkpoint.checkpoint_folders import Manifest
from hybrid.dense.dense_optimizer import make_optimizer
from hybrid.dense.hosted_net import HostedNet
from hybrid.errors import CheckpointError, NonFiniteError
from hybrid.updates.ticket import Ticket
from hybrid.updates.update_rules import UpdateMode, UpdateRules

RATE = 0.1
SIZE, WIDTH = 5, 3


def make_net(between: nn.Module | None = None) -> nn.Sequential:
    return seeded(lambda: nn.Sequential(nn.Linear(WIDTH, 4), between or nn.Tanh(), nn.Linear(4, 2)))


def hidden(step: int, trainer: int = 0, size: int = SIZE) -> Tensor:
    return random(size, WIDTH, seed=10 * step + trainer).requires_grad_()


def hosting(rules: UpdateRules, net: nn.Module | None = None, optimizer: str = "SGD") -> closing[HostedNet]:
    net = net or make_net()
    return closing(HostedNet(net, make_optimizer(net, optimizer, RATE), rules))


def pass_through(host: HostedNet, ticket: Ticket, hidden_BH: Tensor) -> Tensor:
    """Run a forward and a backward pass of one trainer; return the gradient of ``hidden_BH``."""
    host.call(ticket, hidden_BH).wait().square().sum().backward()
    assert hidden_BH.grad is not None
    return hidden_BH.grad


class Plain:
    """The same net in one process; gradients accumulate in ``.grad``, in trainer order."""

    def __init__(self, optimizer: str = "SGD") -> None:
        self.net = make_net()
        self._optimizer = make_optimizer(self.net, optimizer, RATE)

    def step(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Take a step; return the gradients of the inputs."""
        self._optimizer.zero_grad()
        for hidden_BH in inputs:
            self.net(hidden_BH).square().sum().backward()
        self._optimizer.step()
        return [hidden_BH.grad for hidden_BH in inputs if hidden_BH.grad is not None]


def assert_same_bits(host: HostedNet, plain: Plain | HostedNet) -> None:
    torch.testing.assert_close([*host.net.parameters()], [*plain.net.parameters()], rtol=0, atol=0)


class Shifts(nn.Module):
    """Two parameters that share one gradient tensor in autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.zeros(SIZE, WIDTH)) for _ in range(2))

    def forward(self, hidden_BH: Tensor) -> Tensor:
        return hidden_BH + self.first + self.second


def test_parameters_with_a_shared_gradient() -> None:
    with hosting(UpdateRules(2), Shifts()) as host:
        for trainer in range(2):
            pass_through(host, train(0, trainer), hidden(0, trainer))
        host.barrier.drain()
        expected = -RATE * 2 * (hidden(0, 0) + hidden(0, 1)).detach()
        for parameter in host.parameter_list:
            torch.testing.assert_close(parameter.detach(), expected)


class ConcurrentCalls(nn.Module):
    """A layer that waits for a concurrent second call."""

    def __init__(self) -> None:
        super().__init__()
        self._barrier = threading.Barrier(2, timeout=PATIENCE_SECONDS)

    def forward(self, hidden_BH: Tensor) -> Tensor:
        self._barrier.wait()
        return hidden_BH.tanh()


@pytest.mark.parametrize("mode", [UpdateMode.SYNC, UpdateMode.ASYNC])
def test_concurrent_calls_do_not_interfere(mode: UpdateMode) -> None:
    plain = Plain()
    net = make_net(ConcurrentCalls())
    parameters = list(net.parameters())
    with hosting(UpdateRules(2, mode), net) as host:
        with ThreadPoolExecutor(2) as pool:
            calls = [pool.submit(host.forward, train(0, t), hidden(0, t)) for t in range(2)]
        outputs = [call.result() for call in calls]
        for t, output in enumerate(outputs):
            assert torch.equal(output, plain.net(hidden(0, t)))
        assert all(ours is first for ours, first in zip(net.parameters(), parameters, strict=True))
        for output in outputs:
            output.square().sum().backward()
        host.barrier.drain()
        plain.step([hidden(0, t) for t in range(2)])
        if mode is UpdateMode.SYNC:
            assert_same_bits(host, plain)


def test_async_pass_keeps_its_initial_weights() -> None:
    plain = Plain()
    with hosting(UpdateRules(2, UpdateMode.ASYNC)) as host:
        hidden_BH = hidden(0)
        output = host.call(train(0), hidden_BH).wait()
        pass_through(host, train(0, 1), hidden(5))
        host.barrier.drain()
        assert not any(map(torch.equal, host.net.parameters(), plain.net.parameters()))
        output.square().sum().backward()
        host.barrier.drain()
        (expected,) = plain.step([hidden(0)])
        assert hidden_BH.grad is not None
        assert torch.equal(hidden_BH.grad, expected)


def test_prediction_uses_evaluation_mode_without_recording() -> None:
    net = make_net(nn.Dropout())
    with hosting(UpdateRules(1), net) as host:
        pass_through(host, train(0), hidden(0))
        predicted = host.call(evaluate(1), hidden(1)).wait()
        assert not predicted.requires_grad
        assert all(module.training for module in net.modules())
        assert torch.equal(predicted, net.eval()(hidden(1)))


def test_checkpoint_of_another_net_raises_an_error(tmp_path: Path) -> None:
    with hosting(UpdateRules(1)) as host, hosting(UpdateRules(1), nn.Linear(WIDTH, 1)) as other:
        partial_folder = checkpoint_folders.begin(tmp_path / "step-0")
        host.begin_save(is_copied=True)
        manifest = Manifest(0, 0, {}, host.write(partial_folder))
        folder = checkpoint_folders.commit(partial_folder, manifest)
        with pytest.raises(CheckpointError, match=f"^{folder}: "):
            other.load(folder, 0)


@pytest.mark.parametrize("is_checked", [True, False])
def test_non_finite_gradient_names_its_parameter(is_checked: bool) -> None:
    with hosting(UpdateRules(1, check_finite=is_checked)) as host:
        output = host.call(train(0), hidden(0)).wait()
        (torch.nan * output).sum().backward()
        if is_checked:
            with pytest.raises(NonFiniteError, match=r"^step 0: .*0\.weight"):
                host.barrier.drain()
        else:
            host.barrier.set_scale(0, None)
            host.barrier.drain()
            assert host.call(evaluate(1), hidden(1)).done()
