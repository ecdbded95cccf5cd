"""MMoE, multi-gate mixture of experts: several labels from nets that they share, each as it needs them.

Ma et al. 2018, "Modeling Task Relationships in Multi-task Learning with Multi-gate Mixture-of-Experts",
section 4. Of N expert nets f_n over the same inputs, each task k takes a mixture of its own, and has a
tower h_k over it::

    logit_k(x) = h_k( sum over n of  g_k(x)_n * f_n(x) )              g_k(x) = softmax(W_k x)

Tasks that agree learn to share experts, and tasks that do not to leave each other's alone; one net for all of
them (a shared bottom) cannot.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hybrid.models.mlp import mlp


class Experts(nn.Module):
    """Nets of one shape over the same inputs.

    Args:
        width: of the inputs.
        hidden: widths of the layers of each.
        num_experts: N.
    """

    def __init__(self, width: int, hidden: Sequence[int], num_experts: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(mlp((width, *hidden)) for _ in range(num_experts))

    def forward(self, inputs_BE: Tensor) -> Tensor:
        """``experts_BNH``: what each makes of the inputs."""
        return torch.stack([expert(inputs_BE) for expert in self.experts], dim=1)


class Gate(nn.Module):
    """A mixture of experts, in shares that follow from the inputs and add up to 1.

    Args:
        width: of the inputs.
        num_experts: N.
    """

    def __init__(self, width: int, num_experts: int) -> None:
        super().__init__()
        self.shares = nn.Linear(width, num_experts, bias=False)

    def forward(self, inputs_BE: Tensor, experts_BNH: Tensor) -> Tensor:
        """``mixture_BH``."""
        shares_BN: Tensor = self.shares(inputs_BE).softmax(dim=1)
        return (shares_BN.unsqueeze(2) * experts_BNH).sum(dim=1)


def towers(width: int, hidden: Sequence[int], task_outputs: Sequence[int]) -> nn.ModuleList:
    """A net for each task, over its mixture of ``width``; see :class:`MMoE`."""
    widths = (width, *hidden)
    return nn.ModuleList(mlp(widths).append(nn.Linear(widths[-1], outputs)) for outputs in task_outputs)


class MMoE(nn.Module):
    """Outputs of several tasks.

    Args:
        width: of the inputs.
        task_outputs: how many outputs each of the K tasks has: 1, or one for each of its classes.
        num_experts: N.
        expert: widths of the layers of each expert.
        tower: widths of the layers of each task's tower.
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
        self.towers = towers(expert[-1], tower, task_outputs)

    def forward(self, inputs_BE: Tensor) -> Tensor:
        """``outputs_BO``, those of each task in turn."""
        experts_BNH = self.experts(inputs_BE)
        mixed = [gate(inputs_BE, experts_BNH) for gate in self.gates]
        return torch.cat([tower(mixed[task]) for task, tower in enumerate(self.towers)], dim=1)
