"""Data parallelism of the dense net: what DDP wraps, which trainers share parameters, and gradient sums.

The sums over trainers are bit-identical in a resumed run. Sums by DDP would not be: gloo and NCCL add values
of three or more trainers in an order that depends on the offset in the bucket, and DDP changes its buckets
after the first step of a process. If trainers share memory, :class:`SharedSlots` adds in rank order.
Otherwise, :class:`GroupReduce` all-reduces buffers whose layout depends only on the trained parameters.
"""

# No postponed annotations here: DDP checks the annotations of a communication hook, as types.

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hybrid.dense.dense_optimizer import squared_norm
from hybrid.dense.tensor_parallel import Layout
from hybrid.engine.hybrid_model import HybridModel
from hybrid.errors import ConfigError
from hybrid.primitives.step_timings import StepClock
from hybrid.shared_memory.shared_slots import SharedSlots

NetState = dict[str, Tensor]
# The optimizer's state by the index of the parameter.
OptimizerState = dict[int, dict[str, Tensor]]
_SEGMENT_BYTES = 25 << 20  # as DDP's buckets


class DdpMode(StrEnum):
    """Which modules of a trainer DDP wraps. Only the parameters of these modules are equal on all trainers.

    ======= ============================================================================================
    NONE    no module: every trainer trains its own dense net; all trainers use the same tables
    INSIDE  only the head; every trainer trains its own copy of the other stages
    OUTSIDE the whole dense net
    ======= ============================================================================================
    """

    NONE = "none"
    INSIDE = "inside"
    OUTSIDE = "outside"


@dataclass(frozen=True)
class DensePlacement:
    """How the parameters of a dense net are distributed over trainers.

    Attributes:
        group: the trainers that hold the same parameters as this trainer; DDP reduces over this group.
        tensor_size: how many trainers hold one net together, each of them in a different ``group``.
        layouts: for each parameter of which this trainer holds only a shard, how it is split.
    """

    group: dist.ProcessGroup
    tensor_size: int = 1
    layouts: Mapping[Tensor, Layout] = field(default_factory=dict)

    def convert(
        self,
        net: nn.Module,
        net_state: Mapping[str, Tensor],
        optimizer_state: Mapping[int, Mapping[str, Any]],
        convert_tensor: Callable[[Tensor, Layout], Tensor],
    ) -> tuple[NetState, OptimizerState]:
        """Convert the states of a net and of its optimizer from shards to full tensors, or the reverse.

        Args:
            convert_tensor: :func:`full_tensor` to gather full tensors, or :func:`local_shard` to select this
                trainer's shards. To gather, all trainers that share a net must call this method together.
        """
        layouts = {name: self.layouts.get(parameter) for name, parameter in net.named_parameters()}
        by_index = dict(enumerate(layouts.values()))

        def convert(value: Any, layout: Layout | None) -> Any:
            # The step count of an optimizer does not have the shape of the parameter.
            if layout is None or not isinstance(value, Tensor) or value.dim() == 0:
                return value
            return convert_tensor(value, layout)

        # Without a layout are also buffers, and parameters of another net.
        converted_net = {name: convert(tensor, layouts.get(name)) for name, tensor in net_state.items()}
        converted_optimizer = {
            index: {key: convert(value, by_index.get(index)) for key, value in values.items()}
            for index, values in optimizer_state.items()
        }
        return converted_net, converted_optimizer


@dataclass
class _Segment:
    buffer_N: Tensor
    num_parameters: int
    num_copied: int = 0


