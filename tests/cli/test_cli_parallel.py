"""Dense nets in parallel forms, by the command line: one's own net split, a run that changes its form."""

from pathlib import Path

import pytest
from support.commands import TrainedRun, code_block, output_of, result_of, settings

from hybrid.checkpoint.checkpoint_folders import step_folder
from workers.cli import main

PLAN = ["interaction.gate = colwise_gathered", "head.0 = colwise", "head.2 = rowwise"]
SPLIT = settings(dense={"net": "my_net:build", "tensor_size": 2, "tensor_plan": PLAN})


def test_a_net_of_ones_own_split_by_a_plan_equals_one_process(tiny: list[str], tmp_path: Path) -> None:
    (tmp_path / "my_net.py").write_text(code_block("docs/models.md", "python", "class Gates"))
    said = output_of(["compare", "--steps", 10, *tiny, *SPLIT], tmp_path)
    assert "trainer 1: interaction.gate.weight" in said


@pytest.mark.long
def test_a_run_goes_on_in_another_form(
    trained: TrainedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = trained.copy(tmp_path)
    form = {"device": "cpu,cpu", "compile": "script"}
    output_of(["launch", "--resume", folder, *settings(train={"epochs": 2}, dense=form)], tmp_path)
    outcome = result_of(folder)
    assert outcome["steps"] == 32
    main(["evaluate", str(step_folder(folder, 32))])  # an earlier one may be better
    assert f"auc                 {outcome['auc']:.4f}\n" in capsys.readouterr().out
