"""Tensors of checkpoints: safetensors files, and the state of a dense net as named tensors.

Files are written without a copy of the tensors and read by mapping them into memory. The format
(https://github.com/huggingface/safetensors#format)::

    8 bytes       length of the header, little-endian
    the header    JSON: name -> {"dtype", "shape", "data_offsets": [start, end]}
    the rest      the tensors' bytes, one after another
"""

import hashlib
import json
import mmap
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from hybrid.checkpoint.checkpoint_folders import Files, damage_error, to_checkpoint_error
from hybrid.errors import CheckpointError, first_line
from hybrid.storage import files as storage
from hybrid.storage.file_formats import parse_json
from hybrid.storage.private_files import make_folder
from hybrid.storage.remote_path import StoragePath

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
# The types of rows, optimizer state and keys. NumPy has no bfloat16; see ``bfloat16_arrays.py``.
_ARRAY_TYPES: dict[str, npt.DTypeLike] = {"F64": np.float64, "F32": np.float32, "I64": np.int64, "BF16": "V2"}
# The header of a thousand tensors has 100 kB. safetensors accepts 100 MB, which need gigabytes of memory.
_MAX_HEADER_BYTES = 8 << 20
_CHUNK_BYTES = 4 << 20  # fits into the CPU cache, for hashing
_ALIGNMENT = 8
_LENGTH_BYTES = 8


def write_tensors(folder: StoragePath, name: str, tensors: Mapping[str, Tensor]) -> Files:
    """Write and flush named tensors as one file of a checkpoint; return its entry for the manifest.

    Tensors must be on the CPU. Tensors that are not contiguous are copied one at a time.
    Raise CheckpointError if the file cannot be written, or the format lacks the type of a tensor.
    """
    path = folder / name
    # Wide types first, so that each tensor is aligned when the file is mapped into memory.
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0])))
    entries: dict[str, Mapping[str, object]] = {}
    start = 0
    if (problem := find_unstorable(ordered)) is not None:
        raise CheckpointError(f"cannot write {path}: {problem}")
    for tensor_name, tensor in ordered.items():
        offsets = [start, start + tensor.nbytes]
        kind = _DTYPES[tensor.dtype]
        entries[tensor_name] = {"dtype": kind, "shape": [*tensor.shape], "data_offsets": offsets}
        start += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    header = struct.pack("<Q", len(text)) + text
    size = len(header) + start
    digest, written = hashlib.sha256(), 0
    try:
        make_folder(path.parent)
        with storage.open_writer(path) as file:
            for chunk in _chunks(header, ordered):
                file.write(chunk)
                digest.update(chunk)
                written += len(chunk)
    except OSError as error:
        raise to_checkpoint_error(path, error, size - written) from error
    return {name: (size, digest.hexdigest())}


def find_unstorable(state: Mapping[str, Any]) -> str | None:
    """Return a message that names the first value that a checkpoint cannot store; None if there is none."""
    for name, value in state.items():
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        if kind not in _DTYPES:
            rule = "checkpoints store only real tensors, also from get_extra_state()"
            return f"the state {name} is of type {kind}; {rule}"
    return None


def map_arrays(
    path: StoragePath, sha256: str | None = None, root: StoragePath | None = None
) -> dict[str, npt.NDArray[Any]]:
    """Map the named tensors of a file into memory, read-only; pages are read on access.

    The mapping of safetensors is not used, since it reserves memory for the whole file.

    Args:
        sha256: the checksum of the file, checked only if the file comes from an object store.
        root: folder that contains a local file; symbolic links between this folder and the file are refused.

    Raises:
        CheckpointError: the file cannot be read, or a tensor has a type that tables do not have.
        StorageError: the store is down or refuses a request, or a path is a symbolic link.
    """
    with _opened(path, sha256, root) as local:
        text = read_header(local)
        with safe_open(local, framework="numpy"):  # checks the header
            pass
        header: dict[str, dict[str, Any]] = parse_json(text)
        # As a plain array: each operation on a numpy.memmap would create another memmap.
        file_bytes = np.asarray(np.memmap(local, np.uint8, "r"))
        content = file_bytes[_LENGTH_BYTES + len(text) :]
        header.pop("__metadata__", None)  # written by other tools
        arrays = {}
        for name, entry in header.items():
            if (dtype := entry["dtype"]) not in _ARRAY_TYPES:
                types = " or ".join(_ARRAY_TYPES)
                raise CheckpointError(f"{path}: {name!r} is of type {dtype}, not {types}")
            first, last = entry["data_offsets"]
            arrays[name] = content[first:last].view(_ARRAY_TYPES[dtype]).reshape(entry["shape"])
        return arrays


