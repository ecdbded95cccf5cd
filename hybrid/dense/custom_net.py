"""Checks of custom dense nets before training."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hybrid.config import RunConfig
from hybrid.dense.compilation import restore_afterwards
from hybrid.dense.step_diagnosis import name_layer
from hybrid.errors import ConfigError
from hybrid.models.dense_net import DenseNet
from hybrid.user_code.tracebacks import describe_error

# The slice of a trainer may be empty.
_NUMBERS_OF_SAMPLES = (2, 0)


def check_custom_net(
    net: DenseNet, name: str, widths: Sequence[int], dtype: torch.dtype, num_outputs: int = 1
) -> None:
    """Check that parameters have values, that stages fit together, and the number of outputs.

    Args:
        name: "module:function" that returned the net.
        widths: widths of the inputs: dense features, pooled embeddings, and the output of the remote net if
            there is one.
        dtype: type of the inputs.
        num_outputs: required outputs per sample.

    Raises:
        ConfigError: a check fails.
    """
    for path, tensor in (*net.named_parameters(), *net.named_buffers()):
        if is_lazy(tensor):
            reason = f"has {path} without a size; give its lazy layer all sizes, or run the net once"
            raise ConfigError("dense.net", reason, name)
        if tensor.is_meta:
            raise ConfigError("dense.net", f"has {path} on the device meta, without values", name)
    with restore_afterwards(net, ()), torch.no_grad():
        net.eval()
        for size in _NUMBERS_OF_SAMPLES:
            dense_BF, pooled_BE, *remote_BH = (torch.zeros(size, width, dtype=dtype) for width in widths)
            bottom_BH = _output(net, "bottom", name, dense_BF)
            hidden_BH = _output(net, "interaction", name, bottom_BH, pooled_BE)
            outputs_BO = _output(net, "head", name, *(remote_BH or [hidden_BH]))
            shape = list(outputs_BO.shape)
            shapes = [[size, num_outputs]] if num_outputs > 1 else [[size], [size, 1]]
            if shape not in shapes:
                found = f"returns {shape} for {size} samples, not {' or '.join(map(str, shapes))}"
                per_sample = "one logit" if num_outputs == 1 else f"{num_outputs} outputs"
                order = "" if num_outputs == 1 else ", by task"
                reason = f"the head {found}: {per_sample} per sample{order}"
                raise ConfigError("dense.net", reason, name)


def _output(net: DenseNet, stage: str, name: str, *inputs: Tensor) -> Tensor:
    shapes = " and ".join(str(list(tensor.shape)) for tensor in inputs)
    module: nn.Module = getattr(net, stage)
    try:
        output: Tensor = module(*inputs)
    except Exception as error:  # user code may raise anything
        name_layer(error, net)
        reason = f"the {stage} fails for inputs {shapes}: {describe_error(error)}"
        raise ConfigError("dense.net", " ".join(reason.split()), name) from error
    if not isinstance(output, Tensor):
        raise ConfigError("dense.net", f"the {stage} returns a {type(output).__name__}, not a tensor", name)
    return output


def batch_norm_warning(net: nn.Module, config: RunConfig) -> str | None:
    """Return a warning if batch normalization makes the results depend on the number of trainers.

    Such a layer normalizes by the statistics of the samples that it sees. One process would take those of the
    global batch. ``torch.nn.SyncBatchNorm`` does so too, but takes no CPU tensors.
    """
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    layers = [name for name, module in net.named_modules() if isinstance(module, kinds)]
    together = config.cluster.trainers if config.dense.ddp != "none" else 1
    is_split = together * config.train.micro_batches > 1 or config.dense.parallel == "replicas"
    if not layers or not is_split:
        return None
    return (
        f"batch normalization in {', '.join(layers)} takes the statistics of each slice of a batch: results "
        "depend on cluster.trainers and differ from those of one process. Use torch.nn.LayerNorm, or on GPUs "
        "torch.nn.SyncBatchNorm, which does not work on CPUs"
    )
