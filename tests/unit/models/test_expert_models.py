"""MMoE, PLE and ESMM against their equations: a sample, a task and an expert at a time."""

import math

import pytest
import torch
from torch import Tensor
from unit.models.equations import Parameters, check_model, plain_logit, plain_mlp, vectors

from hybrid.models.esmm import ESMM, both_log_probabilities, entire_space_loss
from hybrid.models.mmoe import MMoE
from hybrid.models.ple import PLE

NUM_EXPERTS = 3


def mixture(weight: Tensor, x: Tensor, experts: list[Tensor]) -> Tensor:
    powers = torch.stack([torch.exp((row * x).sum()) for row in weight])
    assert len(powers) == len(experts)
    total = torch.zeros_like(experts[0])
    for power, expert in zip(powers, experts, strict=True):
        total = total + power / powers.sum() * expert
    return total


def experts(parameters: Parameters, prefix: str, x: Tensor) -> list[Tensor]:
    return [plain_mlp(parameters, f"{prefix}.experts.{n}", x) for n in range(NUM_EXPERTS)]


def towers(parameters: Parameters, of_task: list[Tensor]) -> Tensor:
    return torch.cat(
        [plain_mlp(parameters, f"towers.{k}", x, ends_linear=True) for k, x in enumerate(of_task)]
    )


def plain_mmoe(parameters: Parameters, x: Tensor, num_tasks: int) -> Tensor:
    shared = experts(parameters, "experts", x)
    gates = [parameters[f"gates.{k}.weights.weight"] for k in range(num_tasks)]
    return towers(parameters, [mixture(gate, x, shared) for gate in gates])


def plain_ple(parameters: Parameters, x: Tensor, num_tasks: int, num_layers: int) -> Tensor:
    of_task, shared = [x] * num_tasks, x
    for number in range(num_layers):
        layer = f"layers.{number}"
        of_shared = experts(parameters, f"{layer}.shared", shared)
        own = [experts(parameters, f"{layer}.own.{k}", of_task[k]) for k in range(num_tasks)]
        of_task = [
            mixture(parameters[f"{layer}.gates.{k}.weights.weight"], of_task[k], own[k] + of_shared)
            for k in range(num_tasks)
        ]
        if number < num_layers - 1:
            shared_gate = parameters[f"{layer}.shared_gate.weights.weight"]
            shared = mixture(shared_gate, shared, [*own[0], *own[1], *of_shared])
    return towers(parameters, of_task)


def test_mmoe_equals_its_equations() -> None:
    model = MMoE(5, (1, 3, 1), NUM_EXPERTS, expert=(6, 3), tower=(4,))
    check_model(model, lambda p, x_B: torch.stack([plain_mmoe(p, x, 3) for x in x_B]), vectors(7, 5, seed=1))


@pytest.mark.parametrize("layers", [(4,), (4, 6, 3)])
def test_ple_equals_its_equations(layers: tuple[int, ...]) -> None:
    model = PLE(5, (1, 3), NUM_EXPERTS, layers=layers, tower=(4,))
    check_model(
        model,
        lambda p, x_B: torch.stack([plain_ple(p, x, 2, len(layers)) for x in x_B]),
        vectors(6, 5, seed=1),
    )


CLICKED = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0]).double()
CONVERTED = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 0.0]).double()


def plain_esmm(parameters: Parameters, inputs: Tensor) -> tuple[Tensor, Tensor]:
    click, conversion = (
        torch.stack([plain_logit(parameters, name, x) for x in inputs]) for name in ("click", "conversion")
    )
    return click, conversion


def plain_loss(click: Tensor, conversion: Tensor, clicked: Tensor, converted: Tensor) -> Tensor:
    losses = []
    for b in range(len(click)):
        p, q = 1 / (1 + torch.exp(-click[b])), 1 / (1 + torch.exp(-conversion[b]))
        of_click = -torch.log(p if clicked[b] else 1 - p)
        losses.append(of_click - torch.log(p * q if converted[b] else 1 - p * q))
    return torch.stack(losses)


def test_esmm_towers_take_the_same_inputs() -> None:
    check_model(ESMM(4, hidden=(5, 3)), plain_esmm, vectors(6, 4, seed=1))


def test_esmm_loss_covers_clicks_and_conversions() -> None:
    check_model(
        torch.nn.Module(),
        lambda _, *given: plain_loss(*given),
        *(vectors(6, seed=1), vectors(6, seed=2), CLICKED, CONVERTED),
        run=entire_space_loss,
    )


@pytest.mark.parametrize(
    ("click", "conversion", "log_both", "log_not_both"),
    [
        (50.0, 50.0, -2 * math.exp(-50), math.log(2) - 50),
        (-800.0, 3.0, -800 - math.log1p(math.exp(-3)), 0.0),
        (800.0, -800.0, -800.0, 0.0),
        (800.0, 900.0, 0.0, -800.0),
    ],
)
def test_probabilities_that_are_nearly_0_and_1_keep_their_logarithms(
    click: float, conversion: float, log_both: float, log_not_both: float
) -> None:
    logits = torch.tensor([click, conversion], dtype=torch.float64, requires_grad=True)
    found = both_log_probabilities(logits[0], logits[1])
    assert [each.item() for each in found] == pytest.approx([log_both, log_not_both], rel=1e-14, abs=1e-300)
    sum(found).backward()  # type: ignore[union-attr]
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
