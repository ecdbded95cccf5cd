"""Safetensors files: the library reads them, they are mapped, and training resumes from them."""

import hashlib
import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from hybrid.checkpoint.tensor_file import load_state, map_arrays, read_tensors, unpack_dense, write_tensors
from hybrid.errors import CheckpointError
from hybrid.storage import files

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
]


def assert_same(read: dict[str, Tensor], written: dict[str, Tensor]) -> None:
    assert read.keys() == written.keys()
    for name, tensor in written.items():
        assert read[name].dtype == tensor.dtype
        assert read[name].shape == tensor.shape
        flat = [t.detach().contiguous().reshape(-1) for t in (read[name], tensor)]
        raw = [t.unsqueeze(1).view(torch.uint8) for t in flat]  # one element may have any stride
        assert torch.equal(*raw), name


def test_the_library_reads_tensors_of_every_type_and_shape(tmp_path: Path) -> None:
    bits = torch.randint(0, 2, (240,), dtype=torch.uint8)
    tensors = {str(dtype): bits.view(dtype).reshape(-1, 3) for dtype in DTYPES}
    tensors |= {
        "large": torch.randn(1_400_000),  # several chunks
        "nothing": torch.empty(0, 7),
        "one": torch.tensor(3.5),
        **{f"{size} of a column": torch.randn(6, 5)[:size, 2] for size in (0, 1, 2, 6)},
        "turned": torch.randn(6, 5).t(),
        "parameter": torch.nn.Parameter(torch.randn(4)),
        'é 名 "quoted"': torch.ones(1, dtype=torch.bool),
    }
    files = write_tensors(tmp_path, "deep/all.safetensors", tensors)
    path = tmp_path / "deep/all.safetensors"
    assert_same(load_file(path), tensors)
    assert_same(read_tensors(path), tensors)
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    for name, entry in json.loads(content[8 : 8 + length]).items():
        assert (8 + length + entry["data_offsets"][0]) % tensors[name].itemsize == 0, f"{name} is not aligned"
    assert files == {"deep/all.safetensors": (len(content), hashlib.sha256(content).hexdigest())}


def test_mapped_arrays_equal_the_written_tensors_and_stay_valid(tmp_path: Path) -> None:
    tensors = {
        "rows": torch.randn(5, 3),
        "steps": torch.randn(5),
        "nothing": torch.empty(0, 7),
        "double": torch.randn(2, 3, dtype=torch.float64),
        "keys": torch.tensor([-(2**63), 2**63 - 1]),
    }
    write_tensors(tmp_path, "rows.safetensors", tensors)
    mapped = map_arrays(tmp_path / "rows.safetensors")
    assert_same({name: torch.from_numpy(array.copy()) for name, array in mapped.items()}, tensors)
    with pytest.raises(ValueError, match="read-only"):
        mapped["rows"][0] = 0.0


def test_an_unmappable_file_is_an_error_of_one_line(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    write_tensors(tmp_path, path.name, {"weight": torch.ones(3, dtype=torch.float16)})
    with pytest.raises(CheckpointError, match=f"^{path}: 'weight' .* F16"):
        map_arrays(path)
    for content in (b"", b"x" * 100, path.read_bytes()[:-1]):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=f"^{path}: .*$"):
            map_arrays(path)


FOUR_BYTES = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


def write_header(path: Path, header: object, length: int | None = None) -> Path:
    """A file with four bytes of data after a header that may be anything."""
    text = header.encode() if isinstance(header, str) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + bytes(4))
    return path


@pytest.mark.parametrize(
    "header",
    [
        *(100_000 * "[", 100_000 * '{"w":', "[1]", "", '{"w": NaN}', '{"__metadata__": {"a": 1}}'),
        {"w": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}},
        {"w": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}},
        {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
        {"w": {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 4]}},
        {"w": FOUR_BYTES, "none": {"dtype": "F32", "shape": [0, 2**63], "data_offsets": [4, 4]}},
        {"w": {"dtype": "F6_E2M3", "shape": [2, 2], "data_offsets": [0, 3]}},
        {"w": {"shape": [1], "data_offsets": [0, 4]}},
    ],
    ids=lambda header: str(header)[:60],
)
def test_an_invalid_header_is_an_error_of_one_line(tmp_path: Path, header: object) -> None:
    path = write_header(tmp_path / "t", header)
    for read in (map_arrays, read_tensors):
        with pytest.raises(CheckpointError) as caught:
            read(path)
        assert str(caught.value).startswith(f"{path}: cannot be read: ")
        assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("length", [(8 << 20) + 8, 2**63, 2**64 - 1])
def test_a_large_header_is_not_read(tmp_path: Path, length: int) -> None:
    path = write_header(tmp_path / "t", {}, length)
    with path.open("r+b") as file:
        file.truncate(99_000_000)
    for read in (map_arrays, read_tensors):
        with pytest.raises(CheckpointError, match=f"^{path}: .* 8 MiB"):
            read(path)


def test_an_unsupported_type_is_refused(tmp_path: Path) -> None:
    tensor = torch.empty(1, dtype=torch.complex128)
    with pytest.raises(CheckpointError, match=r"odd .* torch\.complex128"):
        write_tensors(tmp_path, "f", {"odd": tensor})
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_an_error_with_missing_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def open_full_disk(_: Path) -> Iterator[BinaryIO]:
        with open("/dev/full", "wb") as file:
            yield file

    monkeypatch.setattr(files, "open_writer", open_full_disk)
    with pytest.raises(CheckpointError, match=rf" {tmp_path / 'f'}: .* \([\d,]+ bytes.*$") as caught:
        write_tensors(tmp_path, "f", {"w": torch.zeros(3 << 20)})
    missing = int(str(caught.value).rpartition("(")[2].partition(" ")[0].replace(",", ""))
    assert (8 << 20) <= missing <= (12 << 20) + 100  # what is written at once may count as written


@pytest.mark.parametrize("name", ["optimizer.x.step", "optimizer.-1.step", "optimizer."])
def test_an_optimizer_state_without_a_parameter_is_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match=f"^'{name}'"):
        unpack_dense({name: torch.zeros(1)})


def test_a_state_of_another_net_is_an_error_of_one_line(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"^{tmp_path}: .*size mismatch.*$"):
        load_state(nn.Linear(4, 6), nn.Linear(4, 5).state_dict(), tmp_path)
