"""Tensors of other programs: state dicts that ``torch.save`` has written, and safetensors.

Both are mapped into memory, and read where they are asked for. Of a state dict nothing but tensors and plain
containers is unpickled (``weights_only``).
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
    """The tensors of a file by name; one within dicts has their names before its own, with dots between.

    Raises:
        DataError: it cannot be read, or holds other things than tensors.
        StorageError: its store refuses.
    """
    try:
        with local_copy(path) as here:
            if path.suffix == ".safetensors":
                with safe_open(here, framework="pt") as file:
                    yield {name: StoredTensor.of_safetensors(file, name) for name in file.keys()}  # noqa: SIM118
            else:
                # A path: of an open file torch maps nothing.
                loaded = torch.load(str(here), map_location="cpu", mmap=True, weights_only=True)
                found = dict(_flat("", loaded))
                yield {name: _of_torch(tensor) for name, tensor in found.items()}
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


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors in nested dicts; what else there is, such as the number of an epoch, is left out."""
    if isinstance(value, Tensor):
        yield prefix, value.detach()
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(f"{prefix}.{key}" if prefix else str(key), inner)
