"""Memory, hashes, errors and roles."""

import errno
import mmap
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from hybrid.errors import ConfigError
from hybrid.primitives.available_memory import available_memory_bytes
from hybrid.primitives.huge_pages import zeros_in_large_pages
from hybrid.primitives.key_hashes import next_random
from hybrid.topology import Role, RoleKind, Topology


@pytest.mark.parametrize("shape", [(5, 7), (300, 1025), (0, 4)])
def test_large_pages_hold_zeros_that_can_be_written(shape: tuple[int, ...]) -> None:
    tensor, other = (zeros_in_large_pages(shape, torch.float64) for _ in range(2))
    assert (tuple(tensor.shape), tensor.dtype) == (shape, torch.float64)
    assert not tensor.any()
    view = tensor.add_(2)[-1:]
    del tensor
    assert view.sum().item() == 2 * view.numel()
    assert not other.any()


def test_a_system_without_large_pages_gives_others(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(mmap.mmap):
        def madvise(self, *_args: int) -> None:
            refused.append(True)
            raise OSError(errno.EINVAL, "Invalid argument")

    refused: list[bool] = []
    monkeypatch.setattr(mmap, "mmap", Refusing)
    assert zeros_in_large_pages((2, 3), torch.float32).tolist() == [[0.0] * 3] * 2
    assert refused == [True]


V2 = "29 28 0:26 {top} /groups rw shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "34 31 0:31 / /cpu rw - cgroup cgroup rw,cpu\n35 31 0:32 {top} /groups rw - cgroup cgroup rw,memory\n"
    "41 31 0:38 / /unified rw - cgroup2 cgroup2 rw\n"
)
FILES = {V2: ("max", "current", ""), V1: ("limit_in_bytes", "usage_in_bytes", "total_")}


@pytest.mark.parametrize(
    ("mounts", "top", "path", "limits", "available"),
    [
        (V2, "/", "/", {}, 1000),
        (V2, "/", "/", {"": ("500", 300, 0)}, 200),
        (V2, "/", "/", {"": ("500", 490, 400)}, 410),  # the kernel drops cached files first
        (V2, "/", "/slurm/job/step", {"slurm/job": ("700", 300, 0), "slurm/job/step": ("max", 100, 0)}, 400),
        (V2, "/docker/7", "/docker/7/job", {"job": ("500", 400, 0)}, 100),
        (V2, "/..", "/", {"": ("500", 400, 0)}, 100),  # mounted before the process got a namespace
        (V2, "/", "/../other", {"": ("500", 400, 0)}, 100),  # moved to a group outside its namespace
        (V1, "/", "/", {"": (str(2**63 - 4096), 300, 0)}, 1000),
        (V1, "/", "/job/task", {"job": ("500", 300, 100), "job/task": ("900", 100, 0)}, 300),
        ("", "", "", {}, 1000),
    ],
)
def test_available_memory_is_that_of_host_and_control_groups(
    mounts: str, top: str, path: str, limits: dict[str, Any], available: int, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    assert 0 < available_memory_bytes() <= psutil.virtual_memory().total
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    if mounts:
        group = f"9:cpu:/else\n4:hugetlb,memory:{path}\n0::/\n" if mounts == V1 else f"0::{path}\n"
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(group)
        (tmp_path / "proc/self/mountinfo").write_text(mounts.format(top=top))
    for name, (most, used, cached) in limits.items():
        limit, usage, prefix = FILES[mounts]
        (folder := tmp_path / "groups" / name).mkdir(parents=True, exist_ok=True)
        (folder / f"memory.{limit}").write_text(f"{most}\n")
        (folder / f"memory.{usage}").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 7\n{prefix}inactive_file {cached}\n")
    assert available_memory_bytes(tmp_path) == available


def test_configuration_error_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(ConfigError("train.batch_size", "must be at least 1", 0)))
    assert type(error) is ConfigError
    assert (error.key, error.rule, error.value) == ("train.batch_size", "must be at least 1", 0)
    assert str(error) == "train.batch_size = 0: must be at least 1"
    assert str(ConfigError("data.path", "must not be empty")) == "data.path: must not be empty"


def test_ranks_are_master_trainers_workers() -> None:
    topology = Topology(2, 3)
    names = ["master", "trainer0", "trainer1", "worker0", "worker1", "worker2"]
    assert [role.rpc_name for role in topology.roles] == names
    assert [topology.rank(role) for role in topology.roles] == list(range(topology.world_size))
    with pytest.raises(ValueError, match="not in"):
        topology.rank(Role(RoleKind.TRAINER, 2))


def test_partners_of_each_role() -> None:
    topology = Topology(2, 1)
    partners = {str(role): ", ".join(map(str, topology.partners(role))) for role in topology.roles}
    assert partners == {
        "master": "master, trainer 0, trainer 1, worker 0",
        "trainer 0": "master, worker 0",
        "trainer 1": "master, worker 0",
        "worker 0": "master, trainer 0, trainer 1",
    }


def test_hash_does_not_change_its_argument() -> None:
    numbers = np.arange(3, dtype=np.uint64)
    assert (next_random(numbers) != numbers).all()
    assert numbers.tolist() == [0, 1, 2]
