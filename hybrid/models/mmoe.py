"""MMoE, multi-gate mixture of experts: several tasks share expert nets, and each task has a gate.

Ma et al. 2018, "Modeling Task Relationships in Multi-task Learning with Multi-gate Mixture-of-Experts",
section 4. There are N expert nets f_n over the same inputs. Each task k has a gate g_k that mixes their
outputs, and a tower h_k over the mixture::

    logit_k(x) = h_k( sum over n of  g_k(x)_n * f_n(x) )              g_k(x) = softmax(W_k x)

Related tasks learn to share experts, and unrelated tasks to use different ones.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hybrid.models.layers import mlp


class Experts(nn.Module):
    """Nets of the same shape over the same inputs."""

    def __init__(self, width: int, hidden: Sequence[int], num_experts: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(mlp((width, *hidden)) for _ in range(num_experts))

    def forward(self, inputs_BE: Tensor) -> Tensor:
        """Return ``experts_BNH``, the output of each expert."""
        return torch.stack([expert(inputs_BE) for expert in self.experts], dim=1)


class Gate(nn.Module):
    """A weighted mean of the experts' outputs. The weights are a softmax of a linear map of the inputs."""

    def __init__(self, width: int, num_experts: int) -> None:
        super().__init__()
        self.weights = nn.Linear(width, num_experts, bias=False)

    def forward(self, inputs_BE: Tensor, experts_BNH: Tensor) -> Tensor:
        weights_BN: Tensor = self.weights(inputs_BE).softmax(dim=1)
        return (weights_BN.unsqueeze(2) * experts_BNH).sum(dim=1)


class MMoE(nn.Module):
    """The model: outputs of several tasks.

    Args:
        width: E, the width of the inputs.
        task_outputs: the number of outputs of each of the K tasks: 1, or one per class.
        num_experts: N, the number of experts.
        expert: hidden units of each expert.
        tower: hidden units of the tower of each task.
    """

    def __init__(
        self,
        width: int,
        task_outputs: Sequence[int],
        num_experts: int = 4,
        expert: Sequence[int] = (32,),
        tower: Sequence[int] = (16,),
    ) -> None:
        super().__init__()
        self.experts = Experts(width, expert, num_experts)
        self.gates = nn.ModuleList(Gate(width, num_experts) for _ in task_outputs)
        self.towers = nn.ModuleList(mlp((expert[-1], *tower), outputs) for outputs in task_outputs)

    def forward(self, inputs_BE: Tensor) -> Tensor:
        """Return ``outputs_BO``, the outputs of the first task, then of the second, ..."""
        experts_BNH = self.experts(inputs_BE)
        mixed = [gate(inputs_BE, experts_BNH) for gate in self.gates]
        return torch.cat([tower(mixed[task]) for task, tower in enumerate(self.towers)], dim=1)
