"""Replicas of modules over other tensors than their own parameters and buffers."""

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)


def shadow(module: M, tensors: Mapping[Tensor, Tensor]) -> M:
    """Return a replica of ``module`` over other tensors, with the same structure, code, settings and hooks.

    A substitute of a parameter may be the result of a computation. It is a plain attribute of an eager
    replica, which lists no parameter of that name. Several threads may call this at once, since ``module`` is
    only read.

    Args:
        module: eager or TorchScript.
        tensors: substitutes of parameters and buffers; the replica shares all others with ``module``.

    Raises:
        RuntimeError: a parameter has no shape yet, a TorchScript module contains Python modules, or a
            submodule is compiled by ``torch.compile``, which binds its code to the original.
    """
    replica: M = _shadow(module, tensors, {})
    return replica


def _shadow(module: nn.Module, tensors: Mapping[Tensor, Tensor], done: dict[nn.Module, Any]) -> Any:
    if module in done:
        return done[module]
    if module.__dict__.get("_compiled_call_impl") is not None or "_orig_mod" in module._modules:
        name = type(module._modules.get("_orig_mod", module)).__name__
        raise RuntimeError(f"{name} is compiled, which binds its code to one module; replicas need it eager")
    is_script = isinstance(module, torch.jit.ScriptModule)
    replica: Any = module._replicate_for_data_parallel()
    done[module] = replica
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
