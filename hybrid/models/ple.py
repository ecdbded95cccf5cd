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

from hybrid.dense.nets import output_mlp
from hybrid.models.mmoe import Experts, Gate


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
        *of_tasks, shared_BE = inputs
        shared_BNH = self.shared(shared_BE)
        own = [experts(x_BE) for experts, x_BE in zip(self.own, of_tasks, strict=True)]
        outputs: list[Tensor] = [
            gate(x_BE, torch.cat([own_BNH, shared_BNH], dim=1))
            for gate, x_BE, own_BNH in zip(self.gates, of_tasks, own, strict=True)
        ]
        if self.shared_gate is not None:
            outputs.append(self.shared_gate(shared_BE, torch.cat([*own, shared_BNH], dim=1)))
        return outputs


class PLE(nn.Module):
    """Logits of several tasks.

    Args:
        width: of the inputs.
        num_tasks: K.
        num_experts: in a layer, of each task, and as many shared ones.
        layers: widths of each layer's experts, one layer of the net each.
        tower: widths of the layers of each task's tower.
    """

    def __init__(
        self,
        width: int,
        num_tasks: int,
        num_experts: int = 2,
        layers: Sequence[int] = (32, 32),
        tower: Sequence[int] = (16,),
    ) -> None:
        super().__init__()
        self.num_tasks = num_tasks
        widths = (width, *layers)
        self.layers = nn.ModuleList(
            Extraction(before, (after,), num_tasks, num_experts, is_last=number == len(layers))
            for number, (before, after) in enumerate(zip(widths, layers, strict=False), start=1)
        )
        self.towers = nn.ModuleList(output_mlp((widths[-1], *tower)) for _ in range(num_tasks))

    def forward(self, inputs_BE: Tensor) -> Tensor:
        """``logits_BK``."""
        extracted = [inputs_BE] * (self.num_tasks + 1)
        for layer in self.layers:
            extracted = layer(extracted)
        logits = [tower(x_BH) for tower, x_BH in zip(self.towers, extracted, strict=True)]
        return torch.stack(logits, dim=1)
