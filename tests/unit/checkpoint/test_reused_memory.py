"""The memory in which copies of tables lie until they are written: kept for the next, never in the way."""

import math
import mmap
import re
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.shards import cluster, specs

from hybrid.checkpoint.reused_buffers import ReusedBuffers
from hybrid.embedding.worker.table_shards import TableShards
from hybrid.errors import CheckpointError

LARGE = (1 << 20, 4)  # 16 MiB


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3,), (300, 1025), (0, 4)])
def test_a_copy_has_the_bits_and_shares_nothing(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    memory = ReusedBuffers()
    for value in (1.5, 2.5):
        tensor = torch.full(shape, value, dtype=dtype)
        copy = memory.copy(tensor)
        tensor.zero_()
        assert (tuple(copy.shape), copy.dtype) == (shape, dtype)
        assert copy.sum(dtype=torch.float64).item() == value * math.prod(shape)
        del copy


def test_the_memory_of_a_copy_that_nobody_has_is_used_for_the_next_of_its_size() -> None:
    memory = ReusedBuffers()
    copy = memory.copy(torch.ones(LARGE))
    place = copy.data_ptr()
    del copy
    other = memory.copy(torch.ones(8))
    assert other.data_ptr() != place
    assert memory.copy(torch.ones(LARGE)).data_ptr() == place


def test_it_is_not_as_long_as_any_part_of_the_copy_is_used() -> None:
    memory = ReusedBuffers()
    part = memory.copy(torch.ones(LARGE))[7:9]
    content = part.numpy().data
    del part
    memory.copy(torch.zeros(LARGE))
    assert bytes(content) == torch.ones(2, 4).numpy().tobytes()


def test_two_copies_at_a_time_lie_in_two_places() -> None:
    memory = ReusedBuffers()
    first = memory.copy(torch.ones(LARGE))
    second = memory.copy(torch.zeros(LARGE))
    assert first.all()
    assert not second.any()
    places = {first.data_ptr(), second.data_ptr()}
    del first, second
    third, fourth = memory.copy(torch.ones(LARGE)), memory.copy(torch.ones(LARGE))
    assert {third.data_ptr(), fourth.data_ptr()} == places


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_meanwhile_the_system_may_take_it_away() -> None:
    def free_bytes() -> int:
        rollup = Path("/proc/self/smaps_rollup").read_text()
        return int(re.findall(r"^LazyFree: +(\d+) kB", rollup, re.MULTILINE)[0]) << 10

    memory = ReusedBuffers()
    before = free_bytes()
    copy = memory.copy(torch.ones(LARGE))
    assert free_bytes() <= before
    size = copy.nbytes
    del copy
    assert free_bytes() - before > 0.9 * size
    assert memory.copy(torch.ones(LARGE)).all()


@pytest.mark.parametrize("knows", [True, False], ids=["refuses", "does not know of it"])
def test_a_system_that_cannot_take_it_leaves_it(knows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(mmap.mmap):
        def madvise(self, *_args: int) -> None:
            raise OSError("Invalid argument")

    monkeypatch.setattr("hybrid.checkpoint.reused_buffers.mmap.mmap", Refusing)
    if not knows:
        monkeypatch.delattr("hybrid.checkpoint.reused_buffers.mmap.MADV_FREE", raising=False)
    memory = ReusedBuffers()
    place = memory.copy(torch.ones(LARGE)).data_ptr()
    assert memory.copy(torch.ones(LARGE)).data_ptr() == place


def places_held(host: TableShards) -> set[int]:
    return {tensor.data_ptr() for of_file in host._held.values() for tensor in of_file.values()}


def test_checkpoints_of_a_worker_are_copied_to_one_place_and_each_is_of_its_moment(
    stack: ExitStack, tmp_path: Path
) -> None:
    each = cluster(stack, specs(), 1)
    (host,) = each.hosts.values()
    places, wholes = [], []
    for step in range(3):
        each.train(2 * step, 1)
        host.begin_save(is_copied=True)
        now = host.groups[0].files(is_copied=False)
        wholes.append({file: {n: t.clone() for n, t in of_file.items()} for file, of_file in now.items()})
        places.append(places_held(host))
        each.train(2 * step + 1, 1)
        if step != 1:  # that checkpoint is given up before anybody writes it
            host.write(tmp_path / f"{step}")
    assert places[0] == places[1] == places[2]
    for step in (0, 2):
        for file, tensors in wholes[step].items():
            stored = load_file(tmp_path / f"{step}" / file)
            assert stored.keys() == tensors.keys()
            assert all(torch.equal(stored[name], tensor) for name, tensor in tensors.items())


def test_one_that_cannot_be_written_leaves_its_place_to_the_next(stack: ExitStack, tmp_path: Path) -> None:
    (host,) = cluster(stack, specs(), 1).hosts.values()
    host.begin_save(is_copied=True)
    places = places_held(host)
    no_folder = tmp_path / "file"
    no_folder.touch()
    with pytest.raises(CheckpointError):
        host.write(no_folder)
    host.begin_save(is_copied=True)
    assert places_held(host) == places
