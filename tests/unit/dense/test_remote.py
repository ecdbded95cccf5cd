"""A dense net that several trainers share, without RPC: its steps equal those of one process."""

import copy
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from support.products import noted_products
from support.seeded import random, seeded
from support.shards import PATIENCE_SECONDS, evaluate, train
from torch import Tensor, nn

from hybrid.checkpoint import checkpoint_folders
from hybrid.checkpoint.checkpoint_manifest import Manifest
from hybrid.config import ScheduleSection
from hybrid.dense.compilation import compiled
from hybrid.dense.dense_optimizer import make_optimizer
from hybrid.dense.hosted_net import HostedNet
from hybrid.dense.matmul import use_onednn
from hybrid.errors import CheckpointError, NonFiniteError
from hybrid.protocol.learning_rate_schedule import Schedule
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


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
@pytest.mark.parametrize("num_trainers", [1, 3])
def test_the_gradients_of_all_trainers_are_one_step_bit_for_bit(num_trainers: int, optimizer: str) -> None:
    plain = Plain(optimizer)
    with hosting(UpdateRules(num_trainers), optimizer=optimizer) as host:
        for step in range(4):
            arrivals = [(step + t) % num_trainers for t in range(num_trainers)]
            grads = {t: pass_through(host, train(step, t), hidden(step, t)) for t in arrivals}
            expected = plain.step([hidden(step, t) for t in range(num_trainers)])
            assert all(torch.equal(grads[t], grad_BH) for t, grad_BH in enumerate(expected))
        host.barrier.drain()
        assert host.version == 4
        assert_same_bits(host, plain)
        staleness = host.barrier.take_staleness()
        assert (staleness.count, staleness.total) == (4 * num_trainers, 0)


def test_micro_batches_are_one_step_bit_for_bit() -> None:
    plain = Plain()
    with hosting(UpdateRules(2, parts=2)) as host:
        for trainer, part in ((1, 0), (0, 0), (0, 1), (1, 1)):
            pass_through(host, Ticket(trainer, 0, 0, part), hidden(part, trainer))
        host.barrier.drain()
        plain.step([hidden(part, trainer) for trainer in range(2) for part in range(2)])
        assert_same_bits(host, plain)


