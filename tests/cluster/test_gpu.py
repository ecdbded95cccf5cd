"""Dense nets on a GPU, tables on the workers' CPUs: results equal those of CPUs.

Where there is no GPU, trainers use the device of :mod:`support.fake_gpu`, one each. Where there is one, all
trainers share it.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from comparison.cases.custom_loop_script import SCRIPT
from comparison.cases.plain_loop import check
from support import fake_gpu
from support.cluster import CaseError, Clusters, run_script, small_config
from support.commands import JOB, settings, started
from support.jobs import compare, evaluate, evaluate_in_two_parts
from support.stopped_runs import assert_same_run

from hybrid.config import RunConfig, TaskSection

# Called only here: a process that has initialized CUDA cannot fork trainers.
GPU = "cuda" if torch.cuda.is_available() else fake_gpu.NAME
pytestmark = [pytest.mark.gpu] if GPU == "cuda" else []
in_software = pytest.mark.skipif(GPU == "cuda", reason="one GPU, which rounds otherwise than the CPU")
STEPS = 4
LOOKAHEAD = {"update": "lookahead"}
SHARDED = {} if GPU == "cuda" else {"tensor_size": 2}  # layers need a GPU for each trainer


RANKED = {
    "click": TaskSection(label="label", ranking_loss="listwise"),
    "spent": TaskSection(type="regression", ranking_loss="pairwise"),
}


def config_of(trainers: int, dense: dict[str, Any], train: dict[str, Any]) -> RunConfig:
    """Jobs with micro-batches have ranking losses."""
    config = small_config(
        cluster={"trainers": trainers, "workers": 2},
        dense={"device": GPU, **dense},
        train={"dtype": "float64"} | train,
    )
    if "micro_batches" not in train:
        return config
    return config.replace(tasks=RANKED, data=dataclasses.replace(config.data, group="C26"))


@pytest.mark.parametrize(
    ("trainers", "dense", "train"),
    [
        (2, {"remote_mlp": (8,), **SHARDED}, {**LOOKAHEAD, "micro_batches": 2, "clip_norm": 0.1}),
        pytest.param(1, {"autocast": "bfloat16"}, {"dtype": "float32"}, marks=in_software),
        pytest.param(2, {"device": f"{GPU}:0,cpu"}, LOOKAHEAD, marks=pytest.mark.gpu),
        (1, {"device": f"{GPU}:0,{GPU}:0"}, {}),
        pytest.param(2, {"compile": "inductor"}, {}, marks=pytest.mark.gpu),
    ],
    ids=str,
)
def test_trainers_on_gpus_equal_one_process_on_the_cpu(
    trainers: int, dense: dict[str, Any], train: dict[str, Any], clusters: Clusters, cache: Path
) -> None:
    cluster = clusters.get(trainers, 2, device=GPU)
    cluster.run(compare, config_of(trainers, dense, train), cache, STEPS)


def test_a_run_continues_from_a_checkpoint_of_gpus(clusters: Clusters, cache: Path, tmp_path: Path) -> None:
    cluster = clusters.get(2, 2, device=GPU)
    tables, metrics = cluster.run(evaluate_in_two_parts, config_of(2, {}, {}), cache, tmp_path, STEPS)
    on_cpus = config_of(2, {"device": "cpu"}, {})
    expected, expected_metrics = cluster.run(evaluate, on_cpus, cache, STEPS)
    torch.testing.assert_close(tables, expected, rtol=0.0, atol=1e-12)
    assert metrics == pytest.approx(expected_metrics, rel=1e-9)


def test_custom_loops_on_gpus_equal_plain_torch(clusters: Clusters, tmp_path: Path) -> None:
    options, output = ("weights", "ranked", "computed", "pooled", "condition"), tmp_path / "end.pt"
    cluster = clusters.get(2, 2, device=GPU)
    cluster.run(run_script, SCRIPT, output, *options, device=GPU, **LOOKAHEAD)
    check(torch.load(output), options)


@pytest.mark.gpu
def test_run_has_the_same_bits_after_the_loss_of_its_trainers(tmp_path: Path) -> None:
    config = settings(dense={"device": "auto"}, train=LOOKAHEAD, checkpoint={"every_steps": 4})
    for name, victims in (("whole", []), ("killed", ["trainer 1", "trainer 0"])):
        job = [*JOB, *config, *settings(run={"folder": name})]
        with started(["launch", *job], tmp_path, afresh=True) as command:
            for number, role in enumerate(victims):
                command.await_text(f"step {5 * number + 3}/")
                command.role(role).kill()
            assert command.wait().code == 0
    assert_same_run(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.gpu
def test_sharded_layers_need_a_gpu_for_each_trainer(clusters: Clusters, cache: Path) -> None:
    with pytest.raises(CaseError, match=r"dense\.tensor_size.* GPU for each trainer"):
        clusters.get(2, 2, device="cuda:0").run(
            compare, config_of(2, {"device": "cuda:0", "tensor_size": 2}, {}), cache, STEPS
        )
