"""Comparison of a job with one process, user functions, and runs that stop with an error."""

import re
from pathlib import Path

import pytest
from support.commands import ONE_EACH, eventually, output_of, result_of, run, settings, started
from support.trained import write_clicks

from workers.cli import main

# A net with other parameters in each process.
ODD_NET = """
import os
from hybrid.dense.net_builder import build_dense_net

def build(config, spec, widths):
    net = build_dense_net(config.replace(dense=type(config.dense)(net="dcn_v2")), spec, widths)
    net.head[0].bias.data += os.getpid()
    return net
"""

NORM_NET = """
from torch import nn
from hybrid.models.dense_net import Concatenation, DenseNet

def build(config, input_spec, widths):
    width = len(input_spec.dense_features) + sum(widths)
    head = nn.Sequential(nn.Linear(width, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 1))
    return DenseNet(nn.Identity(), Concatenation(), head)
"""


def test_compare_finds_no_difference(tiny: list[str], tmp_path: Path) -> None:
    data = {"weight": "weight", "weighted_metrics": "true"}
    overrides = settings(train={"update": "lookahead", "batch_size": 256}, data=data)
    printed = output_of(["compare", "--steps", 4, *tiny, *overrides], tmp_path)
    assert "table C1 " in printed
    assert "trainer 1: head.0.weight" in printed
    assert re.search(r"test AUC: cluster (0\.\d+), one process \1\n", printed)
    assert re.search(r"\d+ of \d+ tensors are the same bit for bit", printed)


@pytest.mark.long
def test_batch_normalization_differs_with_micro_batches(tiny: list[str], tmp_path: Path) -> None:
    (tmp_path / "norm_net.py").write_text(NORM_NET)
    overrides = settings(dense={"net": "norm_net:build"}, train={"micro_batches": 2}, cluster={"workers": 1})
    ended = run(["compare", "--steps", 3, *tiny, *overrides], tmp_path)
    assert (ended.code, ended.stdout.count("batch normalization in head.1 ")) == (1, 1)
    assert "trainer 0: head.1.num_batches_tracked" in ended.stderr


def test_log_of_an_error_is_kept(tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    job = [*tiny, *ONE_EACH, *settings(train={"epochs": 10_000})]
    with started(["compare", "--steps", 100_000, *job], tmp_path) as command:
        assert eventually(lambda: "on the cluster" in command.stdout), command.stderr
        command.role("worker 0").kill()
        ended = command.wait()
    log = re.search(r"worker 0 \(pid \d+\) was killed by SIGKILL; see (\S+worker-0.log)$", ended.stderr)
    assert ended.code == 75
    assert log is not None
    assert Path(log[1]).is_file()


def test_compare_finds_differences(tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (tmp_path / "odd_net.py").write_text(ODD_NET)
    ended = run(
        ["compare", "--steps", 2, *tiny, *ONE_EACH, *settings(dense={"net": "odd_net:build"})], tmp_path
    )
    assert ended.code == 1
    assert re.search(r"hybrid compare: \d+ of \d+ tensors differ by more than", ended.stderr)
    assert not list(tmp_path.glob("hybrid-compare-*"))


def test_run_without_test_rows_is_not_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = {"format": "csv", "path": write_clicks(tmp_path / "clicks.csv"), "label": "clicked"}
    data |= {"dense": "age", "sparse": ["user", "item"], "split": "none"}
    job = settings(data=data, train={"batch_size": 64}, dense={"device": "cpu"})
    printed = output_of(["launch", *job, *ONE_EACH, *settings(run={"folder": "run"})], tmp_path)
    assert "no test rows (data.split = none): nothing is evaluated\n" in printed
    assert "test AUC            none: there are no test rows\n" in printed
    assert "evaluate run --input FILE\n" in printed
    assert "auc" not in result_of(Path("run"))
    with pytest.raises(SystemExit, match=r"\(data\.split = none\)$"):
        main(["evaluate", "run"])


def test_non_finite_loss_stops_the_run(tiny: list[str], tmp_path: Path) -> None:
    wild = settings(dense={"optimizer": "SGD", "learning_rate": 1e30})
    ended = run(["launch", *tiny, *ONE_EACH, *wild], tmp_path)
    assert ended.code == 1
    assert re.match(r"hybrid launch: step \d+: (.* not finite|the loss of)", ended.stderr)
    assert not list(tmp_path.glob("runs/*/checkpoints/*"))
