"""Whose matrix products linear layers take: torch's own (MKL, on x86), or those of oneDNN in the same wheel.

Torch sends float32 products on CPUs to MKL, which runs AVX2 kernels on AMD's processors; oneDNN takes what
the processor has, and no setting of torch's leads there. So the products of a layer go through two operators
of our own: with x of B samples, F inputs and H outputs

    output              x_BF @ weight_HF.T + bias_H    hybrid::linear
    gradient of x       grad_BH @ weight_HF            hybrid::linear
    gradient of weight  grad_BH.T @ x_BF               hybrid::weight_gradient

Since they are operators and no functions of Python's, they are part of TorchScript, and of what
``torch.compile`` captures, too.

A ReLU after a layer stays a layer of its own: fused into oneDNN's product it makes 0 of NaN, and a loss that
is not finite would go unnoticed.
"""

# No postponed annotations here: TorchScript reads those of forward.

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Multiplications of a product. With less, what oneDNN's calls and the operator take by themselves (0.2 ms for
# a layer, forward and backward, beside torch's) is more than faster kernels save.
_FEWEST = 1 << 23
# Samples whose gradient of a weight is one product. oneDNN copies its operands into an order of its own, and
# those of longer batches leave the cache on the way.
_BLOCK = 512

_library = torch.library.Library("hybrid", "DEF")
_library.define("linear(Tensor input, Tensor weight, Tensor? bias) -> Tensor")
_library.define("weight_gradient(Tensor grad, Tensor input) -> Tensor")


class Linear(nn.Linear):
    """A linear layer whose products are oneDNN's where that pays: of float32, on a CPU, and large."""

    def forward(self, input: Tensor) -> Tensor:
        """As ``nn.Linear``, for any number of dimensions before the last."""
        if input.device.type != "cpu" or input.dim() < 2:
            return F.linear(input, self.weight, self.bias)
        if input.dim() == 2:
            output_BH: Tensor = torch.ops.hybrid.linear(input, self.weight, self.bias)
            return output_BH
        rows_NH: Tensor = torch.ops.hybrid.linear(input.flatten(0, -2), self.weight, self.bias)
        output: Tensor = rows_NH.unflatten(0, input.shape[:-1])
        return output


@cache
def prefers_onednn() -> bool:
    """Return whether oneDNN multiplies float32 matrices faster than torch's own products on this machine.

    It does on AMD processors with AVX-512, where MKL runs AVX2 kernels. The answer depends on the processor
    alone, so that a resumed run has the bits of an undisturbed one.
    """
    if not torch.backends.mkldnn.is_available() or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    cpu_info = Path("/proc/cpuinfo")
    return cpu_info.is_file() and "AuthenticAMD" in cpu_info.read_text(encoding="utf-8")


def use_onednn(net: nn.Module) -> None:
    """Have the linear layers of a net take oneDNN's products; names and tensors of the net stay.

    Layers of one output or input stay torch's, which is faster there. So do subclasses of ``nn.Linear``,
    which may have other parameters, or be used without a call.
    """
    for layer in net.modules():
        if type(layer) is nn.Linear and min(layer.in_features, layer.out_features) > 1:
            # In place, since a net may refer to a layer by more than one name.
            layer.__class__ = Linear


def use_torch(net: nn.Module) -> None:
    """Undo :func:`use_onednn`: all layers of the net are made of torch's own operators again."""
    for layer in net.modules():
        if type(layer) is Linear:
            layer.__class__ = nn.Linear  # type: ignore[assignment]


