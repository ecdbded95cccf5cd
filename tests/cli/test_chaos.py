"""The result of a run whose roles are killed at random, and the comparison of results."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from chaos_run.run_comparison import differences
from chaos_run.victims import PHASES
from support.checkpoints import forge
from support.commands import ROOT, TrainedRun, settings
from support.namespaces import needs_hosts

SECONDS = 100
KILLS = 3


def chaos(*arguments: str) -> tuple[list[str], dict[str, str]]:
    """Return a command of ``scripts/chaos`` and its environment."""
    paths = os.pathsep.join(map(str, (ROOT / "tests", ROOT / "scripts", ROOT)))
    command = [sys.executable, "-m", "chaos_run", "--folder", "chaos", *arguments]
    return command, {**os.environ, "PYTHONPATH": paths}


@pytest.mark.long
@pytest.mark.parametrize(
    ("update", "victims"),
    [
        ("sync", ["--launcher"]),
        ("lookahead", ["--launcher"]),
        ("sync", ["--script"]),
        ("lookahead", ["--script", "--launcher"]),
        pytest.param("lookahead", ["--hosts", "2"], marks=needs_hosts),
    ],
)
def test_killed_run_has_the_bits_of_an_uninterrupted_one(
    update: str, victims: list[str], tiny: list[str], tmp_path: Path
) -> None:
    overrides = settings(
        train={"epochs": 4, "update": update},
        checkpoint={"every_steps": 5},
        data={"cache_folder": tmp_path / "chaos/prepared"},  # which hosts share
        cluster={"heartbeat_timeout_seconds": 3},
    )
    options = ["--kills", str(KILLS), "--seed", "1", "--pause", "0.3"]
    command, environment = chaos(*options, *victims, *tiny, *overrides)
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=SECONDS
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("seed 1, in ")
    assert "the same result, bit for bit" in ended.stdout
    report = json.loads((tmp_path / "chaos/chaos.json").read_text())
    assert not any(report["differences"].values())
    kills = report["kills"]
    assert len(kills) == KILLS
    assert all(kill["phase"] in PHASES and kill["signal"] == "SIGKILL" for kill in kills)
    assert any(kill["seconds"] is not None for kill in kills)


def test_differences_of_results_are_found(trained: TrainedRun, tmp_path: Path) -> None:
    folder = trained.copy(tmp_path)
    assert differences(trained.folder, folder) == []
    last = max(folder.glob("checkpoints/step-*"))
    dense = last / "dense.safetensors"
    dense.write_bytes(dense.read_bytes()[:-1] + b"\1")
    next(last.glob("tables/C1.*")).unlink()
    log = folder / "metrics.jsonl"
    log.write_text(log.read_text().replace('"loss": 0', '"loss": 1', 1))
    found = differences(trained.folder, folder)
    assert [name.partition(" ")[0] for name in found] == [
        *("dense.safetensors", "tables/C1.0-of-1.safetensors", "train")
    ]
    forge(last, lambda fields: fields.update(step=17))
    last.rename(last.with_name("step-00000017"))
    assert "the step of the last checkpoint" in differences(trained.folder, folder)
