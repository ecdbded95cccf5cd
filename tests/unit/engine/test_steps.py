"""The steps of a trainer: the updates that lookups must see, random numbers, uneven batches, diagnosis."""

import itertools
import math
import random
import re
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.shared_memory import together
from support.vectors import micro_batch
from torch import Tensor, nn

from hybrid.batch import Batch
from hybrid.config import RunConfig
from hybrid.engine.ddp import DensePlacement
from hybrid.engine.hybrid_model import HybridModel
from hybrid.engine.step_engine import StepEngine, seed_step
from hybrid.engine.uneven_batches import align_batches
from hybrid.models.dense_net import Concatenation, DenseNet
from hybrid.primitives.step_timings import StepClock
from hybrid.updates.ticket import Ticket
from hybrid.updates.update_rules import UpdateMode, UpdateRules

CPU = [torch.device("cpu")]
SIZES = ([3, 0, 1], [2, 0, 4, 5])


@pytest.mark.parametrize(
    ("mode", "versions", "awaited"),
    [
        (UpdateMode.SYNC, [5, 6, 7, 8], []),
        (UpdateMode.LOOKAHEAD, [5, 6, 7, 8], [6]),
        (UpdateMode.ASYNC, [5, 5, 6, 7], [6, 7]),
    ],
)
def test_lookups_see_updates_and_flush_waits_for_messages_with_gradients(
    mode: UpdateMode, versions: list[int], awaited: list[int]
) -> None:
    """A pass begins after all updates of earlier steps. The flush follows its first step."""
    tickets: list[Ticket] = []
    flushed: list[object] = []

    def lookup(ids: object, ticket: Ticket, previous: object = None) -> object:
        tickets.append(ticket)
        return SimpleNamespace(flush=lambda: flushed.append(ticket.step))

    sources = SimpleNamespace(flush=lambda: flushed.append("others"))
    tables: Any = SimpleNamespace(lookup=lookup, sources=sources)
    batch: Any = SimpleNamespace(checksum=0, sparse_features=None, split=lambda count: [batch] * count)
    group = dist.ProcessGroup(0, 1)  # type: ignore[call-arg]  # without a store
    rest: Any = tables, {}, None, nn.Identity(), DensePlacement(group), CPU, StepClock()
    engine = StepEngine[Any](RunConfig(), group, UpdateRules(1, mode), *rest, is_single_process=True)
    engine.begin(iter([batch] * 4), 5)
    for step in engine.steps():
        for micro in step.micro_batches:
            with engine.recording(micro):
                pass
        engine.decide()
        if engine.step == 6:
            engine.flush()
    assert [ticket[:3] for ticket in tickets] == [(0, 5 + n, version) for n, version in enumerate(versions)]
    assert flushed == [*awaited, "others"]


def drawn(seed: int, trainer: int, step: int) -> Tensor:
    with torch.random.fork_rng():
        seed_step(seed, trainer, step, CPU)
        mask = torch.nn.functional.dropout(torch.ones(1000)) > 0
    of_python = torch.tensor([random.random() < 0.5 for _ in range(1000)])
    return torch.stack([mask, of_python, torch.from_numpy(np.random.random(1000) < 0.5)])


def test_random_numbers_depend_only_on_seed_trainer_and_step() -> None:
    assert torch.equal(drawn(1, 0, 7), drawn(1, 0, 7))
    masks = [drawn(*key) for key in itertools.product((0, 1, 2**40), (0, 1), (0, 1, 2, 10**9))]
    for first, second in itertools.combinations(masks, 2):
        apart = (first != second).float().mean(dim=1)
        # Independent masks of probability 0.5 agree in half of their places.
        assert ((apart > 0.4) & (apart < 0.6)).all()


class Generator:
    """A random generator of a device."""

    seed = 0

    def manual_seed(self, seed: int) -> None:
        self.seed = seed


