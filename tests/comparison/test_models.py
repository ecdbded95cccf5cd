"""Models on a cluster equal one process."""

from pathlib import Path

import pytest
import torch
from comparison.cases import model_script
from support.cluster import Clusters, small_config
from support.matrix import Case, check_against_one_process, train_case

from workers.cluster_task import ScriptTask
from workers.console.terminal import TerminalView
from workers.controller.shared_folders import SharedFolders
from workers.controller.user_code_jobs import ScriptJob
from workers.rendezvous.bootstrap import JoinedCluster


def run_script(cluster: JoinedCluster, output: Path, update: str) -> None:
    config = small_config(
        cluster={"trainers": cluster.topology.num_trainers, "workers": cluster.topology.num_workers},
        train={"update": update, "dtype": "float64"},
    )
    with TerminalView() as view:
        ScriptJob(config, ScriptTask(model_script.__file__, (str(output),))).run(
            cluster.topology, Path, view, SharedFolders([])
        )


@pytest.mark.parametrize("update", ["sync", "lookahead"])
def test_models_in_a_custom_loop_equal_one_process(update: str, clusters: Clusters, tmp_path: Path) -> None:
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
        Case(trainers=3, net="ple", tasks="several", inputs="uneven", update="lookahead", remote=True),
    ],
    ids=lambda case: case.name,
)
def test_configured_run_with_experts_equals_one_process(case: Case, clusters: Clusters) -> None:
    check_against_one_process(case, clusters.get(3, 2).run(train_case, case))
