"""Scattering of inputs over devices, and gathering of outputs, in any nesting of containers.

All functions are twice differentiable. Named tuples and subclasses of dict keep their types.
"""

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

Device: TypeAlias = int | str | torch.device


def resolve_device(device: Device) -> torch.device:
    """Return the device, with an index if it is a CUDA device.

    Args:
        device: ``cuda`` is the current CUDA device, an integer the CUDA device of this index, -1 the CPU.

    Raises:
        ValueError: it is a CUDA device that this machine does not have.
    """
    if isinstance(device, int):
        resolved = torch.device("cpu") if device == -1 else torch.device("cuda", device)
    else:
        resolved = torch.device(device)
    if resolved.type != "cuda":
        return torch.device("cpu") if resolved.type == "cpu" else resolved
    num_devices = torch.cuda.device_count()
    if (resolved.index or 0) >= num_devices:
        raise ValueError(f"there is no device {resolved}: this machine has {num_devices} CUDA device(s)")
    return torch.device("cuda", torch.cuda.current_device()) if resolved.index is None else resolved


def scatter(inputs: Any, devices: Sequence[Device], dim: int = 0) -> Sequence[Any]:
    """Split each tensor of ``inputs`` along ``dim`` into chunks of almost equal size, one per device.

    With fewer samples than devices there are fewer chunks; without samples there is one. Other values and
    empty containers go to each device unchanged.

    Returns:
        The inputs of each device: a tuple if ``inputs`` is a tensor, else a list. A chunk that stays on its
        device is a view, which must not be changed in place.

    Raises:
        ValueError: the tensors have different numbers of chunks.
    """
    targets = [resolve_device(device) for device in devices]
    chunks = _scatter(inputs, targets[: _num_chunks(inputs, len(targets), dim) or len(targets)], dim)
    return tuple(chunks) if isinstance(inputs, Tensor) else chunks


def scatter_kwargs(
    inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, devices: Sequence[Device], dim: int = 0
) -> tuple[tuple[tuple[Any, ...], ...], tuple[dict[str, Any], ...]]:
    """:func:`scatter` positional and keyword arguments.

    Returns:
        Equally many positional and keyword arguments, padded with ``()`` and ``{}``; none if both are
        missing.
    """
    targets = [resolve_device(device) for device in devices]
    most = len(targets)
    of_inputs, of_kwargs = (_num_chunks(arguments, most, dim) for arguments in (inputs, kwargs))
    # Arguments without tensors are repeated for the chunks of the others.
    args_chunks = _scatter(inputs, targets[: of_inputs or of_kwargs or most], dim) if inputs else []
    kwargs_chunks = _scatter(kwargs, targets[: of_kwargs or of_inputs or most], dim) if kwargs else []
    num_chunks = max(len(args_chunks), len(kwargs_chunks))
    args_chunks += [()] * (num_chunks - len(args_chunks))
    kwargs_chunks += [{} for _ in range(num_chunks - len(kwargs_chunks))]
    return tuple(args_chunks), tuple(kwargs_chunks)


def gather(outputs: Sequence[Any], device: Device, dim: int = 0) -> Any:
    """Concatenate the outputs of several devices along ``dim``, on one device.

    Scalars become a vector, with a warning. None stays None.

    Args:
        outputs: one per device, of the same structure.
        device: the device of the result.

    Raises:
        ValueError: dicts differ in their number of keys, or sequences in their length.
        TypeError: something is neither a tensor, nor None, nor a container of them.
    """
    return _gather(outputs, resolve_device(device), dim)


def find_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in any nesting of dicts, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from find_tensors(part)


def _num_chunks(inputs: Any, most: int, dim: int) -> int | None:
    """Return the number of chunks of the tensors, at least 1; None without tensors."""
    sizes = {tensor.size(dim) for tensor in find_tensors(inputs)}
    counts = {-(-size // _chunk_size(size, most)) or 1 for size in sizes}
    if len(counts) > 1:
        raise ValueError(f"tensors of {sorted(sizes)} samples have different numbers of chunks for {most}")
    return counts.pop() if counts else None


def _chunk_size(size: int, num_chunks: int) -> int:
    return max(1, -(-size // num_chunks))


def _scatter(inputs: Any, devices: Sequence[torch.device], dim: int) -> list[Any]:
    """Return ``inputs`` for each device; there are as many devices as chunks."""
    if isinstance(inputs, Tensor) and len(devices) == 1:
        return [inputs.to(devices[0])]
    if isinstance(inputs, Tensor):
        chunks = inputs.split(_chunk_size(inputs.size(dim), len(devices)), dim)
        return [chunk.to(device) for chunk, device in zip(chunks, devices, strict=True)]
    if isinstance(inputs, (dict, list, tuple)) and len(inputs):
        values = inputs.values() if isinstance(inputs, dict) else inputs
        parts = zip(*(_scatter(value, devices, dim) for value in values), strict=True)
        return [_rebuild(inputs, part) for part in parts]
    return [inputs] * len(devices)


def _gather(outputs: Sequence[Any], device: torch.device, dim: int) -> Any:
    first = outputs[0]
    if first is None:
        return None
    if isinstance(first, Tensor):
        tensors = [output.to(device) for output in outputs]
        if dim == 0 and all(tensor.dim() == 0 for tensor in tensors):
            warnings.warn(
                "Was asked to gather along dimension 0, but all input tensors were scalars; "
                "will instead unsqueeze and return a vector.",
                stacklevel=2,
            )
            return torch.stack(tensors)
        return torch.cat(tensors, dim)
    if isinstance(first, dict):
        if any(len(output) != len(first) for output in outputs):
            raise ValueError("All dicts must have the same number of keys")
        return _rebuild(first, [_gather([output[key] for output in outputs], device, dim) for key in first])
    if isinstance(first, (list, tuple)):
        return _rebuild(first, [_gather(parts, device, dim) for parts in zip(*outputs, strict=True)])
    raise TypeError(f"cannot gather a {type(first).__name__}; replicas must return tensors")


def _rebuild(container: Any, values: Sequence[Any]) -> Any:
    """Return a container of the same type, and for dicts with the same keys, that holds ``values``."""
    if isinstance(container, dict):
        rebuilt = copy.copy(container)  # a defaultdict cannot be created from pairs
        for key, value in zip(container, values, strict=True):
            rebuilt[key] = value
        return rebuilt
    make: Callable[[Sequence[Any]], Any] = getattr(container, "_make", type(container))
    return make(values)
