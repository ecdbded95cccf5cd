"""Batch normalization by the statistics of the global batch, on CPUs and GPUs.

``torch.nn.SyncBatchNorm`` does the same on GPUs only. The statistics come from sums over all trainers::

    count, mean    from the sums of 1 and x
    variance       from the sum of (x - mean)^2
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hybrid.config import RunConfig

_BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d


class _Sum(torch.autograd.Function):
    """The sum of a tensor over all trainers. All trainers must run the same graph in the same order."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        total = values.clone()
        if not SyncBatchNorm.is_local:
            dist.all_reduce(total, group=SyncBatchNorm.group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return _sum(gradients[0].contiguous())


def _sum(values: Tensor) -> Tensor:
    total: Tensor = _Sum.apply(values)  # type: ignore[no-untyped-call]
    return total


class SyncBatchNorm(_BatchNorm):
    """A batch normalization that all trainers call together in training, even with an empty slice.

    Attributes:
        group: the process group of all trainers; None outside of a cluster.
        is_local: whether a block of :func:`local_statistics` is active.
    """

    group: ClassVar[dist.ProcessGroup | None] = None
    is_local: ClassVar[bool] = False

    def _check_input_dim(self, input: Tensor) -> None:
        """Accept the inputs of ``BatchNorm1d``, ``2d`` and ``3d``."""

    def forward(self, input: Tensor) -> Tensor:
        """Return normalized values, of the shape (samples, channels, ...) of ``input``.

        Raises:
            ValueError: in training, all trainers together have fewer than two values per channel.
        """
        if self.training and self.group is not None:
            # Not a decorator, which would import torch._dynamo with this module and take most of a second.
            normalized: Tensor = torch.compiler.disable(self._normalize)(input)
            return normalized
        output: Tensor = super().forward(input)
        return output

    def _normalize(self, values: Tensor) -> Tensor:
        others, shape = [0, *range(2, values.dim())], [1, -1, *[1] * (values.dim() - 2)]
        x = values if values.dtype == torch.float64 else values.float()
        sums = _sum(torch.cat([x.sum(others), x.new_tensor([x[:, 0].numel()])]))
        count = float(sums[-1].detach())
        mean_C = sums[:-1] / count
        if count <= 1 and not self.is_local:
            raise ValueError(f"batch normalization needs more than one value per channel, not {count:.0f}")
        centered = x - mean_C.view(shape)
        variance_C = _sum(centered.square().sum(others)) / count
        if self.running_mean is not None and self.running_var is not None and not self.is_local:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            weight = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean_C.detach().to(self.running_mean), weight)
            self.running_var.lerp_(variance_C.detach().to(self.running_var) * count / (count - 1), weight)
        factor_C = (variance_C + self.eps).rsqrt()
        if self.affine:
            factor_C = factor_C * self.weight
        output = centered * factor_C.view(shape)
        return (output + self.bias.view(shape) if self.affine else output).to(values.dtype)


def synchronize_batch_norms(net: nn.Module, config: RunConfig, group: dist.ProcessGroup) -> str | None:
    """Change batch normalizations under DDP to :class:`SyncBatchNorm`, in place.

    Subclasses of torch's layers do not change. No layer changes if the net is compiled, replicated or split.

    Args:
        group: all trainers.

    Returns:
        A warning that names the layers whose statistics do not cover the global batch, or with separate nets
        (``dense.ddp = "none"``), the trainer's slice of it. None if there are no such layers.
    """
    dense, parts = config.dense, config.train.micro_batches
    is_alone = group.size() == 1 or dense.ddp == "none"
    if is_alone and parts == 1 and dense.parallel != "replicas":
        return None
    partial: list[str] = []  # layers whose statistics are those of a part of the batch
    for name, layer in net.named_modules():
        if isinstance(layer, _BATCH_NORMS):
            is_shared = not is_alone and (dense.ddp == "outside" or name.startswith("head"))
            is_plain = type(layer) in _BATCH_NORMS and dense.compile == dense.parallel == "none"
            if is_shared and is_plain:
                SyncBatchNorm.group = group
                layer.__class__ = SyncBatchNorm  # type: ignore[assignment]
            if parts > 1 or not (is_shared and is_plain):
                partial.append(name)
    if not partial:
        return None
    return (
        f"batch normalization in {', '.join(partial)} takes the statistics of a part of the batch: results "
        "depend on cluster.trainers and differ from those of one process. Use torch.nn.LayerNorm"
    )


@contextmanager
def local_statistics() -> Iterator[None]:
    """Let each :class:`SyncBatchNorm` use this trainer's samples only, and not update running statistics."""
    SyncBatchNorm.is_local = True
    try:
        yield
    finally:
        SyncBatchNorm.is_local = False
