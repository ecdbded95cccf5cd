"""Models on a cluster equal one process."""

from pathlib import Path

import pytest
import torch
from comparison.cases import model_script
from support.cluster import Clusters, run_script
from support.matrix import Case, check_against_one_process, train_case


@pytest.mark.parametrize("update", ["sync", "lookahead"])
def test_models_in_a_custom_loop_equal_one_process(update: str, clusters: Clusters, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(f'[train]\nupdate = "{update}"\ndtype = "float64"\n')
    model_script.main(str(tmp_path / "alone.pt"), str(tmp_path / "config.toml"))
    clusters.get(3, 2).run(run_script, model_script.__file__, tmp_path / "cluster.pt", update=update)
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
