"""Splitting inputs over devices and putting outputs together, in any nesting of containers.

Everything here is differentiable, twice too. Named tuples and subclasses of dict keep their types.
"""

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

Device: TypeAlias = int | str | torch.device


def resolve_device(device: Device) -> torch.device:
    """The device, with an index if it is a CUDA device.

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
    """Split each tensor of ``inputs`` along ``dim`` into pieces of almost equal size, one a device.

    There are fewer pieces than devices where there are fewer samples, and one where there are none. What
    is no tensor, and an empty container, goes to each device as it is.

    Returns:
        ``inputs`` for one device after another: as a tuple where they are a tensor, else as a list. A
        piece that stays on its device is a view, which must not be changed in place.

    Raises:
        ValueError: the tensors make different numbers of pieces.
    """
    targets = [resolve_device(device) for device in devices]
    pieces = _scatter(inputs, targets[: _num_pieces(inputs, len(targets), dim) or len(targets)], dim)
    return tuple(pieces) if isinstance(inputs, Tensor) else pieces


def scatter_kwargs(
    inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, devices: Sequence[Device], dim: int = 0
) -> tuple[tuple[tuple[Any, ...], ...], tuple[dict[str, Any], ...]]:
    """:func:`scatter` positional and keyword arguments.

    Returns:
        As many of both: where one has fewer pieces, or is missing, ``()`` or ``{}`` stand for it. None
        where both are missing.
    """
    targets = [resolve_device(device) for device in devices]
    most = len(targets)
    of_inputs, of_kwargs = (_num_pieces(arguments, most, dim) for arguments in (inputs, kwargs))
    # Arguments without tensors go wherever the others go.
    args_pieces = _scatter(inputs, targets[: of_inputs or of_kwargs or most], dim) if inputs else []
    kwargs_pieces = _scatter(kwargs, targets[: of_kwargs or of_inputs or most], dim) if kwargs else []
    num_pieces = max(len(args_pieces), len(kwargs_pieces))
    args_pieces += [()] * (num_pieces - len(args_pieces))
    kwargs_pieces += [{} for _ in range(num_pieces - len(kwargs_pieces))]
    return tuple(args_pieces), tuple(kwargs_pieces)


def gather(outputs: Sequence[Any], device: Device, dim: int = 0) -> Any:
    """Concatenate the tensors in the outputs of several devices along ``dim``, on one device.

    Tensors without dimensions become a vector, with a warning. None stays None.

    Args:
        outputs: of the same structure, one from each device.
        device: where to put them.

    Raises:
        ValueError: dicts differ in their number of keys, or sequences in their length.
        TypeError: something is neither a tensor, nor None, nor a container of them.
    """
    return _gather(outputs, resolve_device(device), dim)


def find_tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in any nesting of dicts, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from find_tensors(part)


def _num_pieces(inputs: Any, most: int, dim: int) -> int | None:
    """How many pieces the tensors make, one at least; None without tensors."""
    sizes = {tensor.size(dim) for tensor in find_tensors(inputs)}
    counts = {-(-size // _piece_size(size, most)) or 1 for size in sizes}
    if len(counts) > 1:
        raise ValueError(f"tensors of {sorted(sizes)} samples make different numbers of pieces for {most}")
    return counts.pop() if counts else None


def _piece_size(size: int, num_pieces: int) -> int:
    return max(1, -(-size // num_pieces))


def _scatter(inputs: Any, devices: Sequence[torch.device], dim: int) -> list[Any]:
    """``inputs`` for each device, of which there are as many as the tensors make pieces."""
    if isinstance(inputs, Tensor) and len(devices) == 1:
        return [inputs.to(devices[0])]
    if isinstance(inputs, Tensor):
        pieces = inputs.split(_piece_size(inputs.size(dim), len(devices)), dim)
        return [piece.to(device) for piece, device in zip(pieces, devices, strict=True)]
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
        return _concatenate([output.to(device) for output in outputs], dim)
    if isinstance(first, dict):
        if any(len(output) != len(first) for output in outputs):
            raise ValueError("All dicts must have the same number of keys")
        return _rebuild(first, [_gather([output[key] for output in outputs], device, dim) for key in first])
    if isinstance(first, (list, tuple)):
        return _rebuild(first, [_gather(parts, device, dim) for parts in zip(*outputs, strict=True)])
    raise TypeError(f"cannot gather a {type(first).__name__}; replicas must return tensors")


def _concatenate(tensors: Sequence[Tensor], dim: int) -> Tensor:
    if dim == 0 and all(tensor.dim() == 0 for tensor in tensors):
        warnings.warn(
            "Was asked to gather along dimension 0, but all input tensors were scalars; "
            "will instead unsqueeze and return a vector.",
            stacklevel=2,
        )
        return torch.stack(list(tensors))
    return torch.cat(list(tensors), dim)


def _rebuild(container: Any, values: Sequence[Any]) -> Any:
    """A container of the same type, and in dicts with the same keys, that holds ``values``."""
    if isinstance(container, dict):
        rebuilt = copy.copy(container)  # a defaultdict cannot be made from pairs
        for key, value in zip(container, values, strict=True):
            rebuilt[key] = value
        return rebuilt
    make: Callable[[Sequence[Any]], Any] = getattr(container, "_make", type(container))
    return make(values)
