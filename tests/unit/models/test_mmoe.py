"""MMoE against its equations, a sample, a task and an expert at a time."""

import torch
from support.models import Parameters, check_model, plain_logit, plain_mlp, vectors
from torch import Tensor

from hybrid.models.mmoe import MMoE

NUM_TASKS, NUM_EXPERTS = 3, 4


def gate(weight: Tensor, x: Tensor) -> list[Tensor]:
    powers = [torch.exp(torch.dot(row, x)) for row in weight]
    return [power / torch.stack(powers).sum() for power in powers]


def plain(parameters: Parameters, inputs: Tensor) -> Tensor:
    samples = []
    for x in inputs:
        experts = [plain_mlp(parameters, f"experts.experts.{n}", x) for n in range(NUM_EXPERTS)]
        logits = []
        for k in range(NUM_TASKS):
            shares = gate(parameters[f"gates.{k}.shares.weight"], x)
            mixture = torch.stack([s * e for s, e in zip(shares, experts, strict=True)]).sum(dim=0)
            logits.append(plain_logit(parameters, f"towers.{k}", mixture))
        samples.append(torch.stack(logits))
    return torch.stack(samples)


def test_it_is_the_equations() -> None:
    model = MMoE(5, NUM_TASKS, NUM_EXPERTS, expert=(6, 3), tower=(4,))
    check_model(model, plain, vectors(7, 5, seed=1))
