"""The models on a cluster and in one process: the same losses, parameters and rows, whatever the shares."""

from pathlib import Path

import pytest
import torch
from comparison.cases import model_script
from support.cluster import Clusters, small_config

from workers.jobs.script import ScriptJob
from workers.joining.bootstrap import Cluster
from workers.screen.terminal import TerminalView


def run_script(cluster: Cluster, output: Path, update: str) -> None:
    config = small_config(
        cluster={"trainers": cluster.topology.num_trainers, "workers": cluster.topology.num_workers},
        train={"update": update, "dtype": "float64"},
    )
    with TerminalView() as view:
        ScriptJob(config, model_script.__file__, (str(output),)).run(cluster.topology, Path, view)


@pytest.mark.parametrize("update", ["sync", "pipelined"])
def test_a_cluster_trains_them_as_one_process_does(update: str, clusters: Clusters, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(f'[train]\nupdate = "{update}"\ndtype = "float64"\n')
    model_script.main(str(tmp_path / "alone.pt"), str(tmp_path / "config.toml"))
    clusters.get(3, 2).run(run_script, tmp_path / "cluster.pt", update)
    expected, found = (torch.load(tmp_path / name, weights_only=True) for name in ("alone.pt", "cluster.pt"))
    assert len(expected["losses"]) == sum(model_script.SIZES)
    for name in ("losses", "net", "tables"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-11, atol=1e-12, msg=name)
