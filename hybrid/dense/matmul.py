"""Matrix products of linear layers by oneDNN, where oneDNN is faster than MKL, which torch uses.

On AMD processors, MKL runs AVX2 kernels. torch also contains oneDNN, which runs AVX-512 kernels, but has no
setting to use it. So two custom operators compute the products. With B samples, F inputs and H outputs:

    output              x_BF @ weight_HF.T + bias_H    hybrid::linear
    gradient of x       grad_BH @ weight_HF            hybrid::linear
    gradient of weight  grad_BH.T @ x_BF               hybrid::weight_gradient

``torch.compile`` captures operators, but no Python functions. The operators leave small products to torch.
A ReLU is not fused into the product: oneDNN would turn NaN into 0, and hide a non-finite loss.
"""

from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Multiplications of a product. Below, the overhead of the operator (0.2 ms per layer, forward and backward)
# is more than faster kernels save.
_FEWEST = 1 << 23
# Samples in one product of a weight gradient. oneDNN reorders its operands, which must fit the cache.
_BLOCK = 512

_library = torch.library.Library("hybrid", "DEF")
_library.define("linear(Tensor input, Tensor weight, Tensor? bias) -> Tensor")
_library.define("weight_gradient(Tensor grad, Tensor input) -> Tensor")


class Linear(nn.Linear):
    """A linear layer that computes large products of float32 on a CPU by oneDNN, and others by torch."""

    def forward(self, input: Tensor) -> Tensor:
        if input.device.type != "cpu" or input.dim() < 2:
            return F.linear(input, self.weight, self.bias)
        if not torch.compiler.is_compiling() and not _should_use_onednn(input, self.weight):
            return F.linear(input, self.weight, self.bias)
        rows_NF = input if input.dim() == 2 else input.flatten(0, -2)
        rows_NH: Tensor = torch.ops.hybrid.linear(rows_NF, self.weight, self.bias)
        return rows_NH if input.dim() == 2 else rows_NH.unflatten(0, input.shape[:-1])


@cache
def prefers_onednn() -> bool:
    """Return whether oneDNN multiplies float32 matrices faster than MKL on this machine.

    This is so on AMD processors with AVX-512, where MKL runs AVX2 kernels. No time is measured, so a resumed
    run gets the same result, and is bit-identical to an uninterrupted run.
    """
    if not torch.backends.mkldnn.is_available() or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    cpu_info = Path("/proc/cpuinfo")
    return cpu_info.is_file() and "AuthenticAMD" in cpu_info.read_text(encoding="utf-8")


def use_onednn(net: nn.Module) -> None:
    """Change the class of ``nn.Linear`` layers to :class:`Linear`, in place. Parameters do not change.

    Layers with one input or one output keep their class, since MKL is faster there. Subclasses of
    ``nn.Linear`` also keep their class, since they may compute something else.
    """
    for layer in net.modules():
        if type(layer) is nn.Linear and min(layer.in_features, layer.out_features) > 1:
            # In place, since a net may refer to a layer by more than one name.
            layer.__class__ = Linear


def use_torch(net: nn.Module) -> None:
    """Undo :func:`use_onednn`: change all :class:`Linear` layers of a net back to ``nn.Linear``."""
    for layer in net.modules():
        if type(layer) is Linear:
            layer.__class__ = nn.Linear  # type: ignore[assignment]


def multiply_by_onednn(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``input @ weight.T + bias``; None means no bias."""
    # A private operator of torch; tests/unit/dense/test_matmul.py checks its behavior.
    product: Tensor = torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")
    return product


def _should_use_onednn(input: Tensor, weight: Tensor) -> bool:
    """Return whether oneDNN computes ``input @ weight.T``: a large product of float32 without autocast."""
    return (
        input.dtype == weight.dtype == torch.float32
        and input.size(-1) == weight.size(1)  # otherwise torch raises an error
        and input.numel() > input.size(-1)  # more than one row
        and input.numel() * weight.size(0) >= _FEWEST
        and not torch.is_autocast_enabled("cpu")  # torch's bfloat16 products are oneDNN's
    )


@torch.library.impl(_library, "linear", "CPU")
def _linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    multiply = multiply_by_onednn if _should_use_onednn(input, weight) else F.linear
    return multiply(input, weight, bias)


@torch.library.impl(_library, "weight_gradient", "CPU")
def _weight_gradient(grad_BH: Tensor, x_BF: Tensor) -> Tensor:
    if not _should_use_onednn(grad_BH.t(), x_BF.t()):
        return grad_BH.t() @ x_BF
    first, *others = zip(grad_BH.split(_BLOCK), x_BF.split(_BLOCK), strict=True)
    total_HF = multiply_by_onednn(first[0].t(), first[1].t(), None)
    for grad_bH, x_bF in others:
        total_HF += multiply_by_onednn(grad_bH.t(), x_bF.t(), None)
    return total_HF


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _gradients(ctx: Any, grad_BH: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of input, weight and bias; with ``create_graph``, compute them by torch."""
    x_BF, weight_HF = ctx.saved_tensors
    needs_input, needs_weight, needs_bias = ctx.needs_input_grad
    if torch.is_grad_enabled():
        input_grad = grad_BH @ weight_HF if needs_input else None
        weight_grad = grad_BH.t() @ x_BF if needs_weight else None
    else:
        input_grad = torch.ops.hybrid.linear(grad_BH, weight_HF.t(), None) if needs_input else None
        weight_grad = torch.ops.hybrid.weight_gradient(grad_BH, x_BF) if needs_weight else None
    return input_grad, weight_grad, grad_BH.sum(0) if needs_bias else None


torch.library.register_autograd("hybrid::linear", _gradients, setup_context=_save, lib=_library)
# The shapes of the results, for torch.compile.
torch.library.register_fake(
    "hybrid::linear",
    lambda input, weight, bias: input.new_empty((input.size(0), weight.size(0))),
    lib=_library,
)
torch.library.register_fake(
    "hybrid::weight_gradient",
    lambda grad, input: input.new_empty((grad.size(1), input.size(1))),
    lib=_library,
)