def test_only_generators_of_the_devices_are_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    of_cuda = [Generator(), Generator(), Generator()]
    monkeypatch.setattr(torch.cuda, "default_generators", of_cuda)
    monkeypatch.delattr(torch, "manual_seed")
    with torch.random.fork_rng(devices=[]):
        seed_step(1, 0, 7, [*CPU, torch.device("cuda", 2), torch.device("cuda", 0)])
        seed = torch.initial_seed()
    assert [each.seed for each in of_cuda] == [seed, 0, seed]


@pytest.mark.parametrize("until", [math.inf, 4.0])
def test_missing_batches_become_empty_batches(until: float) -> None:
    """The samples of one trainer have weights of 2; the event time of a batch is its size."""
    empty = Batch.empty(1, 1)

    def align(rank: int, group: dist.ProcessGroup) -> list[tuple[object, ...]]:
        batches = []
        for size in SIZES[rank]:
            weights = torch.full((size,), 2.0) if rank else None
            batches.append(empty._replace(labels=torch.ones(size), weights=weights, event_time=size))
        return [
            (len(each.labels), each.weights is None, each.global_size, each.total_weights, each.event_time)
            for each in align_batches(batches, empty, group, until=until)
        ]

    first = [(3, False, 5, 7, 3), (0, True, 0, 0, 0), (1, False, 5, 9, 4), (0, False, 5, 10, 5)]
    second = [(2, False, 5, 7, 3), (0, False, 0, 0, 0), (4, False, 5, 9, 4), (5, False, 5, 10, 5)]
    num_steps = 3 if until == 4.0 else 4
    assert together(2, align) == [first[:num_steps], second[:num_steps]]


FINITE = torch.ones(3, 2)


class Root(Concatenation):
    def __init__(self) -> None:
        super().__init__()
        self.root = nn.Threshold(0.0, math.inf)

    def forward(self, bottom_BH: Tensor, pooled_BE: Tensor) -> Tensor:
        output: Tensor = self.root(super().forward(bottom_BH, pooled_BE))
        return output


def net(values: Mapping[str, float] = {}, interaction: nn.Module | None = None) -> DenseNet:
    """Return a net, with the same value in all of some parameters."""
    head = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 1))
    made = DenseNet(nn.Linear(2, 3), interaction or Concatenation(), head)
    with torch.no_grad():
        for name, value in values.items():
            made.get_parameter(name).fill_(value)
    return made


def run(
    net: DenseNet, dense_BF: Tensor = FINITE, pooled_BE: Tensor = FINITE, remote_BH: Tensor | None = None
) -> HybridModel:
    def remote_net(ticket: Ticket, hidden_BH: Tensor) -> Tensor:
        assert remote_BH is not None
        return remote_BH

    model = HybridModel(net, None if remote_BH is None else remote_net)
    model(micro_batch(dense_BF, pooled_BE), StepClock())
    return model


def test_finite_step_gives_no_text() -> None:
    for model in (run(net()), run(net(), remote_BH=torch.ones(3, 5))):
        assert model.first_not_finite() == ""


@pytest.mark.parametrize(
    ("net", "inputs", "place"),
    [
        (net(), {"dense_BF": math.nan * FINITE}, "numeric columns"),
        (net(), {"pooled_BE": math.inf * FINITE}, "vectors"),
        (net(), {"remote_BH": torch.full((3, 5), math.nan)}, "remote net"),
        (net({"head.2.bias": math.nan}), {}, r"output of head\.2 .* parameter head\.2\.bias$"),
        (net({"bottom.weight": -1, "bottom.bias": 0}, Root()), {}, r"output of interaction\.root$"),
        (net({"head.0.weight": 10}), {"remote_BH": torch.full((3, 5), 3e38)}, r"output of head\.0$"),
    ],
)
def test_first_non_finite_value_is_named(net: DenseNet, inputs: dict[str, Tensor], place: str) -> None:
    """Inputs come before layers, and inner layers before outer ones."""
    assert re.search(place, run(net, **inputs).first_not_finite())


def test_without_the_pass_a_parameter_is_named() -> None:
    model = run(net({"head.2.bias": math.nan}))
    model.is_whole = False  # as with tensor parallelism
    assert re.search(r"are in the parameter head\.2\.bias$", model.first_not_finite())
