"""The net of a trainer under DDP: gradients of micro-batches add up, and are reduced once per step."""

import math

import pytest
import torch
import torch.distributed as dist
from support.seeded import random, seeded
from support.vectors import micro_batch
from torch import Tensor, nn
from torch.distributed import autograd as dist_autograd

from hybrid.batch import Batch
from hybrid.config.loading import load_config
from hybrid.embedding.placement import place
from hybrid.embedding.trainer.embeddings import ModuleTables
from hybrid.engine.ddp import DdpMode, DdpModel, DensePlacement
from hybrid.engine.hybrid_model import HybridModel, MicroBatch
from hybrid.engine.step_engine import StepEngine
from hybrid.errors import ConfigError, NonFiniteError
from hybrid.models.dense_net import Concatenation, DenseNet
from hybrid.primitives.step_timings import StepClock
from hybrid.updates.update_rules import UpdateMode, UpdateRules

pytestmark = pytest.mark.usefixtures("loopback")

NUM_DENSE, WIDTH, SIZE = 2, 4, 7


def dense_net() -> DenseNet:
    head = seeded(lambda: nn.Sequential(nn.Linear(3 + WIDTH, 5), nn.ReLU(), nn.Linear(5, 1)))
    return DenseNet(seeded(lambda: nn.Linear(NUM_DENSE, 3)), Concatenation(), head)


def micro_batches(step: int, num_micro_batches: int) -> list[MicroBatch[Batch]]:
    """Return a batch of ``SIZE`` samples in micro-batches, the last of which is empty."""
    whole = random(SIZE, NUM_DENSE + WIDTH, seed=step)
    parts = [*whole.tensor_split(max(1, num_micro_batches - 1)), whole[:0]][:num_micro_batches]
    return [
        micro_batch(part[:, :NUM_DENSE], part[:, NUM_DENSE:], step, index) for index, part in enumerate(parts)
    ]


def take_step(model: DdpModel, micros: list[MicroBatch[Batch]]) -> None:
    for micro in micros:
        is_last = micro is micros[-1]
        model.begin(is_last)
        with dist_autograd.context() as context:
            logits_B = model.module(micro, StepClock())
            dist_autograd.backward(context, [logits_B.square().sum()])
            model.collect(dist_autograd.get_gradients(context))


def make_model(
    mode: DdpMode, tensor_size: int = 1, clock: StepClock | None = None, net: DenseNet | None = None
) -> DdpModel:
    assert dist.group.WORLD is not None
    placement = DensePlacement(dist.group.WORLD, tensor_size)
    return DdpModel(HybridModel(net or dense_net()), mode, placement, clock)


