"""A dense net that several trainers share, without RPC: its steps equal those of one process."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from support.seeded import random, seeded
from support.shards import PATIENCE_SECONDS, evaluate, train
from torch import Tensor, nn

from hybrid.checkpoint import checkpoint_folders
from hybrid.checkpoint.checkpoint_manifest import Manifest
from hybrid.dense.dense_optimizer import make_optimizer
from hybrid.dense.hosted_net import HostedNet
from hybrid.errors import CheckpointError, NonFiniteError
from hybrid.protocol.ticket import Ticket
from hybrid.protocol.update_rules import UpdateMode, UpdateRules

RATE = 0.1
SIZE, WIDTH = 5, 3


def make_net(between: nn.Module | None = None) -> nn.Sequential:
    return seeded(lambda: nn.Sequential(nn.Linear(WIDTH, 4), between or nn.Tanh(), nn.Linear(4, 2)))


def hidden(step: int, trainer: int = 0, size: int = SIZE) -> Tensor:
    return random(size, WIDTH, seed=10 * step + trainer).requires_grad_()


@contextmanager
def hosting(
    rules: UpdateRules,
    net: nn.Module | None = None,
    optimizer: str = "SGD",
    form: nn.Module | None = None,
) -> Iterator[HostedNet]:
    net = net or make_net()
    host = HostedNet(net, make_optimizer(net.parameters(), optimizer, RATE), rules, form)
    try:
        yield host
    finally:
        host.close()


def pass_through(host: HostedNet, ticket: Ticket, hidden_BH: Tensor) -> Tensor:
    """One trainer's forward and backward pass; the gradient of ``hidden_BH``."""
    host.call(ticket, hidden_BH).wait().square().sum().backward()
    assert hidden_BH.grad is not None
    return hidden_BH.grad


class Plain:
    """The same net in one process: gradients accumulate in ``.grad``, trainer by trainer."""

    def __init__(self, optimizer: str = "SGD") -> None:
        self.net = make_net()
        self._optimizer = make_optimizer(self.net.parameters(), optimizer, RATE)

    def step(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """One step; the gradients of the inputs."""
        self._optimizer.zero_grad()
        for hidden_BH in inputs:
            self.net(hidden_BH).square().sum().backward()
        self._optimizer.step()
        return [hidden_BH.grad for hidden_BH in inputs if hidden_BH.grad is not None]


def assert_same_bits(host: HostedNet, plain: Plain | HostedNet) -> None:
    torch.testing.assert_close([*host.net.parameters()], [*plain.net.parameters()], rtol=0, atol=0)


class Shifts(nn.Module):
    """Two parameters, of which autograd has a single gradient."""

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


class Meeting(nn.Module):
    """A layer that waits a while for a second call of the net to be in it at the same time."""

    def __init__(self, patience_seconds: float) -> None:
        super().__init__()
        self._barrier = threading.Barrier(2)
        self._patience_seconds = patience_seconds
        self.has_met: list[bool] = []  # one that all shadows of the layer share

    def forward(self, hidden_BH: Tensor) -> Tensor:
        try:
            self._barrier.wait(self._patience_seconds)
            self.has_met.append(True)
        except threading.BrokenBarrierError:  # nobody else is in here
            self._barrier.reset()
            self.has_met.append(False)
        return hidden_BH.tanh()


def forward_at_once(host: HostedNet) -> list[Tensor]:
    """The outputs for two trainers that call at the same time."""
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(host.forward, train(0, t), hidden(0, t)) for t in range(2)]
        return [call.result(2 * PATIENCE_SECONDS) for call in calls]


@pytest.mark.parametrize("mode", [UpdateMode.SYNC, UpdateMode.ASYNC])
@pytest.mark.parametrize("is_scripted", [False, True])
def test_concurrent_calls_do_not_interfere(mode: UpdateMode, is_scripted: bool) -> None:
    """Each computes with parameters of its own in the place of the net's."""
    meeting, net, plain = Meeting(PATIENCE_SECONDS), make_net(), Plain()
    first, last = (torch.jit.script(layer) if is_scripted else layer for layer in (net[0], net[2]))
    parameters = list(net.parameters())
    with hosting(UpdateRules(2, mode), net, form=nn.Sequential(first, meeting, last)) as host:
        outputs = forward_at_once(host)
        assert meeting.has_met == [True, True]
        for t, output in enumerate(outputs):
            assert torch.equal(output, plain.net(hidden(0, t)))
        assert all(ours is first for ours, first in zip(net.parameters(), parameters, strict=True))
        for output in outputs:
            output.square().sum().backward()
        host.barrier.drain()
        assert host.barrier.take_staleness().count == 2  # each gradient found its way
        plain.step([hidden(0, t) for t in range(2)])
        if mode is UpdateMode.SYNC:
            assert_same_bits(host, plain)


