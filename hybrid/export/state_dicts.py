"""Tensors of other programs: state dicts of ``torch.save``, and safetensors.

Both are memory-mapped and read block by block. Only tensors and plain containers are unpickled
(``weights_only``).
"""

import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hybrid.embedding.pretrained_by_position import StoredTensor
from hybrid.errors import DataError, StorageError, first_line
from hybrid.storage.files import local_copy
from hybrid.storage.remote_path import StoragePath


@contextmanager
def stored_tensors(path: StoragePath) -> Iterator[dict[str, StoredTensor]]:
    """Open a file; yield its tensors by name. The keys of nested dicts are joined by dots.

    Raises:
        DataError: the file cannot be read, or holds other objects than tensors.
        StorageError: the store refuses.
    """
    try:
        with local_copy(path) as local_path:
            if path.suffix == ".safetensors":
                with safe_open(local_path, framework="pt") as file:
                    yield {name: StoredTensor.of_safetensors(file, name) for name in file.keys()}  # noqa: SIM118
            else:
                # torch maps files that are given by path only.
                state = torch.load(str(local_path), map_location="cpu", mmap=True, weights_only=True)
                yield {name: _of_torch(tensor) for name, tensor in _flatten("", state)}
    except StorageError:
        raise
    except pickle.UnpicklingError as error:
        rule = "save a state_dict() of plain tensors, by torch.save or as safetensors"
        raise DataError(f"{path}: holds more than tensors, which is not unpickled; {rule}") from error
    except (OSError, SafetensorError, RuntimeError, ValueError, LookupError) as error:
        raise DataError(
            f"{path}: cannot be read as a state dict or safetensors: {first_line(error)}"
        ) from error


def _of_torch(tensor: Tensor) -> StoredTensor:
    return StoredTensor(tuple(tensor.shape), lambda start, stop: tensor[start:stop])


def _flatten(prefix: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in nested dicts; skip other values, such as the number of an epoch."""
    if isinstance(value, Tensor):
        yield prefix, value.detach()
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flatten(f"{prefix}.{key}" if prefix else str(key), inner)