class GroupReduce:
    """All-reduce of gradients by a process group, in buffers of a fixed layout, which are called segments.

    Gradients are copied into the segments as DDP's buckets fill. A segment is reduced as soon as it is
    complete, while the backward pass continues.

    Args:
        parameters: the parameters whose gradients are reduced, in the same order on every trainer.

    Attributes:
        gradients: the reduced gradients, by parameter; valid from :meth:`wait` to the next backward pass.
    """

    def __init__(self, parameters: Sequence[Tensor], group: dist.ProcessGroup, clock: StepClock) -> None:
        self.gradients: dict[Tensor, Tensor] = {}
        self._group = group
        self._clock = clock
        self._segments: dict[Tensor, _Segment] = {}  # by parameter
        self._pending: list[dist.Work] = []
        chunks: list[list[Tensor]] = [[]]
        for parameter in reversed(parameters):  # roughly the order in which gradients become ready
            is_same_kind = all((p.dtype, p.device) == (parameter.dtype, parameter.device) for p in chunks[-1])
            if not is_same_kind or sum(p.nbytes for p in [*chunks[-1], parameter]) > _SEGMENT_BYTES:
                chunks.append([])
            chunks[-1].append(parameter)
        for chunk in filter(None, chunks):  # the first is empty before a large parameter
            sizes = [parameter.numel() for parameter in chunk]
            segment = _Segment(chunk[0].new_empty(sum(sizes), requires_grad=False), len(chunk))
            for parameter, gradient_N in zip(chunk, segment.buffer_N.split(sizes), strict=True):
                self.gradients[parameter] = gradient_N.view(parameter.shape)
                self._segments[parameter] = segment

    def add(self, parameter: Tensor, gradient: Tensor) -> None:
        """Copy a gradient into its segment, and start the all-reduce if the segment is now complete."""
        self.gradients[parameter].copy_(gradient)
        segment = self._segments[parameter]
        segment.num_copied += 1
        if segment.num_copied < segment.num_parameters:
            return
        segment.num_copied = 0
        span = self._clock.begin("all-reduce", num_bytes=segment.buffer_N.nbytes)
        work = dist.all_reduce(segment.buffer_N, group=self._group, async_op=True)
        assert work is not None
        if span is not None:
            work.get_future().add_done_callback(lambda _: span.close())
        self._pending.append(work)

    def wait(self) -> None:
        for work in self._pending:
            work.wait()
        self._pending.clear()


