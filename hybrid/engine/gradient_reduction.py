"""Sums of gradients over trainers, whose bits depend on no run-time choice of DDP.

DDP rebuilds its buckets after the first step of a process. With three or more trainers, gloo and NCCL add
values in an order that depends on their offset in the buffer. A sum per bucket would therefore have other
last bits in a resumed run. Both classes here avoid that:

- :class:`SharedMemoryReduce` adds in the order of the ranks, for trainers of one host;
- :class:`GroupReduce` all-reduces buffers whose layout is fixed when the model is built.
"""

# No postponed annotations here: DDP checks the annotations of a communication hook, as types.

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid.primitives.step_timings import StepClock
from hybrid.transport.shared_memory.shared_block import SharedMemory

_SEGMENT_BYTES = 25 << 20  # as DDP's buckets


class SharedMemoryReduce:
    """All-reduce among the trainers of one host, through shared memory; created by :meth:`join`.

    A process group does the same by TCP messages in threads of its own: 2 ms for 2 MB on 2 idle cores.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory

    @classmethod
    def join(
        cls, group: dist.ProcessGroup, trainer: int, device: torch.device, timeout_seconds: float
    ) -> Self | None:
        """Meet the other trainers of ``group``, all of which call this; None where memory cannot be shared.

        It can be shared where all are processes of one Linux host, not too many, with gradients on the CPU.

        Args:
            group: takes CPU tensors.
            trainer: the index of this trainer.
            device: where its gradients are.

        Raises:
            ClusterError: a trainer did not come in time.
        """
        memory = SharedMemory.join(group, trainer, device.type == "cpu", timeout_seconds)
        return None if memory is None or len(memory.members) < group.size() else cls(memory)

    def sum_(self, values_N: Tensor) -> None:
        """Replace ``values_N`` by the sum over all trainers, with the same bits on each.

        Trainers call this in the same order, with tensors of the same size and type.

        Args:
            values_N: contiguous, on the CPU.

        Raises:
            ClusterError: a trainer is gone, or did not come in time.
        """

        def view(slot: memoryview) -> Tensor:
            return torch.frombuffer(slot, dtype=values_N.dtype, count=values_N.numel())

        view(self._memory.slot(values_N.nbytes)).copy_(values_N)
        first_N, second_N, *others = map(view, self._memory.publish())
        torch.add(first_N, second_N, out=values_N)
        for other_N in others:
            values_N.add_(other_N)


@dataclass
class _Segment:
    """A contiguous buffer for the gradients of some parameters."""

    buffer_N: Tensor
    num_parameters: int
    num_copied: int = 0


class GroupReduce:
    """All-reduce by a process group, in segments of a fixed layout.

    Gradients are copied into the segments as DDP's buckets fill. A segment is reduced as soon as it is
    complete, while the backward pass continues.

    Args:
        parameters: whose gradients are reduced; the same on every trainer.
        group: the trainers.
        clock: records how long each segment takes.

    Attributes:
        gradients: the reduced gradients, by parameter; valid from :meth:`wait` to the next backward pass.
    """

    def __init__(self, parameters: Sequence[Tensor], group: dist.ProcessGroup, clock: StepClock) -> None:
        self.gradients: dict[Tensor, Tensor] = {}
        self._group = group
        self._clock = clock
        self._segments: dict[Tensor, _Segment] = {}  # by parameter
        self._pending: list[dist.Work] = []
        chunks: list[list[Tensor]] = []
        for parameter in reversed(parameters):  # roughly the order in which gradients become ready
            kind = parameter.dtype, parameter.device
            if (
                not chunks
                or kind != (chunks[-1][0].dtype, chunks[-1][0].device)
                or (sum(each.nbytes for each in chunks[-1]) + parameter.nbytes > _SEGMENT_BYTES)
            ):
                chunks.append([])
            chunks[-1].append(parameter)
        for chunk in chunks:
            sizes = [parameter.numel() for parameter in chunk]
            segment = _Segment(chunk[0].new_empty(sum(sizes), requires_grad=False), len(chunk))
            for parameter, gradient_N in zip(chunk, segment.buffer_N.split(sizes), strict=True):
                self.gradients[parameter] = gradient_N.view(parameter.shape)
                self._segments[parameter] = segment

    def add(self, parameter: Tensor, gradient: Tensor) -> None:
        """Copy a gradient into its segment, and start to reduce the segment if that completes it."""
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
        """Wait for all segments that are being reduced."""
        for work in self._pending:
            work.wait()
        self._pending.clear()


@dataclass(frozen=True)
class Reduction:
    """The state of :func:`sum_hook`.

    Attributes:
        clock: records how long each bucket takes.
        shared, by_group: what sums over trainers; both None for a trainer alone.
        carried: the gradients of the earlier micro-batches of the step, by parameter.
    """

    clock: StepClock
    shared: SharedMemoryReduce | None
    by_group: GroupReduce | None
    carried: dict[Tensor, Tensor] = field(default_factory=dict)


def sum_hook(state: Reduction, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Sum gradients over trainers, and over the micro-batches of the step; a communication hook of DDP.

    DDP would divide by the number of trainers, which is the mean only where all batches have one size. The
    loss of each trainer already carries the weight of its samples in the global batch, so the sum is right.
    """
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        if parameter in state.carried:
            gradient.add_(state.carried.pop(parameter))
        if state.by_group is not None:
            state.by_group.add(parameter, gradient)
    buffer = bucket.buffer()
    if state.by_group is None:
        span = state.clock.begin("all-reduce", num_bytes=buffer.nbytes)
        if state.shared is not None:
            state.shared.sum_(buffer)
        if span is not None:
            span.close()
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(buffer)
    return done
