"""Calling modules at the same time, each in a thread that sees the caller's settings."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._utils import ExceptionWrapper

from hybrid.dense.data_parallel.scatter_gather import Device, find_tensors, resolve_device


def parallel_apply(
    modules: Sequence[nn.Module],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[dict[str, Any]] | None = None,
    devices: Sequence[Device] | None = None,
) -> list[Any]:
    """Call each module with its inputs, all at the same time.

    The threads take over from the caller whether autograd records and whether it is in inference mode,
    autocast, and the current stream of each CUDA device. A single module is called in the caller's thread.

    Args:
        inputs: for each module, a list or tuple of positional arguments, or else the only one.
        kwargs_tup: for each module, its keyword arguments.
        devices: on which each module computes; without it, that of its first tensor, or of a call
            without tensors the current CUDA device, if there is any, else the CPU.

    Returns:
        What each module returned.

    Raises:
        ValueError: the sequences differ in length.
        Exception: what the first failing module raised, with its traceback as a part of the message,
            after all have ended; a RuntimeError where such an exception cannot be made.
    """
    kwargs_tup = [{} for _ in modules] if kwargs_tup is None else kwargs_tup
    places = _find_devices(inputs) if devices is None else [resolve_device(device) for device in devices]
    for name, sequence in (("inputs", inputs), ("kwargs_tup", kwargs_tup), ("devices", places)):
        if len(sequence) != len(modules):
            raise ValueError(
                f"The number of modules {len(modules)} is not equal to the number of {name} {len(sequence)}"
            )
    calls = [
        partial(_call, _settings_of_caller(device), place, device, *call)
        for place, (device, *call) in enumerate(zip(places, modules, inputs, kwargs_tup, strict=True))
    ]
    if len(calls) == 1:
        results = [calls[0]()]
    else:
        with ThreadPoolExecutor(max(1, len(calls))) as threads:
            results = [thread.result() for thread in [threads.submit(call) for call in calls]]
    for result in results:
        if isinstance(result, ExceptionWrapper):
            result.reraise()
    return results


def _find_devices(inputs: Sequence[Any]) -> list[torch.device]:
    default = resolve_device("cuda" if torch.cuda.is_available() else "cpu")
    first_tensors = (next(find_tensors(each), None) for each in inputs)
    return [default if tensor is None else tensor.device for tensor in first_tensors]


def _settings_of_caller(device: torch.device) -> list[AbstractContextManager[object]]:
    """What torch keeps for each thread, as far as it changes what a module computes on ``device``.

    Another thread that enters all of them has the settings of this one.
    """
    settings: list[AbstractContextManager[object]] = [
        torch.inference_mode(torch.is_inference_mode_enabled()),
        torch.set_grad_enabled(torch.is_grad_enabled()),
    ]
    if device.type == "cuda":
        settings += [torch.cuda.device(device), torch.cuda.stream(torch.cuda.current_stream(device))]
    settings += [
        torch.autocast(
            kind,
            dtype=torch.get_autocast_dtype(kind),
            enabled=torch.is_autocast_enabled(kind),
            cache_enabled=torch.is_autocast_cache_enabled(),
        )
        for kind in (("cpu", "cuda") if torch.cuda.is_available() else ("cpu",))
    ]
    return settings


def _call(
    settings: Sequence[AbstractContextManager[object]],
    place: int,
    device: torch.device,
    module: nn.Module,
    inputs: Any,
    kwargs: dict[str, Any],
) -> Any:
    """The module's output, or its exception for the caller to raise."""
    try:
        with ExitStack() as stack:
            for setting in settings:
                stack.enter_context(setting)
            return module(*(inputs if isinstance(inputs, (list, tuple)) else (inputs,)), **kwargs)
    except Exception:
        name = device.type if device.index is None else device.index
        return ExceptionWrapper(where=f"in replica {place} on device {name}")
