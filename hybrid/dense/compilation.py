"""Compilation of the stages of a dense net by ``torch.compile``."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from hybrid.errors import ConfigError, first_line

_LOCATION = re.compile(r'File "(.+)", line (\d+)')


def compiled(module: nn.Module, how: str, example: Sequence[Tensor]) -> nn.Module:
    """Compile ``module`` by ``torch.compile``; return a module with the same parameters and buffers.

    torch compiles at the first call, so this function calls the result once, forward and backward. The result
    accepts any number of samples. DDP must wrap the compiled module, not the other way round.

    Args:
        module: takes tensors, and returns one tensor, all with one row per sample.
        how: the backend of ``torch.compile``: "inductor" or "aot_eager".
        example: inputs with two samples or more. Inputs that require gradients in training must do so here.

    Raises:
        ConfigError: ``how`` cannot compile ``module``, or the call with ``example`` fails.
    """
    inputs = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in example]
    for tensor in inputs:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    # With inductor's kernels that write in place, torch 2.11 computed wrong gradients of an MLP on an H200.
    options = {"inplace_buffers": False} if how == "inductor" else None
    # Modules of one class share a code object, and together would reach its limit of recompilations. In torch
    # 2.13, Module.compile() compiles nothing of a Sequential.
    result: nn.Module = torch.compile(module, backend=how, options=options, isolate_recompiles=True)  # type: ignore[call-overload]
    try:
        with restore_afterwards(module, inputs):
            output: Tensor = result(*inputs)
            if output.requires_grad:
                sources = [tensor for tensor in (*result.parameters(), *inputs) if tensor.requires_grad]
                torch.autograd.grad(output.sum(), sources, allow_unused=True)
    except Exception as error:  # user code may raise anything
        reason = f"{how} cannot compile {type(module).__name__}: {_reason(error)}"
        raise ConfigError("dense.compile", reason, how) from error
    return result


@contextmanager
def restore_afterwards(module: nn.Module, example: Sequence[Tensor]) -> Iterator[None]:
    """Restore the buffers and training modes of ``module`` at the end of the block.

    Also restore torch's random generators of the CPU, and of the GPUs on which ``example`` has tensors.
    """
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    modes = [(each, each.training) for each in module.modules()]
    try:
        with torch.random.fork_rng(devices=[x.device for x in example if x.is_cuda]):
            yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for each, training in modes:
            each.training = training


def _reason(error: BaseException) -> str:
    from torch._inductor.exc import InvalidCxxCompiler  # takes a second to import

    if isinstance(error.__context__, InvalidCxxCompiler):
        return "it needs a C++ compiler, which is missing; install g++, or take aot_eager"
    kind = "" if isinstance(error, RuntimeError) else f"{type(error).__name__}: "
    location = _LOCATION.search(str(error))
    where = f" ({Path(location[1]).name}:{location[2]})" if location else ""
    return kind + first_line(error).rstrip(" :.") + where
