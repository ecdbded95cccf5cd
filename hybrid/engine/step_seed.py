"""The random numbers that a net draws while it computes, such as dropout's: a function of the step."""

import struct
from collections.abc import Iterable
from hashlib import blake2b

import torch


def seed_step(seed: int, trainer: int, step: int, devices: Iterable[torch.device]) -> None:
    """Seed torch's default generators of the CPU and of ``devices`` for one step of one trainer.

    Two trainers, or two steps, draw other numbers; the same step draws the same ones again, and so no state
    of a generator needs to be in a checkpoint. (``torch.manual_seed`` does it for every kind of device
    there is, which takes 70 times as long.)
    """
    packed = struct.pack("<3Q", seed, trainer, step)
    drawn = int.from_bytes(blake2b(packed, digest_size=8).digest(), "little")
    torch.default_generator.manual_seed(drawn)
    for device in devices:
        if device.type == "cuda":
            torch.cuda.default_generators[device.index or 0].manual_seed(drawn)