class Shifts(nn.Module):
    """Two parameters, of which autograd has a single gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.zeros(SIZE, WIDTH)) for _ in range(2))

    def forward(self, hidden_BH: Tensor) -> Tensor:
        return hidden_BH + self.first + self.second


def test_parameters_that_share_a_gradient_are_stepped_by_it_once() -> None:
    with hosting(UpdateRules(2), Shifts()) as host:
        for trainer in range(2):
            pass_through(host, train(0, trainer), hidden(0, trainer))
        host.barrier.drain()
        expected = -RATE * 2 * (hidden(0, 0) + hidden(0, 1)).detach()
        for parameter in host.parameter_list:
            torch.testing.assert_close(parameter.detach(), expected)


def test_a_trainer_without_samples_takes_part_in_the_step() -> None:
    plain = Plain("Adam")
    with hosting(UpdateRules(2), optimizer="Adam") as host:
        assert pass_through(host, train(0, 1), hidden(0, size=0)).shape == (0, WIDTH)
        pass_through(host, train(0, 0), hidden(0))
        host.barrier.drain()
        plain.step([hidden(0)])
        assert_same_bits(host, plain)


# It looks at every tensor's gradient, those of a host's call too, and takes no notice of the warning.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("how", ["script", "trace", "aot_eager"])
def test_a_compiled_net_trains_as_an_eager_one(how: str) -> None:
    """In float64: TorchScript has derivatives of its own, which round differently."""

    def inputs(step: int) -> list[Tensor]:
        return [hidden(step, t).detach().double().requires_grad_() for t in range(2)]

    net, plain = make_net().double(), Plain("Adam")
    plain.net.double()
    with hosting(UpdateRules(2), net, "Adam", compiled(net, how, inputs(0)[:1])) as host:
        for step in range(3):
            found = [pass_through(host, train(step, t), x) for t, x in enumerate(inputs(step))]
            torch.testing.assert_close(found, plain.step(inputs(step)), rtol=1e-12, atol=1e-13)
        predicted = host.call(evaluate(3), inputs(9)[0]).wait()
        torch.testing.assert_close(predicted, plain.net(inputs(9)[0]), rtol=1e-12, atol=1e-13)
        torch.testing.assert_close([*net.parameters()], [*plain.net.parameters()], rtol=1e-12, atol=1e-13)


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
def test_calls_at_the_same_time_do_not_mix(mode: UpdateMode, is_scripted: bool) -> None:
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
    def test_calls_that_may_change_them_run_one_after_the_other(self) -> None:
        meeting, norm = Meeting(patience_seconds=0.05), nn.BatchNorm1d(4)
        with hosting(UpdateRules(2), make_net(nn.Sequential(meeting, norm))) as host:
            forward_at_once(host)
        assert meeting.has_met == [False, False]
        assert norm.num_batches_tracked == 2

    @pytest.mark.parametrize("is_scripted", [False, True])
    @pytest.mark.parametrize("layer", [nn.BatchNorm1d, Counts])
    def test_they_change_as_in_one_process_bit_for_bit(
        self, layer: type[nn.Module], is_scripted: bool
    ) -> None:
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


def test_trainers_in_threads_train_as_one_process_bit_for_bit() -> None:
    num_trainers, num_steps = 4, 20
    plain = Plain("Adam")
    with hosting(UpdateRules(num_trainers), optimizer="Adam") as host:

        def run(trainer: int) -> None:
            for step in range(num_steps):
                hidden_BH = hidden(step, trainer)
                host.call(train(step, trainer), hidden_BH).wait().square().sum().backward()

        with ThreadPoolExecutor(num_trainers) as pool:
            for running in [pool.submit(run, trainer) for trainer in range(num_trainers)]:
                running.result(6 * PATIENCE_SECONDS)
        host.barrier.drain()
        for step in range(num_steps):
            plain.step([hidden(step, t) for t in range(num_trainers)])
        assert_same_bits(host, plain)


def test_out_of_step_a_pass_keeps_the_weights_it_began_with() -> None:
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
    def test_it_is_of_the_net_in_evaluation_and_records_nothing(self) -> None:
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

    def test_it_waits_for_the_updates_that_it_must_see(self) -> None:
        with hosting(UpdateRules(1)) as host:
            predicted = host.call(evaluate(1), hidden(1))
            assert not predicted.done()
            pass_through(host, train(0), hidden(0))
            plain = Plain()
            plain.step([hidden(0)])
            assert torch.equal(predicted.wait(), plain.net(hidden(1)))


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

    @pytest.mark.parametrize("optimizer", ["SGD", "Adam", "Adagrad"])
    def test_training_goes_on_from_one_bit_for_bit(self, tmp_path: Path, optimizer: str) -> None:
        with hosting(UpdateRules(1), optimizer=optimizer) as straight:
            self.run(straight, 0, 3)
            folder = self.save(straight, tmp_path / "step-3", 3)  # waits for the update under way
            self.run(straight, 3, 3)
            other = make_net()
            nn.init.zeros_(next(other.parameters()))
            with hosting(UpdateRules(1), other, optimizer) as resumed:
                resumed.load(folder, 3)
                assert resumed.version == 3
                self.run(resumed, 3, 3)
                for host in (straight, resumed):
                    host.barrier.drain()
                assert_same_bits(resumed, straight)

    def test_it_is_refused_where_it_is_of_another_net(self, tmp_path: Path) -> None:
        with hosting(UpdateRules(1)) as host, hosting(UpdateRules(1), nn.Linear(WIDTH, 1)) as other:
            folder = self.save(host, tmp_path / "step-0", 0)
            with pytest.raises(CheckpointError, match=f"^{folder}: is of another model"):
                other.load(folder, 0)

    def test_saving_waits_for_the_update_under_way(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
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


@pytest.mark.parametrize("scale", [1.0, 0.5, None])
def test_a_step_is_scaled_or_dropped_as_decided(scale: float | None) -> None:
    with hosting(UpdateRules(2, check_finite=False)) as host:
        before = [p.detach().clone() for p in host.net.parameters()]
        for trainer in (1, 0):
            pass_through(host, train(0, trainer), hidden(0, trainer))
        plain = Plain()
        plain.step([hidden(0), hidden(0, 1)])
        gradients = [p.grad for p in plain.net.parameters() if p.grad is not None]
        total_norm = torch.nn.utils.get_total_norm(gradients)
        assert host.barrier.norm(0).wait() == pytest.approx(float(total_norm.square()))
        host.barrier.decide(0, scale)
        host.barrier.drain()
        assert host.version == 1
        for ours, start, gradient in zip(host.net.parameters(), before, gradients, strict=True):
            torch.testing.assert_close(start - ours, RATE * (scale or 0.0) * gradient, rtol=1e-5, atol=1e-7)


def test_a_scheduled_rate_is_that_of_the_step() -> None:
    schedule = Schedule(ScheduleSection(kind="step(decay_every = 1, decay_factor = 0.5)"))
    with hosting(UpdateRules(1, schedule=schedule), nn.Linear(WIDTH, 1, bias=False)) as host:
        (weight,) = host.net.parameters()
        for step in range(3):
            before = weight.detach().clone()
            host.call(train(step), torch.ones(1, WIDTH)).wait().sum().backward()
            host.barrier.drain()
            torch.testing.assert_close(before - weight, torch.full((1, WIDTH), RATE * 0.5**step))


@pytest.mark.parametrize("is_checked", [True, False])
def test_a_gradient_that_is_not_finite_names_its_parameter(is_checked: bool) -> None:
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


@pytest.mark.parametrize("mode", [UpdateMode.SYNC, UpdateMode.ASYNC])
def test_a_net_by_onednns_products_takes_the_step_that_it_takes_alone(
    mode: UpdateMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = noted_products(monkeypatch)
    net = seeded(lambda: nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128)))
    use_onednn(net)
    alone = copy.deepcopy(net)
    ours, its = (random(300, 128).requires_grad_() for _ in range(2))
    with hosting(UpdateRules(1, mode=mode), net) as host:
        pass_through(host, train(0, 0), ours)
        host.barrier.drain()
    of_host = sorted(computed)
    alone(its).square().sum().backward()
    assert sorted(computed) == sorted(2 * of_host) != []
    torch.optim.SGD(alone.parameters(), RATE).step()
    torch.testing.assert_close(
        [ours.grad, *net.parameters()], [its.grad, *alone.parameters()], rtol=0, atol=0
    )
