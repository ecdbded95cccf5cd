"""The guard: what it clips, what it skips, when it stops, and that it asks nobody without need."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybrid.engine.update_guard import Guard
from hybrid.errors import NonFiniteError
from hybrid.protocol.update_rules import UpdateRules
from hybrid.server.barrier import UpdateBarrier

CPU = torch.device("cpu")
FINITE = 0.5  # a loss


def no_gradient() -> None:
    """None of this trainer's gradients is not finite."""


class Answer:
    """An answer, and whether somebody has waited for it."""

    def __init__(self, value: float = 0.0) -> None:
        self._value = value
        self.is_awaited = False

    def wait(self) -> float:
        self.is_awaited = True
        return self._value


class Host:
    """Holds an update whose gradients have ``squared_norm``, until it is decided on."""

    def __init__(self, squared_norm: float) -> None:
        self.squared_norm = squared_norm
        self.asked: list[int] = []
        self.decisions: list[tuple[int, float | None]] = []
        self.sent: list[Answer] = []

    def norm(self, step: int) -> Answer:
        self.asked.append(step)
        return Answer(self.squared_norm)

    def call_barrier(self, method: object, step: int, scale: float | None) -> Answer:
        assert method is UpdateBarrier.decide
        self.decisions.append((step, scale))
        self.sent.append(Answer())
        return self.sent[-1]


class Trainers:
    """A process group of several trainers, seen from one: the others hand in ``others`` in all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, others: float = 0.0, rank: int = 0) -> None:
        self._others = others
        self._rank = rank
        self.handed_in: list[float] = []
        monkeypatch.setattr(dist, "all_reduce", self._all_reduce)

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return 2

    def _all_reduce(self, tensor: Tensor, group: Trainers) -> None:
        assert group is self
        self.handed_in.append(tensor.item())
        tensor += self._others

    def guard(self, clip_norm: float | None, skip: bool, *hosts: Host) -> Guard:
        rules = UpdateRules(1, clip_norm=clip_norm, check_finite=not skip)
        return Guard(rules, hosts, self, CPU)  # type: ignore[arg-type]


@pytest.mark.parametrize("clip_norm", [0.1, 3.0, 1e6])
def test_it_clips_as_torch_clips_all_gradients_together(
    monkeypatch: pytest.MonkeyPatch, clip_norm: float
) -> None:
    """Of what two trainers have alike, of what is one's own, and of two workers' tables."""
    generator = torch.Generator().manual_seed(1)
    shared, mine, another, first, second = (
        nn.Parameter(torch.zeros(n, dtype=torch.float64)) for n in (5, 3, 3, 7, 2)
    )
    parameters = [shared, mine, another, first, second]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
    norms = [float(p.grad.square().sum()) for p in parameters if p.grad is not None]
    expected = [p.grad.clone() for p in parameters if p.grad is not None]
    nn.utils.clip_grad_norm_(parameters, clip_norm)

    trainers = Trainers(monkeypatch, others=norms[0] / 2 + norms[2])
    hosts = [Host(norms[3]), Host(norms[4])]
    scale = trainers.guard(clip_norm, False, *hosts).decide(7, FINITE, norms[0] / 2 + norms[1], no_gradient)
    assert scale is not None
    for parameter, gradient in zip(parameters, expected, strict=True):
        torch.testing.assert_close(scale * gradient, parameter.grad, rtol=1e-14, atol=0)
    assert [host.decisions for host in hosts] == [[(7, scale)]] * 2
    assert (scale == 1.0) == (clip_norm == 1e6)
    assert trainers.handed_in == [norms[0] / 2 + norms[1]]  # the other hands in the other half


def test_only_trainer_0_sends_the_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(4.0)
    guard = Trainers(monkeypatch, rank=1).guard(1.0, False, host)
    assert guard.decide(0, FINITE, 0.0, no_gradient) == pytest.approx(0.5)
    assert (host.asked, host.decisions) == ([0], [])


def test_errors_of_the_decisions_before_are_seen_and_the_last_one_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = Host(4.0)
    guard = Trainers(monkeypatch).guard(1.0, False, host)
    for step in range(3):
        guard.decide(step, FINITE, 0.0, no_gradient)
    assert [sent.is_awaited for sent in host.sent] == [True, True, False]


@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["loss", "gradient", "another trainer", "host", "nowhere"])
def test_all_sides_skip_a_step_that_is_not_finite_anywhere(
    monkeypatch: pytest.MonkeyPatch, where: str, bad: float, clip_norm: float | None
) -> None:
    trainers = Trainers(monkeypatch, others=bad if where == "another trainer" else 0.0)
    host = Host(bad if where == "host" else 0.25)
    guard = trainers.guard(clip_norm, True, host)
    loss = bad if where == "loss" else FINITE
    guard.check_loss(3, loss, str)
    scale = guard.decide(3, loss, bad if where == "gradient" else 0.25, no_gradient)
    assert host.decisions == [(3, scale)]
    assert scale == (1.0 if where == "nowhere" else None)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_a_loss_that_is_not_finite_stops_the_run(
    monkeypatch: pytest.MonkeyPatch, bad: float, clip_norm: float | None
) -> None:
    guard = Trainers(monkeypatch, rank=2).guard(clip_norm, False)
    guard.check_loss(5, FINITE, str)
    with pytest.raises(NonFiniteError, match=rf"^step 5: the loss of trainer 2 is {bad}; lower"):
        guard.check_loss(5, bad, str)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["gradient", "host", "another trainer"])
@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_a_gradient_that_is_not_finite_stops_the_run(
    monkeypatch: pytest.MonkeyPatch, where: str, bad: float, clip_norm: float | None
) -> None:
    """Without clipping each side looks after its own, see UpdateRules.check_finite."""
    trainers = Trainers(monkeypatch, others=bad if where == "another trainer" else 0.0)
    guard = trainers.guard(clip_norm, False, Host(bad if where == "host" else 0.25))
    squared_norm = bad if where == "gradient" else 0.25
    if clip_norm is None and where in ("host", "another trainer"):
        assert guard.decide(5, FINITE, squared_norm, no_gradient) == 1.0
        return
    message = (
        "the norm of the dense net's gradients is not finite; lower"
        if clip_norm is None
        else "the norm of the gradients is"
    )
    with pytest.raises(NonFiniteError, match=rf"^step 5: {message}"):
        guard.decide(5, FINITE, squared_norm, no_gradient)


def test_without_clipping_or_skipping_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    trainers, host = Trainers(monkeypatch), Host(4.0)
    assert trainers.guard(None, False, host).decide(0, FINITE, 1e30, no_gradient) == 1.0
    assert (trainers.handed_in, host.asked, host.decisions) == ([], [], [])


def test_an_error_names_what_is_the_first_that_is_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = Trainers(monkeypatch).guard(None, False)
    with pytest.raises(NonFiniteError, match=r"^step 5: the loss of trainer 0 is nan: it is head.2; lower"):
        guard.check_loss(5, math.nan, lambda: "it is head.2")
    with pytest.raises(NonFiniteError, match=r"^step 5: the gradient of the dense net's head.2.bias is not"):
        guard.decide(5, FINITE, math.inf, lambda: "head.2.bias")