def num_values(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("mode", list(DdpMode))
@pytest.mark.parametrize("num_micro_batches", [1, 2, 4])
def test_gradients_of_micro_batches_have_bits_of_plain_ones(mode: DdpMode, num_micro_batches: int) -> None:
    clock = StepClock()
    clock.record(range(3))
    model, plain = make_model(mode, clock=clock), HybridModel(dense_net())
    head, whole = num_values(plain.net.head), num_values(plain)
    num_reduced = {DdpMode.NONE: 0, DdpMode.INSIDE: head, DdpMode.OUTSIDE: whole}[mode]
    for step in range(3):
        micros = micro_batches(step, num_micro_batches)
        for micro in micros:
            plain(micro, StepClock()).square().sum().backward()
        clock.begin_step(step)
        take_step(model, micros)
        clock.end_step()
        assert sum(span.num_bytes for span in clock.take_spans()) == 4 * num_reduced  # once per step
        assert len(model.gradients) == len(list(plain.parameters()))
        parameters = dict(model.net.named_parameters())
        for name, parameter in plain.net.named_parameters():
            assert parameter.grad is not None
            assert torch.equal(model.gradients[parameters[name]], parameter.grad), name
            assert parameters[name].grad is None
        plain.zero_grad()


@pytest.mark.parametrize("mode", list(DdpMode))
@pytest.mark.parametrize("tensor_size", [1, 2])
def test_norm_counts_a_replicated_gradient_once(mode: DdpMode, tensor_size: int) -> None:
    model, plain = make_model(mode, tensor_size), HybridModel(dense_net())
    (micro,) = micros = micro_batches(0, 1)
    plain(micro, StepClock()).square().sum().backward()
    take_step(model, micros)
    expected = sum(float(p.grad.double().square().sum()) for p in plain.parameters() if p.grad is not None)
    assert model.squared_norm() == pytest.approx(expected / tensor_size)


def collect(model: DdpModel, gradients: dict[Tensor, Tensor], *, is_last: bool) -> None:
    model.begin(is_last)
    model.collect(gradients)


def test_gradients_of_a_micro_batch_are_copied() -> None:
    """DDP overwrites the gradients in its buckets."""
    model = make_model(DdpMode.NONE)
    parameter = next(model.net.parameters())
    gradient = torch.ones_like(parameter)
    collect(model, {parameter: gradient}, is_last=False)
    gradient.fill_(100.0)
    collect(model, {parameter: torch.ones_like(parameter)}, is_last=True)
    assert torch.equal(model.gradients[parameter], torch.full_like(parameter, 2.0))


def test_a_step_has_the_gradients_of_its_micro_batches_alone() -> None:
    model = make_model(DdpMode.NONE)
    take_step(model, micro_batches(0, 1))
    first, second, *_ = model.net.parameters()
    ones: dict[Tensor, Tensor] = {each: torch.ones_like(each) for each in (first, second)}
    collect(model, {first: ones[first]}, is_last=False)
    collect(model, {second: ones[second]}, is_last=True)  # the last micro-batch skips a layer
    assert model.gradients.keys() == ones.keys()
    assert all(torch.equal(model.gradients[each], ones[each]) for each in ones)
    collect(model, ones, is_last=True)
    assert all(torch.equal(model.gradients[each], ones[each]) for each in ones)


def test_ddp_inside_needs_a_head_that_is_trained() -> None:
    net = DenseNet(nn.Linear(NUM_DENSE, 3), Concatenation(), nn.Identity())
    with pytest.raises(ConfigError, match=r"^dense\.ddp"):
        make_model(DdpMode.INSIDE, net=net)


def engine_of(net: nn.Module, rules: UpdateRules) -> StepEngine[Batch]:
    clock, group = StepClock(), dist.group.WORLD
    assert group is not None
    tables, config = ModuleTables([], place([], 1), {}, clock), load_config(None, ["dense.ddp=none"])
    rest = (net, DensePlacement(group), [torch.device("cpu")], clock)
    return StepEngine[Batch](config, group, rules, tables, {}, None, *rest)


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_a_gradient_that_is_not_finite_is_named(clip_norm: float | None) -> None:
    net = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1))
    engine = engine_of(net, UpdateRules(1, clip_norm=clip_norm))
    engine.begin(iter(()), 3)
    engine.model.gradients = {p: torch.full_like(p, math.nan) for p in net[0].parameters()}
    with pytest.raises(NonFiniteError, match=r"^step 3: .*0\.bias .*train\.clip_norm"):
        engine.decide()


def contexts() -> int:
    return int(dist_autograd._get_debug_info()["num_autograd_contexts"])


@pytest.mark.parametrize("mode", [UpdateMode.SYNC, UpdateMode.LOOKAHEAD])
def test_engine_takes_the_gradients_out_of_the_parameters(mode: UpdateMode) -> None:
    """In sync mode, a lookup is part of the graph, which then is one of distributed autograd."""
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    net.register_module("unused", nn.Linear(2, 2))
    used = [*net[0].parameters(), *net[2].parameters()]
    x = torch.rand(5, 3)
    expected = torch.autograd.grad(net[2](net[1](net[0](x))).sum(), used)
    micro, engine = micro_batch(x, x), engine_of(net, UpdateRules(1, mode))
    for _ in range(2):
        before = contexts()
        with engine.recording(micro):
            assert contexts() - before == (mode is UpdateMode.SYNC)
            engine.backward(net[2](net[1](net[0](x))).sum())
        assert contexts() == before
        assert engine.model.gradients.keys() == set(used)
        assert all(
            torch.equal(engine.model.gradients[p], grad) for p, grad in zip(used, expected, strict=True)
        )
        assert all(parameter.grad is None for parameter in net.parameters())
