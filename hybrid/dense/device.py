"""Which device a trainer computes on, and how trainers reduce their gradients."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from hybrid.errors import ConfigError


def choose_device(setting: str, trainer: int) -> torch.device:
    """The device that ``dense.device`` means for one trainer.

    ``auto`` takes a GPU where the machine has one, spreading trainers over its GPUs by LOCAL_RANK (as
    torchrun and Slurm set it) or else by trainer index; ``cuda`` does the same and insists.

    Raises:
        ConfigError: the setting is not a device, or there is no such device here.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if setting == "auto" and not num_gpus:
        return torch.device("cpu")
    if setting in ("auto", "cuda") and num_gpus:
        local_rank = int(os.environ.get("LOCAL_RANK", trainer))
        return torch.device("cuda", local_rank % num_gpus)
    try:
        device = torch.device(setting)
    except RuntimeError:
        raise ConfigError("dense.device", "must be auto, cpu, cuda or cuda:N", setting) from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError("dense.device", "must be auto, cpu, cuda or cuda:N", setting)
    if device.type == "cuda" and (device.index or 0) >= num_gpus:
        raise ConfigError("dense.device", f"this machine has {num_gpus} GPU(s)", setting)
    return device


def choose_backend(devices: Sequence[str]) -> str:
    """The process group backend for trainers on ``devices``, each "host/device".

    NCCL needs a GPU of its own for every trainer; gloo serves everything else, shared GPUs too.
    """
    own_gpus = len(set(devices)) == len(devices) and all("/cuda" in device for device in devices)
    return "nccl" if own_gpus else "gloo"
