"""Which trainers hold what of the dense net, and its state as one whole."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from hybrid.dense.tensor_parallel.sharded_module import own_shard, whole

NetState = dict[str, Tensor]
# The optimizer's state by the parameter's place in the net.
OptimizerState = dict[int, dict[str, Tensor]]


@dataclass(frozen=True)
class Arrangement:
    """Who holds what.

    Attributes:
        group: the trainers that hold the same parameters as this one; DDP reduces among them.
        tensor_size: how many trainers hold a net together; each of them is in another ``group``.
        layouts: how a parameter is split of which this trainer holds a shard; all others are whole.
    """

    group: dist.ProcessGroup
    tensor_size: int = 1
    layouts: Mapping[Tensor, DTensorSpec] = field(default_factory=dict)

    def num_holders(self, parameter: Tensor, is_reduced: bool) -> int:
        """How many trainers have the same gradient of ``parameter`` after a step's backward passes."""
        alike = self.group.size() if is_reduced else 1
        return alike if parameter in self.layouts else alike * self.tensor_size

    def whole_state(
        self, net: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[NetState, OptimizerState]:
        """The state of the net and of its optimizer as if one trainer held it all.

        Called by all trainers that hold the net together, at once.
        """
        return self._each(net, net.state_dict(), optimizer.state_dict()["state"], whole)

    def own_state(
        self, net: nn.Module, net_state: NetState, state: OptimizerState
    ) -> tuple[NetState, OptimizerState]:
        """This trainer's part of a whole state."""
        return self._each(net, net_state, state, own_shard)

    def _each(
        self,
        net: nn.Module,
        net_state: Mapping[str, Tensor],
        state: Mapping[int, Mapping[str, Any]],
        convert: Callable[[Tensor, DTensorSpec], Tensor],
    ) -> tuple[NetState, OptimizerState]:
        """Both states with ``convert`` applied to what has the form of a split parameter."""
        parameters = dict(net.named_parameters())
        layouts = {name: self.layouts[p] for name, p in parameters.items() if p in self.layouts}
        converted = {n: convert(t, layouts[n]) if n in layouts else t for n, t in net_state.items()}
        by_place = dict(enumerate(map(layouts.get, parameters)))
        optimizer_state = {}
        for place, values in state.items():
            layout = by_place.get(place)  # there is no such place where the state is of another net
            optimizer_state[place] = {
                key: convert(value, layout) if layout is not None and _is_split(value) else value
                for key, value in values.items()
            }
        return converted, optimizer_state


def _is_split(value: Any) -> bool:
    """Whether an optimizer's state has a value for each of the parameter's; its step count has not."""
    return isinstance(value, Tensor) and value.dim() > 0
