"""Replicas of modules over other tensors than their own parameters and buffers."""

import sys
import threading
from collections.abc import Mapping
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)

# While torch.compile traces in one thread, it refuses compiled modules called in any other.
_compiled_calls = threading.RLock()


def shadow(module: M, tensors: Mapping[Tensor, Tensor]) -> M:
    """Return a replica of ``module`` over other tensors, with the same structure, code, settings and hooks.

    A substitute of a parameter may be the result of a computation. It is a plain attribute of an eager
    replica, which lists no parameter of that name. Several threads may call this at once, since ``module`` is
    only read.

    Args:
        module: eager, TorchScript, or from ``torch.compile``. All replicas share compiled code and run it one
            at a time.
        tensors: substitutes of parameters and buffers; the replica shares all others with ``module``.

    Raises:
        RuntimeError: a parameter has no shape yet, a TorchScript module contains Python modules, or a
            submodule was compiled in place, which binds its code to the original.
    """
    replica: M = _shadow(module, tensors, {})
    return replica


def _shadow(module: nn.Module, tensors: Mapping[Tensor, Tensor], done: dict[nn.Module, Any]) -> Any:
    if module not in done:
        # The import takes a second. If the module is not imported yet, nothing is compiled.
        eval_frame = sys.modules.get("torch._dynamo.eval_frame")
        is_compiled = eval_frame is not None and isinstance(module, eval_frame.OptimizedModule)
        done[module] = (_shadow_compiled if is_compiled else _shadow_plain)(module, tensors, done)
    return done[module]


def _shadow_plain(module: nn.Module, tensors: Mapping[Tensor, Tensor], done: dict[nn.Module, Any]) -> Any:
    if module.__dict__.get("_compiled_call_impl") is not None:
        name = type(module).__name__
        raise RuntimeError(f"{name}.compile() binds code to one module; replicas need torch.compile(module)")
    is_script = isinstance(module, torch.jit.ScriptModule)
    replica: Any = module._replicate_for_data_parallel()
    if not is_script:
        replica._parameters = {}  # which torch.fx modules would keep
    for name, child in module._modules.items():
        if child is None:
            continue
        if is_script and not isinstance(child, torch.jit.ScriptModule):
            raise RuntimeError("Cannot replicate network where python modules are children of ScriptModule")
        replica._modules[name] = _shadow(child, tensors, done)
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter in tensors:
            setattr(replica, name, tensors[parameter])
        elif not is_script:
            replica._parameters[name] = parameter
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer in tensors:
            setattr(replica, name, tensors[buffer])
    return replica


def _shadow_compiled(module: Any, tensors: Mapping[Tensor, Tensor], done: dict[nn.Module, Any]) -> Any:
    inside = _shadow(module._orig_mod, tensors, done)
    # A compiled module forwards assignments to the inner module: _replicate_for_data_parallel would remove
    # the parameters of the original. So this creates the replica as unpickling does.
    cls = module.__class__
    replica = cls.__new__(cls)
    replica.__setstate__(module.__getstate__() | {"_modules": {"_orig_mod": inside}})
    forward = replica.forward

    @wraps(forward)
    def locked_forward(*args: Any, **kwargs: Any) -> Any:
        with _compiled_calls:
            return forward(*args, **kwargs)

    replica.forward = locked_forward
    return replica
