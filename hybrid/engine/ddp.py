"""Data parallelism of the dense net: what DDP wraps, and how gradients meet."""

# No postponed annotations here: DDP checks those of a communication hook, as types.

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import StrEnum

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hybrid.dense.dense_optimizer import squared_norm
from hybrid.engine.dense_placement import Arrangement
from hybrid.engine.hybrid_model import HybridModel, LocalModel
from hybrid.engine.shared_memory_reduce import SharedSum
from hybrid.primitives.step_timings import OpenSpan, StepClock


class DdpMode(StrEnum):
    """What DDP wraps. Parameters outside it are each trainer's own.

    ======= =========================================================================
    NONE    nothing: every trainer trains a dense net of its own over shared tables
    INSIDE  the head of the dense net; bottom and interaction stay each trainer's own
    OUTSIDE everything local: all trainers hold the same dense net
    ======= =========================================================================
    """

    NONE = "none"
    INSIDE = "inside"
    OUTSIDE = "outside"


class DdpModel:
    """One trainer's model, with DDP around what ``mode`` says, and the gradients of its current step.

    Gradients of a step's micro-batches are added up here and reduced once, with those of the last one.

    Args:
        model: what to wrap; its ``stages`` are wrapped in place.
        mode: what to wrap.
        arrangement: which trainers hold what of the net.
        clock: records how long each all-reduce takes, where it records.
        bucket_mb: MiB of gradients that are reduced at once.
        shared: sums gradients in place of the process group, where memory is shared.

    Attributes:
        module: what to call.
        net: the local net, named as without DDP.
        gradients: by parameter, once the last micro-batch of a step is collected.
    """

    def __init__(
        self,
        model: LocalModel,
        mode: DdpMode,
        arrangement: Arrangement,
        clock: StepClock | None = None,
        bucket_mb: float = 25.0,
        shared: SharedSum | None = None,
    ) -> None:
        self.net = model.net
        self._model = model
        self.module: nn.Module = model
        self.gradients: dict[Tensor, Tensor] = {}
        self._carried: dict[Tensor, Tensor] = {}  # what the micro-batches so far have left
        self._arrangement = arrangement
        self._clock = clock or StepClock()
        self._bucket_mb = bucket_mb
        self._shared = shared
        self._ddp: DistributedDataParallel | None = None
        if mode is DdpMode.OUTSIDE:
            self.module = self._ddp = self._wrap(model, arrangement.group)
        elif mode is DdpMode.INSIDE:
            assert isinstance(model, HybridModel), "only a net in stages has a head"
            model.stages.head = self._ddp = self._wrap(model.stages.head, arrangement.group)
        self._reduced = set() if self._ddp is None else set(self._ddp.parameters())

    def _wrap(self, module: nn.Module, group: dist.ProcessGroup) -> DistributedDataParallel:
        ddp = DistributedDataParallel(
            module,
            process_group=group,
            gradient_as_bucket_view=True,
            bucket_cap_mb=self._bucket_mb,  # left out, the first bucket would be of 1 MiB
            # Running statistics must agree; constant index tables need no broadcast every step.
            forward_sync_buffers=any(buffer.is_floating_point() for buffer in module.buffers()),
        )
        ddp.register_comm_hook(_Reduction(group, self._shared, self._carried, self._clock), sum_hook)
        return ddp

    def reducing(self, is_last: bool) -> AbstractContextManager[None]:
        """In here, the gradients of a micro-batch are reduced if it is the step's last."""
        if is_last or self._ddp is None:
            return nullcontext()
        no_sync: AbstractContextManager[None] = self._ddp.no_sync()
        return no_sync

    def collect(self, gradients: dict[Tensor, Tensor], is_last: bool) -> None:
        """Add the gradients of a micro-batch, as its graph gives them."""
        self.gradients.clear()
        for parameter in [p for p in self.net.parameters() if p in gradients]:
            gradient = gradients[parameter]
            carried = self._carried.pop(parameter, None)
            if carried is not None:
                gradient = carried.add_(gradient)
            elif not is_last:
                gradient = gradient.clone()
            (self.gradients if is_last else self._carried)[parameter] = gradient

    def raise_of_backward(self) -> None:
        """Raise what the net's own backward pass raises, if it does and this trainer has all of the net."""
        if not self._arrangement.layouts:
            self._model.raise_of_backward()

    def first_not_finite(self) -> str:
        """What of the last forward pass is the first that is not finite, as a part of a sentence."""
        return self._model.first_not_finite(is_whole=not self._arrangement.layouts)

    def gradient_not_finite(self) -> str | None:
        """The parameter nearest to the loss whose gradient is not finite."""
        names = [n for n, p in self.net.named_parameters() if p in self.gradients]
        bad = [n for n in names if not self.gradients[self.net.get_parameter(n)].isfinite().all()]
        return bad[-1] if bad else None

    def squared_norm(self) -> float:
        """This trainer's part of the squared norm of all dense gradients; the parts add up to it."""
        alike: dict[int, list[Tensor]] = {}
        for parameter, gradient in self.gradients.items():
            holders = self._arrangement.num_holders(parameter, parameter in self._reduced)
            alike.setdefault(holders, []).append(gradient)
        return sum(squared_norm(gradients) / holders for holders, gradients in alike.items())


@dataclass(frozen=True)
class _Reduction:
    group: dist.ProcessGroup
    shared: SharedSum | None
    carried: dict[Tensor, Tensor]
    clock: StepClock


def sum_hook(state: _Reduction, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Sum gradients over trainers, with what the earlier micro-batches of the step have left.

    DDP would divide by the number of trainers, the mean only where all batches are equal. Each
    trainer's loss already carries the weight of its samples in the global batch, so the sum is right.
    """
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        if parameter in state.carried:
            gradient.add_(state.carried.pop(parameter))
    buffer = bucket.buffer()
    span = state.clock.begin("all-reduce", num_bytes=buffer.nbytes)
    if state.shared is None and state.group.size() > 1:
        return _summed_by_group(buffer, state.group, span)
    if state.shared is not None:
        state.shared.sum_(buffer)
    if span is not None:
        span.close()
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(buffer)
    return done


def _summed_by_group(
    buffer: Tensor, group: dist.ProcessGroup, span: OpenSpan | None
) -> torch.futures.Future[Tensor]:
    work = dist.all_reduce(buffer, group=group, async_op=True)
    assert work is not None

    def summed(reduced: torch.futures.Future[list[Tensor]]) -> Tensor:
        if span is not None:
            span.close()
        return reduced.value()[0]

    ended: torch.futures.Future[Tensor] = work.get_future().then(summed)
    return ended
