"""Concurrent calls of modules, each in a thread with the settings of the caller."""

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
    """Call each module with its inputs, concurrently.

    The threads inherit grad mode, inference mode, autocast and the current CUDA streams of the caller. A
    single module is called in the thread of the caller.

    Args:
        inputs: for each module, a list or tuple of positional arguments, or a single argument.
        kwargs_tup: for each module, its keyword arguments.
        devices: the device of each module. By default it is the device of the first tensor among the inputs,
            or without tensors the current CUDA device, or the CPU.

    Returns:
        The output of each module.

    Raises:
        ValueError: the sequences differ in length.
        Exception: the exception of the first failing module, with its traceback in the message, after all
            calls have ended; a RuntimeError if its type cannot be constructed from a message.
    """
    kwargs_tup = [{} for _ in modules] if kwargs_tup is None else kwargs_tup
    if devices is None:
        default = resolve_device("cuda" if torch.cuda.is_available() else "cpu")
        first_tensors = [next(find_tensors(each), None) for each in inputs]
        devices = [default if tensor is None else tensor.device for tensor in first_tensors]
    targets = [resolve_device(device) for device in devices]
    for name, sequence in (("inputs", inputs), ("kwargs_tup", kwargs_tup), ("devices", targets)):
        if len(sequence) != len(modules):
            raise ValueError(
                f"The number of modules {len(modules)} is not equal to the number of {name} {len(sequence)}"
            )
    calls = [
        partial(_call, _settings_of_caller(device), index, device, *call)
        for index, (device, *call) in enumerate(zip(targets, modules, inputs, kwargs_tup, strict=True))
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


def _settings_of_caller(device: torch.device) -> list[AbstractContextManager[object]]:
    """Return context managers that give another thread the settings of this one, for ``device``."""
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
    index: int,
    device: torch.device,
    module: nn.Module,
    inputs: Any,
    kwargs: dict[str, Any],
) -> Any:
    """Return the output of the module, or its exception for the caller to raise."""
    try:
        with ExitStack() as stack:
            for setting in settings:
                stack.enter_context(setting)
            return module(*(inputs if isinstance(inputs, (list, tuple)) else (inputs,)), **kwargs)
    except Exception:
        name = device.type if device.index is None else device.index
        return ExceptionWrapper(where=f"in replica {index} on device {name}")
