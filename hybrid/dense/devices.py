"""Devices of trainers, and the backend of their process group."""

import os
from collections.abc import Sequence

import torch

from hybrid.config import DenseSection
from hybrid.errors import ConfigError


def choose_devices(section: DenseSection, trainer: int) -> list[torch.device]:
    """The devices on which a trainer computes; the first is where its parameters are.

    With ``auto``, that is a GPU if the machine has one: trainers are spread over its GPUs by LOCAL_RANK
    (which torchrun sets) or SLURM_LOCALID, or else by trainer index. ``cuda`` does the same and requires one.

    Raises:
        ConfigError: there is no such device here.
    """
    if section.devices:
        return [_find(setting) for setting in section.devices]
    num_gpus = _num_gpus()
    if section.device == "auto" and not num_gpus:
        return [torch.device("cpu")]
    if section.device in ("auto", "cuda") and num_gpus:
        local_rank = int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or trainer)
        return [torch.device("cuda", local_rank % num_gpus)]
    return [_find(section.device)]


def _find(setting: str) -> torch.device:
    num_gpus = _num_gpus()
    if setting != "cpu" and setting not in [f"cuda:{index}" for index in range(num_gpus)]:
        raise ConfigError("dense.device", f"this machine has {num_gpus} GPU(s)", setting)
    return torch.device(setting)


def _num_gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def choose_backend(devices: Sequence[str]) -> str:
    """Return the process group backend for trainers on ``devices``, each "ID of the host/device".

    NCCL needs one GPU per trainer; gloo supports everything else, also shared GPUs.
    """
    own_gpus = len(set(devices)) == len(devices) and all("/cuda" in device for device in devices)
    return "nccl" if own_gpus else "gloo"
