"""Data parallelism of the dense net: what DDP wraps, and the gradients of a step."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from enum import StrEnum

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hybrid.dense.dense_optimizer import squared_norm
from hybrid.engine.dense_placement import DensePlacement
from hybrid.engine.gradient_reduction import GroupReduce, Reduction, SharedMemoryReduce, sum_hook
from hybrid.engine.hybrid_model import HybridModel, LocalModel
from hybrid.primitives.step_timings import StepClock


class DdpMode(StrEnum):
    """What DDP wraps. All other parameters differ between trainers.

    ======= ========================================================================
    NONE    nothing: every trainer trains its own dense net over shared tables
    INSIDE  the head of the dense net; every trainer has its own other stages
    OUTSIDE everything local: all trainers hold the same dense net
    ======= ========================================================================
    """

    NONE = "none"
    INSIDE = "inside"
    OUTSIDE = "outside"


class DdpModel:
    """The model of one trainer, with DDP around what ``mode`` says, and the gradients of its current step.

    The gradients of a step's micro-batches are added up and reduced once, in the last backward pass.

    Args:
        model: what to wrap; its ``stages`` are wrapped in place.
        mode: what to wrap.
        placement: which trainers hold which parameters.
        clock: records how long each all-reduce takes.
        shared: sums gradients instead of the process group, where trainers share memory.

    Attributes:
        module: what to call.
        net: the local net, with the parameter names that it has without DDP.
        gradients: by parameter, once the last micro-batch of a step is collected.
    """

    def __init__(
        self,
        model: LocalModel,
        mode: DdpMode,
        placement: DensePlacement,
        clock: StepClock | None = None,
        shared: SharedMemoryReduce | None = None,
    ) -> None:
        self.net = model.net
        self._model = model
        self.module: nn.Module = model
        self.gradients: dict[Tensor, Tensor] = {}
        self._placement = placement
        self._reduction = Reduction(clock or StepClock(), shared, None)
        self._ddp: DistributedDataParallel | None = None
        if mode is DdpMode.OUTSIDE:
            self.module = self._ddp = self._wrap(model)
        elif mode is DdpMode.INSIDE:
            assert isinstance(model, HybridModel), "only a net in stages has a head"
            model.stages.head = self._ddp = self._wrap(model.stages.head)
        self._reduced = set() if self._ddp is None else set(self._ddp.parameters())

    def _wrap(self, module: nn.Module) -> DistributedDataParallel:
        group = self._placement.group
        ddp = DistributedDataParallel(
            module,
            process_group=group,
            gradient_as_bucket_view=True,
            bucket_cap_mb=25,  # without this argument, the first bucket would be of 1 MiB
            # Running statistics must agree; constant index tables need no broadcast every step.
            forward_sync_buffers=any(buffer.is_floating_point() for buffer in module.buffers()),
        )
        if self._reduction.shared is None and group.size() > 1:
            parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
            by_group = GroupReduce(parameters, group, self._reduction.clock)
            self._reduction = replace(self._reduction, by_group=by_group)
        ddp.register_comm_hook(self._reduction, sum_hook)
        return ddp

    def reducing(self, is_last: bool) -> AbstractContextManager[None]:
        """Reduce the gradients of a micro-batch within the block if it is the last one of the step."""
        if is_last or self._ddp is None:
            return nullcontext()
        no_sync: AbstractContextManager[None] = self._ddp.no_sync()
        return no_sync

    def collect(self, gradients: dict[Tensor, Tensor], is_last: bool) -> None:
        """Add the gradients of a micro-batch, as its graph gives them."""
        carried, by_group = self._reduction.carried, self._reduction.by_group
        reduced: Mapping[Tensor, Tensor] = {}
        if is_last and by_group is not None:
            by_group.wait()
            reduced = by_group.gradients
        self.gradients.clear()
        for parameter in [p for p in self.net.parameters() if p in gradients]:
            gradient = reduced.get(parameter, gradients[parameter])
            if parameter in carried:
                gradient = carried.pop(parameter).add_(gradient)
            elif not is_last:
                gradient = gradient.clone()
            (self.gradients if is_last else carried)[parameter] = gradient

    def raise_of_backward(self) -> None:
        """Repeat the local backward pass to raise its error, if this trainer holds the whole net."""
        if not self._placement.layouts:
            self._model.raise_of_backward()

    def first_not_finite(self) -> str:
        """Return the first non-finite tensor of the last forward pass, as a clause."""
        return self._model.first_not_finite(is_whole=not self._placement.layouts)

    def gradient_not_finite(self) -> str | None:
        """Return the name of the last parameter with a non-finite gradient."""
        names = [n for n, p in self.net.named_parameters() if p in self.gradients]
        bad = [n for n in names if not self.gradients[self.net.get_parameter(n)].isfinite().all()]
        return bad[-1] if bad else None

    def squared_norm(self) -> float:
        """Return this trainer's summand of the squared norm of all dense gradients."""
        by_holders: dict[int, list[Tensor]] = {}
        for parameter, gradient in self.gradients.items():
            holders = self._placement.num_holders(parameter, parameter in self._reduced)
            by_holders.setdefault(holders, []).append(gradient)
        return sum(squared_norm(gradients) / holders for holders, gradients in by_holders.items())
