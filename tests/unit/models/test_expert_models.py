"""MMoE and PLE against their equations: a sample, a task and an expert at a time."""

import pytest
import torch
from torch import Tensor
from unit.models.equations import Parameters, check_model, plain_mlp, vectors

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
