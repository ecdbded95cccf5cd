"""Data parallelism of the dense net: what DDP wraps, and how gradients meet."""

# No postponed annotations here: DDP checks those of a communication hook, as types.

from enum import StrEnum

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hybrid.model import HybridModel


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


def parallelise(model: HybridModel, mode: DdpMode, group: dist.ProcessGroup) -> nn.Module:
    """Wrap the local parts of ``model`` in DDP over ``group`` as ``mode`` says; the module to call."""
    if mode is DdpMode.OUTSIDE:
        return _wrap(model, group)
    if mode is DdpMode.INSIDE:
        model.net.head = _wrap(model.net.head, group)
    return model


def _wrap(module: nn.Module, group: dist.ProcessGroup) -> DistributedDataParallel:
    ddp = DistributedDataParallel(
        module,
        process_group=group,
        gradient_as_bucket_view=True,
        # Running statistics must agree; constant index tables need no broadcast every step.
        forward_sync_buffers=any(buffer.is_floating_point() for buffer in module.buffers()),
    )
    ddp.register_comm_hook(group, sum_hook)
    return ddp


def sum_hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Sum gradients over trainers.

    DDP would divide by the number of trainers, the mean only where all batches are equal. Each
    trainer's loss already carries the weight of its samples in the global batch, so the sum is right.
    """
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    assert work is not None
    summed: torch.futures.Future[Tensor] = work.get_future().then(lambda reduced: reduced.value()[0])
    return summed
