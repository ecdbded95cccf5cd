"""The models on a cluster and in one process: the same numbers for any shares; and exported programs."""

from pathlib import Path

import pytest
import torch
from comparison.cases import model_script
from support.cluster import Clusters, small_config
from support.matrix import Case, check_against_one_process, train_case
from support.seeded import random
from torch import Tensor, nn

from hybrid.models.dcn_v2 import DCNv2
from hybrid.models.deepfm import DeepFM
from hybrid.models.din import DIN
from hybrid.models.dlrm import DLRM
from hybrid.models.esmm import ESMM
from hybrid.models.final_mlp import FinalMLP
from hybrid.models.mmoe import MMoE
from hybrid.models.ple import PLE
from hybrid.models.self_attention import SelfAttention
from hybrid.models.two_towers import TwoTowers
from hybrid.models.wide_deep import WideAndDeep
from workers.console.terminal import TerminalView
from workers.controller.shared_folders import SharedFolders
from workers.jobs.user_code_jobs import ScriptJob
from workers.rendezvous.bootstrap import JoinedCluster


def run_script(cluster: JoinedCluster, output: Path, update: str) -> None:
    config = small_config(
        cluster={"trainers": cluster.topology.num_trainers, "workers": cluster.topology.num_workers},
        train={"update": update, "dtype": "float64"},
    )
    with TerminalView() as view:
        ScriptJob(config, model_script.__file__, (str(output),)).run(
            cluster.topology, Path, view, SharedFolders([])
        )


@pytest.mark.parametrize("update", ["sync", "pipelined"])
def test_a_cluster_trains_them_as_one_process_does(update: str, clusters: Clusters, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(f'[train]\nupdate = "{update}"\ndtype = "float64"\n')
    model_script.main(str(tmp_path / "alone.pt"), str(tmp_path / "config.toml"))
    clusters.get(3, 2).run(run_script, tmp_path / "cluster.pt", update)
    expected, found = (torch.load(tmp_path / name, weights_only=True) for name in ("alone.pt", "cluster.pt"))
    assert len(expected["losses"]) == sum(model_script.SIZES)
    for name in ("losses", "net", "tables"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-11, atol=1e-12, msg=name)


@pytest.mark.parametrize(
    "case",
    [
        Case(trainers=3, net="mmoe", tasks="several", inputs="uneven"),
        Case(trainers=3, net="ple", tasks="several", inputs="uneven", update="pipelined", remote=True),
    ],
    ids=lambda case: case.name,
)
def test_a_configured_run_with_experts_equals_one_process(case: Case, clusters: Clusters) -> None:
    check_against_one_process(case, clusters.get(3, 2).run(train_case, case))


def some(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    return tuple(random(*shape, seed=seed) for seed, shape in enumerate(shapes))


IS_ITEM = torch.tensor([[True, True, False]] * 4)


@pytest.mark.long
@pytest.mark.parametrize(
    ("module", "inputs"),
    [
        (DIN(3, 2), (*some((4, 3), (4, 3, 3)), IS_ITEM, *some((4, 2)))),
        (SelfAttention(4, 5), (*some((4, 3, 4)), IS_ITEM)),
        (TwoTowers(3, 4), some((4, 3), (4, 4))),
        (MMoE(6, (1, 3)), some((4, 6))),
        (PLE(6, (1, 3)), some((4, 6))),
        (ESMM(6), some((4, 6))),
        (FinalMLP(6, (2, 3)), some((4, 6), (4, 2), (4, 3))),
        (DLRM(2, 3, 4), some((4, 2), (4, 12))),
        (DCNv2(6), some((4, 2), (4, 4))),
        (DeepFM(2, 3, 4), some((4, 2), (4, 15))),
        (WideAndDeep(2, (3, 4)), some((4, 2), (4, 9))),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_exported_program_gives_the_same_for_any_number_of_samples(
    module: nn.Module, inputs: tuple[Tensor, ...]
) -> None:
    samples = torch.export.Dim("samples")
    exported = torch.export.export(module.eval(), inputs, dynamic_shapes=tuple({0: samples} for _ in inputs))
    more = tuple(torch.cat([each, each[:2]]) for each in inputs)
    torch.testing.assert_close(exported.module()(*more), module(*more))
