"""PLE against its equations, a sample at a time, its experts and gates picked one by one."""

import pytest
import torch
from support.models import Parameters, check_model, plain_mlp, vectors
from torch import Tensor

from hybrid.models.ple import PLE

TASK_OUTPUTS, NUM_EXPERTS = (1, 3), 3
NUM_TASKS = len(TASK_OUTPUTS)


def mixture(weight: Tensor, x: Tensor, experts: list[Tensor]) -> Tensor:
    powers = torch.stack([torch.exp((row * x).sum()) for row in weight])
    assert len(powers) == len(experts)
    total = torch.zeros_like(experts[0])
    for power, expert in zip(powers, experts, strict=True):
        total = total + power / powers.sum() * expert
    return total


def experts(parameters: Parameters, prefix: str, x: Tensor) -> list[Tensor]:
    return [plain_mlp(parameters, f"{prefix}.experts.{n}", x) for n in range(NUM_EXPERTS)]


def plain(parameters: Parameters, inputs: Tensor, num_layers: int) -> Tensor:
    samples = []
    for x in inputs:
        of_task, shared = [x] * NUM_TASKS, x
        for number in range(num_layers):
            layer = f"layers.{number}"
            of_shared = experts(parameters, f"{layer}.shared", shared)
            own = [experts(parameters, f"{layer}.own.{k}", of_task[k]) for k in range(NUM_TASKS)]
            of_task = [
                mixture(parameters[f"{layer}.gates.{k}.shares.weight"], of_task[k], own[k] + of_shared)
                for k in range(NUM_TASKS)
            ]
            if number < num_layers - 1:
                shared_gate = parameters[f"{layer}.shared_gate.shares.weight"]
                shared = mixture(shared_gate, shared, [*own[0], *own[1], *of_shared])
        outputs = [
            plain_mlp(parameters, f"towers.{k}", of_task[k], ends_linear=True) for k in range(NUM_TASKS)
        ]
        samples.append(torch.cat(outputs))
    return torch.stack(samples)


@pytest.mark.parametrize("layers", [(4,), (4, 3), (4, 6, 3)])
def test_model_equals_its_equations(layers: tuple[int, ...]) -> None:
    model = PLE(5, TASK_OUTPUTS, NUM_EXPERTS, layers=layers, tower=(4,))
    check_model(model, lambda p, x: plain(p, x, len(layers)), vectors(6, 5, seed=1))
