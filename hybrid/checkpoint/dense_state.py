"""The state of a dense net and its optimizer as one flat dict of tensors, as checkpoints store it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hybrid.errors import CheckpointError
from hybrid.storage.remote_path import StoragePath


def pack_dense(net: Mapping[str, Tensor], state: Mapping[int, Mapping[str, Any]]) -> dict[str, Tensor]:
    """Copy a net's state dict and its optimizer's ``state`` into one flat dict, on the CPU."""
    packed = {f"net.{name}": _copy(tensor) for name, tensor in net.items()}
    for index, values in state.items():
        for key, value in values.items():
            if value is not None:
                packed[f"optimizer.{index}.{key}"] = _copy(torch.as_tensor(value))
    return packed


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def unpack_dense(packed: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[int, dict[str, Tensor]]]:
    """Return the state dict and the optimizer's ``state`` that :func:`pack_dense` has packed."""
    net = {name.removeprefix("net."): t for name, t in packed.items() if name.startswith("net.")}
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in packed.items():
        if name.startswith("optimizer."):
            parameter, _, key = name.removeprefix("optimizer.").partition(".")
            if not (parameter.isascii() and parameter.isdecimal()):
                raise CheckpointError(f"{name!r} is not the state of an optimizer")
            state.setdefault(int(parameter), {})[key] = tensor
    return net, state


def load_state(module: nn.Module, state: Mapping[str, Tensor], folder: StoragePath) -> None:
    """Load a module's state dict; CheckpointError if names or shapes differ."""
    try:
        module.load_state_dict(dict(state))
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{folder}: is of another model: {reason}") from error
