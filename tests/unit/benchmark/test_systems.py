"""What the bench's other systems start from: their ids, their rows, their versions."""

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
    """Versions by package, of a file of constraints alone."""
    lines = (ROOT / path).read_text().splitlines()
    return dict(line.split("==") for line in lines if line and line[0] not in "#-")


def test_jagged_ids_are_taken_apart_by_feature() -> None:
    sparse = SparseFeatures.from_bags([[[4, 7], [], [2]], [[5], [1], [9, 8]]])
    bags = [(ids_L.tolist(), offsets_B.tolist()) for ids_L, offsets_B in bags_by_feature(sparse)]
    assert bags == [([4, 7, 2], [0, 2, 2]), ([5, 1, 9, 8], [0, 1, 2])]


def test_tables_start_with_the_rows_that_the_cluster_gives_them() -> None:
    rows = initial_rows(SMALL)
    assert list(rows) == ["c0", "c1"]
    for name, num_rows in zip(rows, SMALL.table_rows, strict=True):
        expected_RD = torch.empty(num_rows, SMALL.dim)
        initialise_rows(expected_RD, SMALL.config().run.seed, name, num_rows**-0.5)
        assert torch.equal(rows[name], expected_RD)


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_system_has_the_products_that_are_asked_for(name: str) -> None:
    """Ours reads them in the run's configuration, the others build their net by it."""
    every = [WORKLOADS[name].by(products) for products in PRODUCTS]
    assert every[0] == WORKLOADS[name]
    assert [each.name for each in every] == [name, f"{name} by bfloat16"]
    assert [each.config().dense.autocast for each in every] == ["none", "bfloat16"]


def test_the_bench_takes_the_projects_versions_and_adds_to_them() -> None:
    """All are releases: a local version, such as 2.13.0+cpu, is not on every index."""
    path = "scripts/benchmark/constraints.txt"
    assert "-c ../constraints.txt" in (ROOT / path).read_text().splitlines()
    own, added = pins("scripts/constraints.txt"), pins(path)
    assert own["torch"] == "2.13.0"
    assert not own.keys() & added.keys()
    assert not [version for version in (*own.values(), *added.values()) if "+" in version]


def test_other_systems_need_nothing_that_their_environment_lacks() -> None:
    """What they take of this project imports torch and NumPy, not what only this project installs."""
    absent = "safetensors", "pyarrow", "numba", "rich", "psutil", "cryptography", "tensorboard", "matplotlib"
    imports = "import benchmark.workloads, benchmark.one_process"
    code = f"import sys; sys.modules |= dict.fromkeys({absent}); {imports}"
    paths = {"PYTHONPATH": f"{ROOT / 'scripts'}:{ROOT}"}
    done = subprocess.run([sys.executable, "-c", code], env=paths, capture_output=True, text=True)
    assert done.stderr == ""
