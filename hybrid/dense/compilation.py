"""Stages in compiled form: TorchScript, or what ``torch.compile`` makes of them."""

import re
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from hybrid.errors import ConfigError, first_line

# TorchScript keeps the classes that it makes in one table: two threads at once redefine each other's.
_torchscript = threading.Lock()
_LOCATION = re.compile(r'File "(.+)", line (\d+)')
_NUMBER_OF_CLASS = re.compile(r"\.___torch_mangle_\d+")


class _CannotCompile(Exception):
    """A module cannot take a form, for a reason that torch itself does not see."""


def compiled(module: nn.Module, how: str, example: Sequence[Tensor]) -> nn.Module:
    """Another form of ``module``, which computes the same with the same parameters and buffers.

    Parameters and buffers of the result are those of ``module``, not copies. ``script`` and ``trace``
    also keep their names; ``inductor`` and ``aot_eager`` put a prefix before them. The result has been
    run forward and backward when it is returned. It is to be made before DDP wraps it: around DDP,
    ``torch.compile`` captures nothing under distributed autograd.

    Args:
        module: its inputs, and its only output, are tensors of one row a sample.
        how: one of :data:`hybrid.config.sections.COMPILERS`.
        example: what ``module`` is called with in training, of two samples or more; those inputs that
            get a gradient must require one. Other numbers of samples, none too, are taken as well.

    Raises:
        ConfigError: ``module`` cannot be compiled like this; ``dense.compile`` says how.
    """
    inputs = tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in example)
    try:
        with undisturbed(module, inputs):
            form = _compile(module, how, inputs)
            _run(form, inputs)
    except Exception as error:  # the module may be the user's own, and raise anything
        reason = f"{how} cannot compile {type(module).__name__}: {_reason(error)}"
        raise ConfigError("dense.compile", reason, how) from error
    return form


def _compile(module: nn.Module, how: str, example: tuple[Tensor, ...]) -> nn.Module:
    form: nn.Module
    if how in ("script", "trace"):
        with _torchscript, warnings.catch_warnings():
            # TorchScript is deprecated as a whole: by DeprecationWarning, from torch 2.15 by FutureWarning.
            for category in (DeprecationWarning, FutureWarning):
                warnings.filterwarnings("ignore", r"`torch\.jit\.", category)
            form = torch.jit.script(module) if how == "script" else _traced(module, example)
            return form
    for tensor in example:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    # Modules of torch's own share one code object: together they would soon reach its limit, after which
    # nothing is compiled any more. Module.compile() is no choice: of a Sequential it compiles nothing.
    form = torch.compile(module, backend=how, isolate_recompiles=True)  # type: ignore[call-overload]
    return form


def _traced(module: nn.Module, example: tuple[Tensor, ...]) -> nn.Module:
    with warnings.catch_warnings(), undisturbed(module, example):
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        if _graph(module, example, training=True) != _graph(module, example, training=False):
            raise _CannotCompile("it computes differently in training and in evaluation; take script")
    with warnings.catch_warnings():
        # What torch warns of is right for the example and may be wrong for other inputs.
        warnings.simplefilter("error", torch.jit.TracerWarning)
        form: nn.Module = torch.jit.trace(module, example)
    for inputs in (tuple(torch.cat([x, x]) for x in example), tuple(x[:0] for x in example)):
        output, expected = form(*inputs), module(*inputs)
        if output.shape != expected.shape or not torch.allclose(output, expected):
            raise _CannotCompile("its trace has kept the example's number of samples; take script")
    return form


def _graph(module: nn.Module, example: tuple[Tensor, ...], training: bool) -> str:
    """The operations of a pass in one mode."""
    traced = torch.jit.trace(module.train(training), example, check_trace=False)
    return _NUMBER_OF_CLASS.sub("", str(traced.inlined_graph))


def _run(form: nn.Module, example: tuple[Tensor, ...]) -> None:
    """One pass forward and backward.

    ``torch.compile`` compiles only when it is called. TorchScript observes the first pass and rounds
    differently from the second one on; training would not go on from a checkpoint bit for bit.
    """
    output: Tensor = form(*example)
    if output.requires_grad:
        sources = [tensor for tensor in (*form.parameters(), *example) if tensor.requires_grad]
        torch.autograd.grad(output.sum(), sources, allow_unused=True)


@contextmanager
def undisturbed(module: nn.Module, example: Sequence[Tensor]) -> Iterator[None]:
    """After this, buffers and modes of ``module`` and torch's random numbers are what they were."""
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
    """Why it cannot be, on one line, and where in the user's code if torch says it."""
    from torch._inductor.exc import InvalidCxxCompiler  # takes a second, which only DDP needs otherwise

    if isinstance(error.__context__, InvalidCxxCompiler):
        return "it needs a C++ compiler, and there is none here; install g++, or take aot_eager"
    while isinstance(error, SystemError) and error.__cause__ is not None:
        error = error.__cause__  # a warning that was made an error within C++
    text = str(error).strip()
    if isinstance(error, torch.jit.TracerWarning):
        return text.partition(". ")[0] + "; take script"
    # The interpreter of TorchScript says first that something went wrong, and last what.
    words = text.splitlines()[-1] if "TorchScript interpreter" in text else first_line(error)
    if not isinstance(error, RuntimeError | torch.jit.Error | _CannotCompile):
        words = f"{type(error).__name__}: {words}"
    location = _LOCATION.search(text)
    where = f" ({Path(location[1]).name}:{location[2]})" if location else ""
    return words.rstrip(" :.") + where
