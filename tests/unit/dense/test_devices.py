"""Devices of trainers, and the backend of their process group."""

import pytest
import torch
import torch.distributed as dist

from hybrid.config import ClusterSection, DenseSection, RunConfig
from hybrid.dense.devices import choose_backend, choose_devices, describe_device
from hybrid.errors import ConfigError


@pytest.fixture
def num_gpus(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> int:
    count: int = request.param
    for name in ("LOCAL_RANK", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    kind = torch.device("cuda") if count else None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: kind)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    return count


@pytest.mark.parametrize(
    ("num_gpus", "setting", "trainer", "variable", "device"),
    [
        (0, "auto", 0, "", "cpu"),
        (0, "cpu", 0, "", "cpu"),
        (2, "cpu", 0, "", "cpu"),
        (2, "auto", 0, "", "cuda:0"),
        (2, "auto", 3, "", "cuda:1"),
        (2, "cuda", 1, "", "cuda:1"),
        (2, "cuda:1", 0, "", "cuda:1"),
        (4, "auto", 9, "LOCAL_RANK", "cuda:2"),
        (4, "auto", 9, "SLURM_LOCALID", "cuda:2"),
    ],
    indirect=["num_gpus"],
)
def test_device_of_each_setting(
    num_gpus: int, setting: str, trainer: int, variable: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable:
        monkeypatch.setenv(variable, "2")
    assert choose_devices(DenseSection(device=setting), trainer) == [torch.device(device)]


@pytest.mark.parametrize(
    ("num_gpus", "setting", "choices"),
    [(0, "cuda", "cpu"), (0, "cuda:0", "cpu"), (2, "cuda:2", "cpu or cuda:0 or cuda:1")],
    indirect=["num_gpus"],
)
def test_invalid_device_raises_an_error(num_gpus: int, setting: str, choices: str) -> None:
    with pytest.raises(ConfigError, match=rf"^dense\.device = '{setting}': .* {choices} on"):
        choose_devices(DenseSection(device=setting), 0)


@pytest.mark.parametrize(
    ("devices", "backend"),
    [
        (["cuda a"], "cpu:gloo,cuda:nccl"),
        (["cuda a", "cuda b"], "cpu:gloo,cuda:nccl"),
        (["cuda a", "cuda a"], "gloo"),
        (["cuda a", "cpu"], "gloo"),
        (["cpu", "cpu"], "gloo"),
    ],
)
def test_nccl_needs_one_gpu_per_trainer(devices: list[str], backend: str) -> None:
    assert choose_backend(devices) == backend


def test_log_names_the_backend_if_gradients_are_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H200")
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    for trainers, ddp, text in (
        (1, "outside", ""),
        (2, "none", ""),
        (2, "inside", ", gradients summed by gloo"),
    ):
        config = RunConfig(cluster=ClusterSection(trainers=trainers), dense=DenseSection(ddp=ddp))
        found = describe_device(torch.device("cuda:0"), config)
        assert found.partition(", since")[0] == f" on cuda:0 (H200){text}"
