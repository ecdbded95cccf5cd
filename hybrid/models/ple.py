"""PLE, progressive layered extraction: experts that tasks share, and experts of their own, in layers.

Tang et al. 2020, "Progressive Layered Extraction (PLE): A Novel Multi-Task Learning (MTL) Model for
Personalized Recommendations", section 4. In MMoE (``mmoe.py``) every expert is every task's, and
tasks that disagree still meet in each of them. Here, in each layer, a task k has experts E_k that no other
task sees, beside the shared ones E_s, and its gate mixes these two kinds::

    x_k' = sum over n of softmax(W_k x_k)_n * [E_k(x_k), E_s(x_s)]_n
    x_s' = sum over n of softmax(W_s x_s)_n * [E_1(x_1), ..., E_K(x_K), E_s(x_s)]_n

The first layer has x_k = x_s = x. The last has no x_s', for nobody would read it; K towers follow.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hybrid.models.mmoe import Experts, Gate, towers


class Extraction(nn.Module):
    """One layer: K inputs of tasks and one that they share, to the same again.

    Args:
        width: of each input.
        hidden: widths of the layers of each expert.
        num_tasks: K.
        num_experts: of each task, and as many shared ones.
        is_last: whether the shared output is left out.
    """

    def __init__(
        self, width: int, hidden: Sequence[int], num_tasks: int, num_experts: int, is_last: bool
    ) -> None:
        super().__init__()
        self.own = nn.ModuleList(Experts(width, hidden, num_experts) for _ in range(num_tasks))
        self.shared = Experts(width, hidden, num_experts)
        self.gates = nn.ModuleList(Gate(width, 2 * num_experts) for _ in range(num_tasks))
        self.shared_gate = None if is_last else Gate(width, (num_tasks + 1) * num_experts)

    def forward(self, inputs: list[Tensor]) -> list[Tensor]:
        """K tensors ``BH``, and the shared one, but for the last layer.

        Args:
            inputs: K tensors ``BE``, and the shared one.
        """
        shared_BNH = self.shared(inputs[-1])
        own = [experts(inputs[task]) for task, experts in enumerate(self.own)]
        outputs = [
            gate(inputs[task], torch.cat([own[task], shared_BNH], dim=1))
            for task, gate in enumerate(self.gates)
        ]
        if self.shared_gate is not None:
            own_BNH = torch.cat(own, dim=1)
            outputs.append(self.shared_gate(inputs[-1], torch.cat([own_BNH, shared_BNH], dim=1)))
        return outputs


class PLE(nn.Module):
    """Outputs of several tasks.

    Args:
        width: of the inputs.
        task_outputs: how many outputs each of the K tasks has: 1, or one for each of its classes.
        num_experts: in a layer, of each task, and as many shared ones.
        layers: widths of each layer's experts, one layer of the net each.
        tower: widths of the layers of each task's tower.
    """

    def __init__(
        self,
        width: int,
        task_outputs: Sequence[int],
        num_experts: int = 2,
        layers: Sequence[int] = (32, 32),
        tower: Sequence[int] = (16,),
    ) -> None:
        super().__init__()
        self.num_tasks = num_tasks = len(task_outputs)
        widths = (width, *layers)
        self.layers = nn.ModuleList(
            Extraction(before, (after,), num_tasks, num_experts, is_last=number == len(layers))
            for number, (before, after) in enumerate(zip(widths, layers, strict=False), start=1)
        )
        self.towers = towers(widths[-1], tower, task_outputs)

    def forward(self, inputs_BE: Tensor) -> Tensor:
        """``outputs_BO``, those of each task in turn."""
        extracted = [inputs_BE] * (self.num_tasks + 1)
        for layer in self.layers:
            extracted = layer(extracted)
        return torch.cat([tower(extracted[task]) for task, tower in enumerate(self.towers)], dim=1)