def multiply_by_onednn(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # No part of torch's public interface: tests/unit/dense/test_matmul.py has all that is relied on.
    product: Tensor = torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")
    return product


def _is_worth_it(input: Tensor, weight: Tensor) -> bool:
    """Whether a product is to be oneDNN's; the three of a layer, of as many multiplications each, agree."""
    return (
        input.dtype == weight.dtype == torch.float32
        and input.size(1) == weight.size(1)  # else torch says what does not fit
        and input.size(0) > 1
        and input.numel() * weight.size(0) >= _FEWEST
        and not torch.is_autocast_enabled("cpu")  # torch's bfloat16 products are oneDNN's
    )


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return (
        multiply_by_onednn(input, weight, bias)
        if _is_worth_it(input, weight)
        else F.linear(input, weight, bias)
    )


def _weight_gradient(grad_BH: Tensor, x_BF: Tensor) -> Tensor:
    if not _is_worth_it(grad_BH.t(), x_BF.t()):
        return grad_BH.t() @ x_BF
    first, *others = zip(grad_BH.split(_BLOCK), x_BF.split(_BLOCK), strict=True)
    total_HF = multiply_by_onednn(first[0].t(), first[1].t(), None)
    for grad_bH, x_bF in others:
        total_HF += multiply_by_onednn(grad_bH.t(), x_bF.t(), None)
    return total_HF


def _recorded_linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The operator where autograd may be listening; what is small has torch's derivative."""
    if not _is_worth_it(input, weight):
        return F.linear(input, weight, bias)
    if not torch.is_grad_enabled():
        return _below_autograd(torch.ops.hybrid.linear, input, weight, bias)
    output_BH: Tensor = _Linear.apply(input, weight, bias)  # type: ignore[no-untyped-call]
    return output_BH


def _recorded_weight_gradient(grad_BH: Tensor, x_BF: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return _below_autograd(torch.ops.hybrid.weight_gradient, grad_BH, x_BF)
    grad_HF: Tensor = _WeightGradient.apply(grad_BH, x_BF)  # type: ignore[no-untyped-call]
    return grad_HF


def _below_autograd(operator: Callable[..., Tensor], *operands: Tensor | None) -> Tensor:
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*operands)


class _Linear(torch.autograd.Function):
    """The derivative of an operator, which is made of the operators and has a derivative, too."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(input, weight)
        return _below_autograd(torch.ops.hybrid.linear, input, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_BH,) = grads
        x_BF, weight_HF = ctx.saved_tensors
        of_input, of_weight, of_bias = ctx.needs_input_grad
        return (
            torch.ops.hybrid.linear(grad_BH, weight_HF.t(), None) if of_input else None,
            torch.ops.hybrid.weight_gradient(grad_BH, x_BF) if of_weight else None,
            grad_BH.sum(0) if of_bias else None,
        )


class _WeightGradient(torch.autograd.Function):
    """See :class:`_Linear`."""

    @staticmethod
    def forward(ctx: Any, grad_BH: Tensor, x_BF: Tensor) -> Tensor:
        ctx.save_for_backward(grad_BH, x_BF)
        return _below_autograd(torch.ops.hybrid.weight_gradient, grad_BH, x_BF)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (of_grad_HF,) = grads
        grad_BH, x_BF = ctx.saved_tensors
        of_grad, of_input = ctx.needs_input_grad
        return (
            torch.ops.hybrid.linear(x_BF, of_grad_HF, None) if of_grad else None,
            torch.ops.hybrid.linear(grad_BH, of_grad_HF.t(), None) if of_input else None,
        )


def _linear_without_values(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return input.new_empty((input.size(0), weight.size(0)))


def _weight_gradient_without_values(grad_BH: Tensor, x_BF: Tensor) -> Tensor:
    return x_BF.new_empty((grad_BH.size(1), x_BF.size(1)))


_library.impl("linear", _linear, "CPU")
_library.impl("linear", _recorded_linear, "AutogradCPU")
_library.impl("weight_gradient", _weight_gradient, "CPU")
_library.impl("weight_gradient", _recorded_weight_gradient, "AutogradCPU")
torch.library.register_fake("hybrid::linear", _linear_without_values, lib=_library)
torch.library.register_fake("hybrid::weight_gradient", _weight_gradient_without_values, lib=_library)
