"""DDP around a trainer's net: the gradients of micro-batches add up, reduced once a step."""

from functools import wraps
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.seeded import random, seeded
from support.vectors import micro_batch
from torch import Tensor, nn
from torch.distributed import autograd as dist_autograd

from hybrid.batch import Batch
from hybrid.engine.backward import record_graph
from hybrid.engine.ddp import DdpMode, DdpModel
from hybrid.engine.dense_placement import DensePlacement
from hybrid.engine.gradient_reduction import sum_hook
from hybrid.engine.hybrid_model import HybridModel, MicroBatch
from hybrid.models.dense_net import Concatenation, DenseNet
from hybrid.primitives.step_timings import StepClock

pytestmark = pytest.mark.usefixtures("loopback")

NUM_DENSE, WIDTH, SIZE = 2, 4, 7


def dense_net() -> DenseNet:
    head = seeded(lambda: nn.Sequential(nn.Linear(3 + WIDTH, 5), nn.ReLU(), nn.Linear(5, 1)))
    return DenseNet(seeded(lambda: nn.Linear(NUM_DENSE, 3)), Concatenation(), head)


def micro_batches(step: int, num_parts: int) -> list[MicroBatch[Batch]]:
    """The parts of a batch of ``SIZE`` samples, each with its vectors; the last has none of them."""
    whole = random(SIZE, NUM_DENSE + WIDTH, seed=step)
    parts = [*whole.tensor_split(max(1, num_parts - 1)), whole[:0]][:num_parts]
    return [
        micro_batch(part[:, :NUM_DENSE], part[:, NUM_DENSE:], step, place) for place, part in enumerate(parts)
    ]


def take_step(model: DdpModel, micros: list[MicroBatch[Batch]]) -> None:
    for micro in micros:
        is_last = micro is micros[-1]
        with model.reducing(is_last), dist_autograd.context() as context:
            logits_B = model.module(micro, StepClock())
            dist_autograd.backward(context, [logits_B.square().sum()])
            model.collect(dist_autograd.get_gradients(context), is_last)


@pytest.fixture
def reductions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all gradients that are reduced."""
    sizes: list[int] = []

    @wraps(sum_hook)
    def noted(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        sizes.append(bucket.buffer().numel())
        return sum_hook(state, bucket)

    monkeypatch.setattr("hybrid.engine.ddp.sum_hook", noted)
    return sizes


def test_a_group_of_one_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise AssertionError("a trainer alone has its sums already")

    monkeypatch.setattr(dist, "all_reduce", refused)
    model = make_model(DdpMode.OUTSIDE)
    take_step(model, micro_batches(0, 2))
    assert model.gradients


def make_model(mode: DdpMode, tensor_size: int = 1) -> DdpModel:
    assert dist.group.WORLD is not None
    return DdpModel(HybridModel(dense_net()), mode, DensePlacement(dist.group.WORLD, tensor_size))


def num_values(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("mode", list(DdpMode))
@pytest.mark.parametrize("num_parts", [1, 2, 4])
def test_the_gradients_of_micro_batches_add_up_as_plain_ones_do_bit_for_bit(
    mode: DdpMode, num_parts: int, reductions: list[int]
) -> None:
    model, plain = make_model(mode), HybridModel(dense_net())
    head, whole = num_values(plain.net.head), num_values(plain)
    num_reduced = {DdpMode.NONE: 0, DdpMode.INSIDE: head, DdpMode.OUTSIDE: whole}[mode]
    for step in range(3):
        micros = micro_batches(step, num_parts)
        for micro in micros:
            plain(micro, StepClock()).square().sum().backward()
        reductions.clear()
        take_step(model, micros)
        assert sum(reductions) == num_reduced  # once, however many parts
        assert len(model.gradients) == len(list(plain.parameters()))
        parameters = dict(model.net.named_parameters())
        for name, parameter in plain.net.named_parameters():
            assert parameter.grad is not None
            assert torch.equal(model.gradients[parameters[name]], parameter.grad), name
            assert parameters[name].grad is None
        plain.zero_grad()


@pytest.mark.parametrize("mode", list(DdpMode))
@pytest.mark.parametrize("tensor_size", [1, 2])
def test_a_trainers_part_of_the_norm_counts_what_others_have_alike_once(
    mode: DdpMode, tensor_size: int
) -> None:
    model, plain = make_model(mode, tensor_size), HybridModel(dense_net())
    (micro,) = micros = micro_batches(0, 1)
    plain(micro, StepClock()).square().sum().backward()
    take_step(model, micros)
    expected = sum(float(p.grad.double().square().sum()) for p in plain.parameters() if p.grad is not None)
    assert model.squared_norm() == pytest.approx(expected / tensor_size)


def test_gradients_that_wait_for_the_last_part_may_be_overwritten_meanwhile() -> None:
    """As DDP overwrites those that lie in its buckets."""
    model = make_model(DdpMode.NONE)
    parameter = next(model.net.parameters())
    gradient = torch.ones_like(parameter)
    model.collect({parameter: gradient}, is_last=False)
    gradient.fill_(100.0)
    model.collect({parameter: torch.ones_like(parameter)}, is_last=True)
    assert torch.equal(model.gradients[parameter], torch.full_like(parameter, 2.0))


def test_a_parameter_without_a_gradient_keeps_none_of_the_step_before() -> None:
    model = make_model(DdpMode.NONE)
    take_step(model, micro_batches(0, 1))
    used = next(model.net.parameters())
    model.collect({used: torch.ones_like(used)}, is_last=True)
    assert list(model.gradients) == [used]


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
