"""Inputs of the compared systems: ids, initial rows and versions."""

import dataclasses
import subprocess
import sys

import pytest
import torch
from benchmark.durations import PRODUCTS
from benchmark.start import bags_by_feature, initial_rows
from benchmark.workloads import WORKLOADS
from support.commands import ROOT

from hybrid.batch import SparseFeatures
from hybrid.embedding.worker.initial_rows import initialise_rows

SMALL = dataclasses.replace(WORKLOADS["W3"], name="small", table_rows=(7, 3))


def pins(path: str) -> dict[str, str]:
    """Return the versions of a constraints file by package."""
    lines = (ROOT / path).read_text().splitlines()
    return dict(line.split("==") for line in lines if line and line[0] not in "#-")


def test_jagged_ids_are_split_by_feature() -> None:
    sparse = SparseFeatures.from_bags([[[4, 7], [], [2]], [[5], [1], [9, 8]]])
    bags = [(ids_L.tolist(), offsets_B.tolist()) for ids_L, offsets_B in bags_by_feature(sparse)]
    assert bags == [([4, 7, 2], [0, 2, 2]), ([5, 1, 9, 8], [0, 1, 2])]


def test_tables_have_the_initial_rows_of_a_cluster() -> None:
    rows = initial_rows(SMALL)
    assert list(rows) == ["c0", "c1"]
    for name, num_rows in zip(rows, SMALL.table_rows, strict=True):
        expected_RD = torch.empty(num_rows, SMALL.dim)
        initialise_rows(expected_RD, SMALL.config().run.seed, name, num_rows**-0.5)
        assert torch.equal(rows[name], expected_RD)


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_system_has_the_requested_precision(name: str) -> None:
    """This project uses the configuration, other systems use the net."""
    every = [WORKLOADS[name].by(products) for products in PRODUCTS]
    assert every[0] == WORKLOADS[name]
    assert [each.name for each in every] == [name, f"{name} by bfloat16"]
    assert [each.config().dense.autocast for each in every] == ["none", "bfloat16"]


def test_the_bench_uses_the_versions_of_the_project() -> None:
    """All versions are releases; local versions such as 2.13.0+cpu are not on every index."""
    path = "scripts/benchmark/constraints.txt"
    assert "-c ../constraints.txt" in (ROOT / path).read_text().splitlines()
    own, added = pins("scripts/constraints.txt"), pins(path)
    assert own["torch"] == "2.13.0"
    assert not own.keys() & added.keys()
    assert not [version for version in (*own.values(), *added.values()) if "+" in version]


def test_other_systems_import_only_their_environment() -> None:
    """Modules that other systems import need only torch and NumPy."""
    absent = "safetensors", "pyarrow", "numba", "rich", "psutil", "cryptography", "tensorboard", "matplotlib"
    imports = "import benchmark.workloads, benchmark.one_process"
    code = f"import sys; sys.modules |= dict.fromkeys({absent}); {imports}"
    paths = {"PYTHONPATH": f"{ROOT / 'scripts'}:{ROOT}"}
    done = subprocess.run([sys.executable, "-c", code], env=paths, capture_output=True, text=True)
    assert done.stderr == ""