class Counts(nn.Module):
    """A layer that multiplies by the number of its calls, and puts a new buffer in the place of the old."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.ones(()))

    def forward(self, hidden_BH: Tensor) -> Tensor:
        output = torch.mul(hidden_BH, self.count)  # type: ignore[has-type]
        self.count = torch.add(self.count, 1)  # type: ignore[has-type]
        return output


class TestBuffers:
    def test_calls_of_a_net_with_buffers_run_one_by_one(self) -> None:
        meeting, norm = Meeting(patience_seconds=0.05), nn.BatchNorm1d(4)
        with hosting(UpdateRules(2), make_net(nn.Sequential(meeting, norm))) as host:
            forward_at_once(host)
        assert meeting.has_met == [False, False]
        assert norm.num_batches_tracked == 2

    @pytest.mark.parametrize("is_scripted", [False, True])
    @pytest.mark.parametrize("layer", [nn.BatchNorm1d, Counts])
    def test_buffers_have_the_bits_of_one_process(self, layer: type[nn.Module], is_scripted: bool) -> None:
        make = partial(layer, 4) if layer is nn.BatchNorm1d else layer
        net, plain = make_net(make()), make_net(make())
        form = torch.jit.script(net) if is_scripted else None
        with hosting(UpdateRules(3), net, form=form) as host:
            outputs = [host.forward(train(0, t), hidden(0, t)) for t in range(3)]
            expected = [plain(hidden(0, t)) for t in range(3)]
            assert [name for name, _ in net.named_buffers()] == [name for name, _ in plain.named_buffers()]
            assert all(map(torch.equal, net.buffers(), plain.buffers()))
            for output in (*outputs, *expected):  # with the buffers that each of them has seen
                output.square().sum().backward()
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(outputs, expected, strict=True))


def test_async_pass_keeps_its_initial_weights() -> None:
    plain = Plain()
    with hosting(UpdateRules(2, UpdateMode.ASYNC)) as host:
        hidden_BH = hidden(0)
        output = host.call(train(0), hidden_BH).wait()
        pass_through(host, train(0, 1), hidden(5))
        host.barrier.drain()
        assert host.version == 1
        output.square().sum().backward()
        host.barrier.drain()
        (expected,) = plain.step([hidden(0)])
        assert hidden_BH.grad is not None
        assert torch.equal(hidden_BH.grad, expected)
        staleness = host.barrier.take_staleness()
        assert (staleness.count, staleness.total, staleness.largest) == (2, 1, 1)


class TestPrediction:
    def test_prediction_uses_evaluation_mode_without_recording(self) -> None:
        norm = nn.BatchNorm1d(4)
        net = make_net(norm)
        with hosting(UpdateRules(1), net) as host:
            pass_through(host, train(0), hidden(0))
            assert norm.running_mean is not None
            statistics = norm.running_mean.clone()
            assert statistics.any()
            predicted = host.call(evaluate(1), hidden(1)).wait()
            assert not predicted.requires_grad
            assert torch.equal(norm.running_mean, statistics)
            assert all(module.training for module in net.modules())
            assert torch.equal(predicted, net.eval()(hidden(1)))
            host.call(train(1), hidden(2)).wait()
            assert not torch.equal(norm.running_mean, statistics)


class TestCheckpoints:
    @staticmethod
    def run(host: HostedNet, first: int, num_steps: int) -> None:
        for step in range(first, first + num_steps):
            pass_through(host, train(step), hidden(step))

    @staticmethod
    def save(host: HostedNet, folder: Path, step: int) -> Path:
        partial = checkpoint_folders.begin(folder)
        host.begin_save(is_copied=True)
        return checkpoint_folders.commit(partial, Manifest(step, 0, {}, host.write(partial)))

    def test_checkpoint_of_another_net_raises_an_error(self, tmp_path: Path) -> None:
        with hosting(UpdateRules(1)) as host, hosting(UpdateRules(1), nn.Linear(WIDTH, 1)) as other:
            folder = self.save(host, tmp_path / "step-0", 0)
            with pytest.raises(CheckpointError, match=f"^{folder}: is of another model"):
                other.load(folder, 0)

    def test_saving_waits_for_a_running_update(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with hosting(UpdateRules(1)) as host, ThreadPoolExecutor(1) as pool:
            under_way, may_end, step = threading.Event(), threading.Event(), host.optimizer.step

            def slow_step(*args: object) -> None:
                under_way.set()
                assert may_end.wait(PATIENCE_SECONDS)
                step(*args)  # type: ignore[arg-type]

            monkeypatch.setattr(host.optimizer, "step", slow_step)
            pass_through(host, train(0), hidden(0))
            assert under_way.wait(PATIENCE_SECONDS)
            saving = pool.submit(host.begin_save, True)
            assert not wait([saving], timeout=0.02).done
            may_end.set()
            saving.result(PATIENCE_SECONDS)


@pytest.mark.parametrize("is_checked", [True, False])
def test_non_finite_gradient_names_its_parameter(is_checked: bool) -> None:
    with hosting(UpdateRules(1, check_finite=is_checked)) as host:
        output = host.call(train(0), hidden(0)).wait()
        (torch.nan * output).sum().backward()
        if is_checked:
            message = r"^step 0: the gradient of the remote net's 0.weight is not finite$"
            with pytest.raises(NonFiniteError, match=message):
                host.barrier.drain()
        else:
            host.barrier.decide(0, None)
            host.barrier.drain()
            assert host.version == 1
