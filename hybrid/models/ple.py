"""PLE, progressive layered extraction: layers of shared and of task-specific experts.

Tang et al. 2020, "Progressive Layered Extraction (PLE): A Novel Multi-Task Learning (MTL) Model for
Personalized Recommendations", section 4. In MMoE (``mmoe.py``), all tasks train all experts, even if tasks
conflict. In each layer of PLE, each task k has separate experts E_k in addition to the shared experts E_s.
The gate of the task mixes both::

    x_k' = sum over n of softmax(W_k x_k)_n * [E_k(x_k), E_s(x_s)]_n
    x_s' = sum over n of softmax(W_s x_s)_n * [E_1(x_1), ..., E_K(x_K), E_s(x_s)]_n

The first layer has x_k = x_s = x. The last layer has no x_s'. K towers follow.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hybrid.models.layers import mlp
from hybrid.models.mmoe import Experts, Gate


class Extraction(nn.Module):
    """One layer of PLE, which returns a new vector for each task and a new shared vector.

    Args:
        num_experts: number of experts of each task, and also number of shared experts.
        is_last: whether this is the last layer, which returns no shared vector.
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
        """Map K tensors (B, E), then a shared tensor, to K tensors (B, H), then a shared tensor.

        The last layer returns no shared tensor.
        """
        shared_BNH = self.shared(inputs[-1])
        separate = [experts(inputs[task]) for task, experts in enumerate(self.own)]
        outputs = [
            gate(inputs[task], torch.cat([separate[task], shared_BNH], dim=1))
            for task, gate in enumerate(self.gates)
        ]
        if self.shared_gate is not None:
            outputs.append(self.shared_gate(inputs[-1], torch.cat([*separate, shared_BNH], dim=1)))
        return outputs


class PLE(nn.Module):
    """The model: outputs of several tasks.

    Args:
        width: E, the width of the inputs.
        task_outputs: the number of outputs of each of the K tasks: 1, or one per class.
        num_experts: number of experts of each task in a layer; a layer has as many shared experts.
        layers: output width of the experts of each layer.
        tower: hidden units of the tower of each task.
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
        self.towers = nn.ModuleList(mlp((widths[-1], *tower), outputs) for outputs in task_outputs)

    def forward(self, inputs_BE: Tensor) -> Tensor:
        """Return ``outputs_BO``, the outputs of the first task, then of the second, ..."""
        extracted = [inputs_BE] * (self.num_tasks + 1)
        for layer in self.layers:
            extracted = layer(extracted)
        return torch.cat([tower(extracted[task]) for task, tower in enumerate(self.towers)], dim=1)
