"""Compilation of stages by TorchScript or ``torch.compile``."""

import re
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from hybrid.errors import ConfigError, first_line

# TorchScript has one table of classes, which two threads would redefine for each other.
_torchscript = threading.Lock()
_LOCATION = re.compile(r'File "(.+)", line (\d+)')
_NUMBER_OF_CLASS = re.compile(r"\.___torch_mangle_\d+")


def compiled(module: nn.Module, how: str, example: Sequence[Tensor]) -> nn.Module:
    """Return a compiled module with the parameters and buffers of ``module``.

    ``script`` and ``trace`` keep the names of parameters; ``inductor`` and ``aot_eager`` add a prefix. The
    result has run forward and backward once. Compile before DDP wraps the module: around DDP,
    ``torch.compile`` captures nothing under distributed autograd.

    Args:
        module: its inputs, and its only output, are tensors with one row per sample.
        how: one of :data:`hybrid.config.sections.COMPILERS`.
        example: inputs as in training, of two samples or more; inputs that get a gradient must require one.
            The result takes other numbers of samples too, also none.

    Raises:
        ConfigError: ``module`` cannot be compiled in this way.
    """
    inputs = tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in example)
    try:
        with restore_afterwards(module, inputs):
            result = _compile(module, how, inputs)
            # torch.compile compiles at the first call. TorchScript profiles the first pass and rounds
            # differently from the second on, so that a resumed run would have other bits.
            output: Tensor = result(*inputs)
            if output.requires_grad:
                sources = [tensor for tensor in (*result.parameters(), *inputs) if tensor.requires_grad]
                torch.autograd.grad(output.sum(), sources, allow_unused=True)
    except Exception as error:  # user code may raise anything
        reason = f"{how} cannot compile {type(module).__name__}: {_reason(error)}"
        raise ConfigError("dense.compile", reason, how) from error
    return result


def _compile(module: nn.Module, how: str, example: tuple[Tensor, ...]) -> nn.Module:
    if how in ("script", "trace"):
        with _torchscript, warnings.catch_warnings():
            # TorchScript is deprecated as a whole: by DeprecationWarning, from torch 2.15 by FutureWarning.
            for category in (DeprecationWarning, FutureWarning):
                warnings.filterwarnings("ignore", r"`torch\.jit\.", category)
            script: nn.Module = torch.jit.script(module) if how == "script" else _traced(module, example)
            return script
    for tensor in example:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    # With inductor's kernels that write in place, torch 2.11 computed wrong gradients of an MLP on an H200.
    options = {"inplace_buffers": False} if how == "inductor" else None
    # Modules of one class share a code object, and together would reach its limit of recompilations. In torch
    # 2.13, Module.compile() compiles nothing of a Sequential.
    return torch.compile(module, backend=how, options=options, isolate_recompiles=True)  # type: ignore[call-overload,no-any-return]


def _traced(module: nn.Module, example: tuple[Tensor, ...]) -> nn.Module:
    with warnings.catch_warnings(), restore_afterwards(module, example):
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        traces = [torch.jit.trace(module.train(mode), example, check_trace=False) for mode in (True, False)]
        training, evaluation = (_NUMBER_OF_CLASS.sub("", str(each.inlined_graph)) for each in traces)
        if training != evaluation:
            raise RuntimeError("it computes differently in training and in evaluation; take script")
    with warnings.catch_warnings():
        # A trace with a warning may be wrong for other inputs than the example.
        warnings.simplefilter("error", torch.jit.TracerWarning)
        result: nn.Module = torch.jit.trace(module, example)
    for inputs in (tuple(torch.cat([x, x]) for x in example), tuple(x[:0] for x in example)):
        output, expected = result(*inputs), module(*inputs)
        if output.shape != expected.shape or not torch.allclose(output, expected):
            raise RuntimeError("its trace has kept the example's number of samples; take script")
    return result


@contextmanager
def restore_afterwards(module: nn.Module, example: Sequence[Tensor]) -> Iterator[None]:
    """Restore buffers and modes of ``module``, and torch's generators, at the end of the block."""
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
    """Return the reason on one line, with the location in user code if torch reports it."""
    from torch._inductor.exc import InvalidCxxCompiler  # takes a second to import

    if isinstance(error.__context__, InvalidCxxCompiler):
        return "it needs a C++ compiler, which is missing; install g++, or take aot_eager"
    while isinstance(error, SystemError) and error.__cause__ is not None:
        error = error.__cause__  # a warning that became an error within C++
    text = str(error).strip()
    if isinstance(error, torch.jit.TracerWarning):
        return text.partition(". ")[0] + "; take script"
    # The interpreter of TorchScript names the error in its last line.
    reason = text.splitlines()[-1] if "TorchScript interpreter" in text else first_line(error)
    if not isinstance(error, RuntimeError | torch.jit.Error):
        reason = f"{type(error).__name__}: {reason}"
    location = _LOCATION.search(text)
    where = f" ({Path(location[1]).name}:{location[2]})" if location else ""
    return reason.rstrip(" :.") + where
