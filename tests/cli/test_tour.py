"""The tour of the examples, as a user runs it."""

import os
import subprocess
import sys
from pathlib import Path

from support.commands import ROOT, result_of


def test_tour_resumes_a_run_and_predicts_each_new_row(tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    tour = [ROOT / "examples/tour.sh", tmp_path / "tour"]
    ended = subprocess.run(tour, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "resuming from step 80" in ended.stdout
    assert result_of(tmp_path / "tour/run")["auc"] > 0.72
    assert len((tmp_path / "tour/predictions.csv").read_text().splitlines()) == 1001
    assert (tmp_path / "tour/export/program.pt2").is_file()
