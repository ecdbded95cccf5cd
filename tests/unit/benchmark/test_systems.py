"""What the bench's other systems start from: their ids, their rows, their versions."""

import dataclasses
import subprocess
import sys

import pytest
import torch
from benchmark.durations import PRODUCTS
from benchmark.job import VARIABLE, Job
from benchmark.start import bag_offsets, bags_by_feature, initial_rows, sgd_job
from benchmark.workloads import WORKLOADS
from support.commands import ROOT
from torch import Tensor
from torch.futures import Future

from hybrid.batch import SparseFeatures
from hybrid.dense import matmul
from hybrid.embedding.worker.initial_rows import initialise_rows
from hybrid.engine.hybrid_model import HybridModel, MicroBatch
from hybrid.models.dense_net import DenseNet
from hybrid.primitives.step_timings import StepClock
from hybrid.protocol.ticket import Ticket

SMALL = dataclasses.replace(WORKLOADS["W3"], name="small", table_rows=(7, 3))


def pins(path: str) -> dict[str, str]:
    """Versions by package, of a file of constraints alone."""
    lines = (ROOT / path).read_text().splitlines()
    return dict(line.split("==") for line in lines if line and line[0] not in "#-")


def test_jagged_ids_are_taken_apart_by_feature() -> None:
    sparse = SparseFeatures.from_bags([[[4, 7], [], [2]], [[5], [1], [9, 8]]])
    bags = [(ids_L.tolist(), offsets_B.tolist()) for ids_L, offsets_B in bags_by_feature(sparse)]
    assert bags == [([4, 7, 2], [0, 2, 2]), ([5, 1, 9, 8], [0, 1, 2])]


def test_ids_without_offsets_are_bags_of_one() -> None:
    sparse = SparseFeatures(torch.tensor([4, 7, 2, 5, 1, 9]), None, None, 2)
    assert bag_offsets(sparse).tolist() == [0, 1, 2, 3, 4, 5, 6]
    bags = [(ids_L.tolist(), offsets_B.tolist()) for ids_L, offsets_B in bags_by_feature(sparse)]
    assert bags == [([4, 7, 2], [0, 1, 2]), ([5, 1, 9], [0, 1, 2])]


def test_ids_of_a_feature_do_not_ship_those_of_all() -> None:
    sparse = SparseFeatures(torch.arange(6), None, None, 2)
    for tensors in bags_by_feature(sparse):
        for tensor in tensors:
            assert tensor.untyped_storage().nbytes() == tensor.nbytes


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
    assert [each.name for each in every] == [name, f"{name} by onednn", f"{name} by bfloat16"]
    configs = [(each.config().dense.matmul, each.config().dense.autocast) for each in every]
    assert configs == [("torch", "none"), ("onednn", "none"), ("torch", "bfloat16")]
    kinds = [{type(m) for m in each.dense_net().modules()} for each in every]
    assert [matmul.Linear in each for each in kinds] == [False, True, False]


def test_in_bfloat16_a_net_gives_what_the_model_gives_under_autocast() -> None:
    """Ours computes stage by stage, and loses no more than the precision that is asked for."""
    batch, width = SMALL.batches(0)[0], SMALL.dim * len(SMALL.table_rows)
    pooled_BE = torch.randn(SMALL.trainer_batch, width, generator=torch.Generator().manual_seed(1))
    in_float32, in_bfloat16 = (
        each.dense_net()(batch.dense_features, pooled_BE) for each in (SMALL, SMALL.by("bfloat16"))
    )
    vectors: Future[Tensor] = Future()
    vectors.set_result(pooled_BE)
    net = SMALL.dense_net()
    assert isinstance(net, DenseNet)
    ours = HybridModel(net, autocast=torch.bfloat16)
    logits_B = ours(MicroBatch(batch, Ticket(0, 0, 0), lambda: vectors), StepClock())
    assert logits_B.dtype == in_bfloat16.dtype == torch.float32
    assert torch.equal(logits_B, in_bfloat16)
    assert not torch.equal(in_float32, in_bfloat16)
    torch.testing.assert_close(in_float32, in_bfloat16, rtol=0.05, atol=0.05)


def test_another_optimizer_than_sgd_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, Job(SMALL, 1, 2).to_text())
    assert sgd_job() == Job(SMALL, 1, 2)
    adagrad = dataclasses.replace(SMALL, optimizer="adagrad")
    monkeypatch.setenv(VARIABLE, Job(adagrad, 1, 2).to_text())
    with pytest.raises(ValueError, match="small want adagrad, not sgd"):
        sgd_job()


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
