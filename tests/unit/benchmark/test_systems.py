"""Inputs of the compared systems: ids, initial rows and versions."""

import dataclasses
import subprocess
import sys

import torch
from benchmark.start import initial_rows
from benchmark.workloads import WORKLOADS
from support.commands import ROOT

from hybrid.embedding.initial_rows import fill_random_rows

SMALL = dataclasses.replace(WORKLOADS["W3"], name="small", table_rows=(7, 3))


def test_tables_have_the_initial_rows_of_a_cluster() -> None:
    rows = initial_rows(SMALL)
    assert list(rows) == ["c0", "c1"]
    for name, num_rows in zip(rows, SMALL.table_rows, strict=True):
        expected_RD = torch.empty(num_rows, SMALL.dim)
        fill_random_rows(expected_RD, SMALL.config().run.seed, name, num_rows**-0.5)
        assert torch.equal(rows[name], expected_RD)


def test_other_systems_import_only_their_environment() -> None:
    """Modules that other systems import need only torch, NumPy and safetensors."""
    absent = "pyarrow", "numba", "rich", "psutil", "cryptography", "tensorboard", "matplotlib"
    imports = "import benchmark.workloads, benchmark.one_process"
    code = f"import sys; sys.modules |= dict.fromkeys({absent}); {imports}"
    paths = {"PYTHONPATH": f"{ROOT / 'scripts'}:{ROOT}"}
    done = subprocess.run([sys.executable, "-c", code], env=paths, capture_output=True, text=True)
    assert done.stderr == ""