def release_pages(array: npt.NDArray[Any]) -> None:
    """Drop the whole file of a mapped array from resident memory; later reads load the pages again."""
    _advise(array, mmap.MADV_DONTNEED)


def expect_random_reads(array: npt.NDArray[Any]) -> None:
    """Advise the system not to read ahead in the file of a mapped array, since only some rows are used."""
    _advise(array, mmap.MADV_RANDOM)


def _advise(array: npt.NDArray[Any], advice: int) -> None:
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, mmap.mmap):
        base.madvise(advice)


def read_tensors(
    path: StoragePath, sha256: str | None = None, root: StoragePath | None = None
) -> dict[str, Tensor]:
    """Read the tensors of a file by name; like :func:`map_arrays`, but tensors may have any type."""
    with _opened(path, sha256, root) as local:
        read_header(local)  # checks its length
        return load_file(local)


def read_header(local: Path) -> bytes:
    """Return the JSON header of a local file, without its length.

    Raise ValueError if the file has fewer than 8 bytes, or the header is too long.
    """
    with open(local, "rb") as file:
        start = file.read(_LENGTH_BYTES)
        if len(start) < _LENGTH_BYTES:
            raise ValueError("the file is too short")
        (length,) = struct.unpack("<Q", start)
        if length > _MAX_HEADER_BYTES:
            raise ValueError(f"the header has more than {_MAX_HEADER_BYTES >> 20} MiB")
        return file.read(length)


@contextmanager
def _opened(path: StoragePath, sha256: str | None, root: StoragePath | None) -> Iterator[Path]:
    try:
        with storage.local_copy(path, sha256, root=root) as local:
            try:
                yield local
            except CheckpointError:
                raise
            except Exception as error:  # mostly SafetensorError; invalid headers cause other exceptions
                raise CheckpointError(f"{path}: cannot be read: {first_line(error)}") from error
    except (FileNotFoundError, ValueError) as error:
        raise damage_error(path) from error


def _chunks(header: bytes, tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    yield header
    for tensor in tensors.values():
        # A contiguous tensor of at most one element may have any last stride; a new dimension has stride 1.
        column = tensor.detach().contiguous().reshape(-1).unsqueeze(1)
        content = column.view(torch.uint8).reshape(-1).numpy().data
        for start in range(0, len(content), _CHUNK_BYTES):
            yield content[start : start + _CHUNK_BYTES]


def pack_dense(net: Mapping[str, Tensor], state: Mapping[int, Mapping[str, Any]]) -> dict[str, Tensor]:
    """Copy a dense net's state dict and its optimizer state to the CPU, as one dict.

    The names are ``net.NAME``, and ``optimizer.INDEX.KEY`` with the index of a parameter; None is left out.
    """
    tensors = {f"net.{name}": tensor for name, tensor in net.items()}
    for index, values in state.items():
        for key, value in values.items():
            if value is not None:
                tensors[f"optimizer.{index}.{key}"] = torch.as_tensor(value)
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def unpack_dense(packed: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[int, dict[str, Tensor]]]:
    """Return state dict and optimizer state that :func:`pack_dense` packed; CheckpointError if invalid."""
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
    """Load a state dict, read from ``folder``, into a module; CheckpointError if names or shapes differ."""
    try:
        module.load_state_dict(dict(state))
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{folder}: is of another model: {reason}") from error