class DdpModel:
    """The model of one trainer, wrapped in DDP as ``mode`` selects, and the gradients of a step.

    DDP copies the parameters of the first trainer of ``placement.group`` to the others, and fills buckets
    with gradients. DDP itself does not sum them: if there are several trainers, a hook sums each bucket by
    :class:`SharedSlots` or :class:`GroupReduce`, while the backward pass continues. The gradients of the
    micro-batches of a step are added up, and are reduced once, in the last backward pass.

    Args:
        model: any module; ``INSIDE`` requires a ``HybridModel``, and wraps its head in place.
        shared_reduce: sums the gradients in shared memory; None to use the process group.

    Attributes:
        module: the module to call, perhaps wrapped in DDP.
        net: the local net, with the parameter names that it has without DDP.
        gradients: gradients of the step by parameter, after :meth:`collect` for the last micro-batch.

    Raises:
        ConfigError: the mode is ``INSIDE``, and the head has no trainable parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        mode: DdpMode,
        placement: DensePlacement,
        clock: StepClock | None = None,
        shared_reduce: SharedSlots | None = None,
    ) -> None:
        self.module = self._unwrapped = model
        self.net: nn.Module = model.net if isinstance(model, HybridModel) else model
        self.gradients: dict[Tensor, Tensor] = {}
        self._mode = mode
        self._placement = placement
        self._clock = clock or StepClock()
        # One of these sums over trainers. Both are None for a single trainer.
        self._shared_reduce = shared_reduce
        self._group_reduce: GroupReduce | None = None
        self._capacity = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        self._ddp: DistributedDataParallel | None = None
        self._wrapped: set[Tensor] = set()  # the parameters whose gradients DDP has in its buckets
        self._is_last = True  # micro-batch of the step
        self._accumulated: dict[Tensor, Tensor] = {}  # the gradients of the earlier micro-batches of the step
        self._summed: set[Tensor] = set()  # the parameters of the buckets that the micro-batch has filled
        if mode is DdpMode.OUTSIDE:
            self.follow_parameters()
        elif mode is DdpMode.INSIDE:
            assert isinstance(model, HybridModel), "only a net in stages has a head"
            head = model.stages.head
            if not any(parameter.requires_grad for parameter in head.parameters()):
                raise ConfigError("dense.ddp", "needs a head with trainable parameters", mode.value)
            model.stages.head = self._wrap(head)

    def follow_parameters(self) -> nn.Module:
        """Return the module to call. For ``OUTSIDE``, renew DDP if other parameters are now trained.

        All trainers call this together, since a new DDP copies the first trainer's parameters to the others.
        Raise RuntimeError if the trained parameters have changed between micro-batches of a step.
        """
        trained = {p for p in self.net.parameters() if p.requires_grad}
        if self._mode is DdpMode.OUTSIDE and trained != self._wrapped:
            if self._accumulated:
                raise RuntimeError(
                    "the trained parameters of the module have changed between two micro-batches of a step; "
                    "change requires_grad, or replace layers, only after a whole step"
                )
            self.module = self._unwrapped
            self._ddp = None
            self._wrapped = set()
            if trained:
                self.module = self._wrap(self._unwrapped)
        return self.module

    def _wrap(self, module: nn.Module) -> DistributedDataParallel:
        group, parameters = self._placement.group, [p for p in module.parameters() if p.requires_grad]
        self._ddp = ddp = DistributedDataParallel(
            module,
            process_group=group,
            gradient_as_bucket_view=True,
            bucket_cap_mb=25,  # without this argument, the first bucket would be of 1 MiB
            # Running statistics must agree; constant index tables need no broadcast every step.
            forward_sync_buffers=any(buffer.is_floating_point() for buffer in module.buffers()),
        )
        if sum(parameter.nbytes for parameter in parameters) > self._capacity:
            self._shared_reduce = None
        if self._shared_reduce is None and group.size() > 1:
            self._group_reduce = GroupReduce(parameters, group, self._clock)
        ddp.register_comm_hook(None, self.sum_bucket)
        ddp.require_backward_grad_sync = self._is_last
        self._wrapped = set(parameters)
        return ddp

    def begin(self, is_last: bool) -> None:
        """Begin a micro-batch. The backward pass of the last micro-batch of a step reduces the gradients."""
        self._is_last = is_last
        self._summed.clear()
        if self._ddp is not None:
            self._ddp.require_backward_grad_sync = is_last

    def sum_bucket(self, _: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Sum the gradients in a bucket over micro-batches and trainers; a communication hook of DDP.

        With :class:`GroupReduce`, the returned bucket lacks the sum over trainers, which only starts here.
        The hook does not divide by the number of trainers, since a loss is a summand of the global mean.
        """
        self._summed.update(bucket.parameters())
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if parameter in self._accumulated:
                gradient.add_(self._accumulated.pop(parameter))
            if self._group_reduce is not None:
                self._group_reduce.add(parameter, gradient)
        buffer = bucket.buffer()
        if self._group_reduce is None:
            span = self._clock.begin("all-reduce", num_bytes=buffer.nbytes)
            if self._shared_reduce is not None:
                self._shared_reduce.sum_(buffer)
            if span is not None:
                span.close()
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done

    def collect(self, gradients: dict[Tensor, Tensor]) -> None:
        """Add the gradients of a micro-batch to the gradients of the step. Call this after the backward pass.

        Args:
            gradients: gradients by leaf of the autograd graph. Leaves outside the net are ignored.

        Raises:
            RuntimeError: after the last micro-batch of a step, a parameter under DDP has no gradient, or its
                gradient is not summed over the trainers.
        """
        self.gradients.clear()
        reduced: dict[Tensor, Tensor] = {}
        if self._is_last and self._group_reduce is not None:
            self._group_reduce.wait()
            reduced = self._group_reduce.gradients
        named = dict(self.net.named_parameters()) if self._is_last and self._ddp is not None else {}
        unused = [name for name, p in named.items() if p in self._wrapped and p not in gradients]
        if unused:
            raise RuntimeError(
                f"parameter {unused[0]} has no gradient: the loss of each batch must depend on all "
                "parameters; set requires_grad = False for others"
            )
        required = gradients if self._mode is DdpMode.OUTSIDE else self._wrapped
        local = [name for name, p in named.items() if p in required and p not in self._summed]
        if local:
            raise RuntimeError(
                f"the gradient of parameter {local[0]} is not summed over the trainers, because the forward "
                "of the distributed module did not call its layer: train with model(...), not with the "
                "original module, nor with layers or other methods of the model"
            )
        of_step = self.gradients if self._is_last else self._accumulated
        for parameter in [p for p in self.net.parameters() if p in gradients]:
            gradient = reduced.get(parameter, gradients[parameter])
            if parameter in self._accumulated:
                gradient = self._accumulated.pop(parameter).add_(gradient)
            elif not self._is_last:
                gradient = gradient.clone()  # DDP overwrites the gradients in its buckets
            of_step[parameter] = gradient
        if self._is_last:  # the last micro-batch may skip a layer
            self.gradients |= self._accumulated
            self._accumulated.clear()

    def gradient_not_finite(self) -> str | None:
        """Return the name of the last parameter with a non-finite gradient; None if all are finite."""
        of_net = {name: self.gradients.get(p) for name, p in self.net.named_parameters()}
        bad = [name for name, grad in of_net.items() if grad is not None and not grad.isfinite().all()]
        return bad[-1] if bad else None

    def squared_norm(self) -> float:
        """Return this trainer's summand of the squared norm of all dense gradients.

        If n trainers hold the same gradient, the summand of each contains 1/n of the gradient's squared norm.
        """
        by_holders: dict[int, list[Tensor]] = {}
        for parameter, gradient in self.gradients.items():
            holders = self._placement.group.size() if parameter in self._wrapped else 1
            if parameter not in self._placement.layouts:
                holders *= self._placement.tensor_size
            by_holders.setdefault(holders, []).append(gradient)
        return sum(squared_norm(gradients) / holders for holders, gradients in by_holders.items())
