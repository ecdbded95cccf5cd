"""The compared systems: wrong losses and environments."""

import dataclasses
import math
import subprocess
import sys

import pytest
from benchmark.compare import find_wrong_losses
from benchmark.running import Measurement
from support.commands import ROOT


def test_wrong_losses_of_synchronous_systems_are_found() -> None:
    right = Measurement("W1", "one-process", 1, 8, 1.0, 1.0, (0.5,) * 12)
    rounded = dataclasses.replace(right, system="torchrec", losses=(0.500001,) * 12)
    wrong = dataclasses.replace(right, system="ours-sync", losses=(*right.losses[:-1], 0.50001))
    infinite = dataclasses.replace(right, system="ours-lookahead", losses=(math.nan, *right.losses[1:]))
    not_synchronous = dataclasses.replace(right, system="ours-async", losses=(0.6,) * 12)
    found = find_wrong_losses([wrong, rounded, right, infinite, not_synchronous])
    assert set(found) == {("W1", "ours-sync"), ("W1", "ours-lookahead")}


@pytest.mark.long
def test_other_systems_import_only_their_environment() -> None:
    """Modules that other systems import need only torch, NumPy, psutil and safetensors."""
    absent = "pyarrow", "numba", "rich", "cryptography", "tensorboard", "matplotlib"
    code = f"import sys; sys.modules |= dict.fromkeys({absent}); import benchmark.one_process"
    paths = {"PYTHONPATH": f"{ROOT / 'scripts'}:{ROOT}"}
    done = subprocess.run([sys.executable, "-c", code], env=paths, capture_output=True, text=True)
    assert done.stderr == ""
