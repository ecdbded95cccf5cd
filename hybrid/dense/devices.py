"""Devices of trainers, and the backend of their process group."""

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist

from hybrid.config import DenseSection, RunConfig
from hybrid.errors import ConfigError


def choose_devices(section: DenseSection, trainer: int) -> list[torch.device]:
    """Return the devices on which a trainer computes; the first one holds its parameters.

    If ``dense.device`` names or lists devices, return these. For ``cuda``, return one GPU of this machine;
    for ``auto``, one GPU, or the CPU if there is no GPU. The index of this GPU is LOCAL_RANK (which torchrun
    sets), else SLURM_LOCALID, else ``trainer``, modulo the number of GPUs. A GPU is any torch accelerator.

    Raises:
        ConfigError: this machine does not have the device.
    """
    gpu = torch.accelerator.current_accelerator(check_available=True)
    gpus = [] if gpu is None else [torch.device(gpu.type, i) for i in range(torch.accelerator.device_count())]
    if section.devices:
        return [_find(setting, gpus) for setting in section.devices]
    if section.device == "auto" and not gpus:
        return [torch.device("cpu")]
    if gpus and section.device in ("auto", gpus[0].type):
        local_rank = int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or trainer)
        return [gpus[local_rank % len(gpus)]]
    return [_find(section.device, gpus)]


def _find(setting: str, gpus: Sequence[torch.device]) -> torch.device:
    devices = {str(device): device for device in (torch.device("cpu"), *gpus)}
    if setting not in devices:
        seen = "" if gpus else "; PyTorch sees no GPU (its CPU build never does)"
        raise ConfigError("dense.device", f"must be {' or '.join(devices)} on this machine{seen}", setting)
    return devices[setting]


def device_id(device: torch.device) -> str:
    """Return "cpu" for a CPU; for a GPU, return its type and its UUID, which is unique in a cluster.

    The index is not unique: schedulers such as Ray and Slurm may show each trainer a single GPU as number 0.
    """
    if device.type == "cpu":
        return device.type
    return f"{device.type} {torch.get_device_module(device).get_device_properties(device).uuid}"


def choose_backend(devices: Sequence[str]) -> str:
    """Return the backend of the trainers' process group, such as "gloo" or "cpu:gloo,cuda:nccl".

    If each trainer has its own GPU, torch's backend for it (NCCL for CUDA) reduces tensors on GPUs, such as
    gradients of the dense net, and Gloo reduces tensors on CPUs. Otherwise, Gloo reduces all tensors.

    Args:
        devices: the :func:`device_id` of each trainer's first device.
    """
    if "cpu" in devices or len(set(devices)) < len(devices):
        return "gloo"
    kind = devices[0].partition(" ")[0]
    return f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"


def describe_device(device: torch.device, config: RunConfig) -> str:
    """Return text for a log, such as " on cuda:0 (NVIDIA H200), gradients summed by NCCL"; "" for a CPU."""
    if device.type == "cpu":
        return ""
    name = f" on {device} ({torch.get_device_module(device).get_device_name(device)})"
    if config.cluster.trainers == 1 or config.dense.ddp == "none":
        return name
    backend = "NCCL" if device.type == "cuda" else dist.get_default_backend_for_device(device)
    shared = "gloo, since not every trainer has its own GPU"
    return f"{name}, gradients summed by {shared if dist.get_backend() == 'gloo' else backend}"
