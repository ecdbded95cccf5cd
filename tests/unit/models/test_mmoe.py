"""MMoE against its equations, a sample, a task and an expert at a time."""

import torch
from support.models import Parameters, check_model, plain_mlp, vectors
from torch import Tensor

from hybrid.models.mmoe import MMoE

TASK_OUTPUTS, NUM_EXPERTS = (1, 3, 1), 4


def gate(weight: Tensor, x: Tensor) -> list[Tensor]:
    powers = [torch.exp(torch.dot(row, x)) for row in weight]
    return [power / torch.stack(powers).sum() for power in powers]


def plain(parameters: Parameters, inputs: Tensor) -> Tensor:
    samples = []
    for x in inputs:
        experts = [plain_mlp(parameters, f"experts.experts.{n}", x) for n in range(NUM_EXPERTS)]
        outputs = []
        for k in range(len(TASK_OUTPUTS)):
            shares = gate(parameters[f"gates.{k}.shares.weight"], x)
            mixture = torch.stack([s * e for s, e in zip(shares, experts, strict=True)]).sum(dim=0)
            outputs.append(plain_mlp(parameters, f"towers.{k}", mixture, ends_linear=True))
        samples.append(torch.cat(outputs))
    return torch.stack(samples)


def test_model_equals_its_equations() -> None:
    model = MMoE(5, TASK_OUTPUTS, NUM_EXPERTS, expert=(6, 3), tower=(4,))
    check_model(model, plain, vectors(7, 5, seed=1))
