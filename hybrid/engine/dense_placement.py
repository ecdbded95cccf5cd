"""Placement of the dense net's parameters on trainers, and conversion of its state for checkpoints."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybrid.dense.tensor_parallel.sharded_module import Layout, full_tensor, local_shard

NetState = dict[str, Tensor]
# The optimizer's state by the index of the parameter.
OptimizerState = dict[int, dict[str, Tensor]]


@dataclass(frozen=True)
class DensePlacement:
    """Which trainers hold which parameters.

    Attributes:
        group: the trainers that hold the same parameters as this one; DDP reduces among them.
        tensor_size: how many trainers hold one net together; each of them is in a different ``group``.
        layouts: the layouts of the parameters of which this trainer holds a shard; all others are full.
    """

    group: dist.ProcessGroup
    tensor_size: int = 1
    layouts: Mapping[Tensor, Layout] = field(default_factory=dict)

    def num_holders(self, parameter: Tensor, is_reduced: bool) -> int:
        """Return how many trainers hold the same gradient of ``parameter`` after a step."""
        replicas = self.group.size() if is_reduced else 1
        return replicas if parameter in self.layouts else replicas * self.tensor_size

    def full_state(self, net: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[NetState, OptimizerState]:
        """Gather the full state of the net and of its optimizer.

        All trainers that hold the net together must call it.
        """
        return self._each(net, net.state_dict(), optimizer.state_dict()["state"], full_tensor)

    def local_state(
        self, net: nn.Module, net_state: NetState, state: OptimizerState
    ) -> tuple[NetState, OptimizerState]:
        """Return this trainer's shard of a full state."""
        return self._each(net, net_state, state, local_shard)

    def _each(
        self,
        net: nn.Module,
        net_state: Mapping[str, Tensor],
        state: Mapping[int, Mapping[str, Any]],
        convert: Callable[[Tensor, Layout], Tensor],
    ) -> tuple[NetState, OptimizerState]:
        """Apply ``convert`` to the tensors of both states that belong to split parameters."""
        parameters = dict(net.named_parameters())
        layouts = {name: self.layouts[p] for name, p in parameters.items() if p in self.layouts}
        converted = {n: convert(t, layouts[n]) if n in layouts else t for n, t in net_state.items()}
        layout_of = dict(enumerate(map(layouts.get, parameters)))
        optimizer_state = {}
        for index, values in state.items():
            layout = layout_of.get(index)  # None as well if the state is of another net
            optimizer_state[index] = {
                # The step count does not have the shape of the parameter.
                key: convert(value, layout)
                if layout is not None and isinstance(value, Tensor) and value.dim() > 0
                else value
                for key, value in values.items()
            }
        return converted, optimizer_state
