"""Modules of custom training loops in ``hybrid evaluate``, ``predict`` and ``export``."""

import re
import runpy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.trained import (
    by_onnx,
    by_program,
    clicks_config,
    largest_difference,
    predicted_columns,
    texts_of,
    write_clicks,
    write_trained,
)
from torch.nn.functional import binary_cross_entropy_with_logits

from hybrid.config.loading import to_toml
from hybrid.errors import ConfigError, HybridError
from hybrid.inference.custom_module import CustomModule
from hybrid.inference.trained_run import TrainedRun
from workers.cli import main
from workers.model_commands import evaluate

SCRIPT = """
import torch
from torch import nn
import hybrid

class Net(nn.Module):
    def __init__(self, data):
        super().__init__()
        self.user = hybrid.Embedding(data.num_rows["user"], 3, padding_idx=0)
        modes = {"mean": 0, "max": 0, "sum": None}
        self.tags = nn.ModuleDict({
            mode: hybrid.EmbeddingBag(data.num_rows["tags"], 3, mode=mode, padding_idx=index)
            for mode, index in modes.items()
        })
        self.head = nn.Linear(12 + len(data.dense_columns), 1)

    def forward(self, batch):
        tags = batch["tags"]
        vectors = [self.tags["mean"](tags), self.tags["max"](tags.values, tags.offsets[:-1])]
        vectors.append(self.tags["sum"](tags, per_sample_weights=tags.values + 0.5))
        return self.head(torch.cat([self.user(batch["user"]), *vectors, batch["dense"]], dim=1))

class Twice(Net):
    def forward(self, batch):
        return super().forward(batch).expand(-1, 2)

def connects(data):
    return hybrid.connect()

if __name__ == "__main__":
    cluster = hybrid.connect("clicks.toml")
    train, test = cluster.prepare()
    model = cluster.distribute(Net(train))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for batch in cluster.batches(train):
        cluster.backward(nn.functional.softplus(model(batch) * (1 - 2 * batch["label"].unsqueeze(1))))
        optimizer.step()
    cluster.save("saved", optimizer)
    with torch.no_grad():
        batches = [(model(batch).squeeze(1), batch["label"]) for batch in cluster.batches(test)]
    torch.save([torch.cat(each) for each in zip(*batches)], "expected.pt")
"""
SAVED, NET = Path("saved"), "net_of_clicks.py:Net"


@pytest.fixture(scope="module")
def trained_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a script that was run in one process; read-only."""
    folder = tmp_path_factory.mktemp("loop")
    (folder / "clicks.toml").write_text(to_toml(clicks_config(folder)))
    (folder / "net_of_clicks.py").write_text(SCRIPT)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        with pytest.warns(UserWarning, match="ids that are computed"):
            runpy.run_path("net_of_clicks.py", run_name="__main__")
    return folder


@pytest.fixture(autouse=True)
def in_trained_folder(trained_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(trained_folder)


def test_metrics_are_those_of_the_loop(capsys: pytest.CaptureFixture[str]) -> None:
    logits, labels = torch.load("expected.pt")
    main(["evaluate", "saved", "--module", NET])
    printed = dict(re.findall(r"^(.*?)  +(.*)$", capsys.readouterr().out, re.MULTILINE))
    assert printed["num samples"] == str(len(labels))
    loss = binary_cross_entropy_with_logits(logits, labels)
    assert float(printed["log loss"]) == pytest.approx(loss.item(), abs=1e-4)


def test_predictions_are_those_of_the_loop(tmp_path: Path) -> None:
    logits, _ = torch.load("expected.pt")
    main(["predict", "saved", "--module", NET, "--output", str(tmp_path / "p.csv")])
    header, *lines = (tmp_path / "p.csv").read_text().splitlines()
    assert header == "row,probability"
    rows = torch.tensor([[float(field) for field in line.split(",")] for line in lines])
    assert torch.allclose(rows[:, 1], logits.sigmoid(), atol=1e-6)
    of_file = predicted_columns(SAVED, Path("clicks.csv"), NET)["probability"]
    assert rows[:, 1].numpy() == pytest.approx(of_file[rows[:, 0].int()], abs=1e-6)


def test_exports_compute_the_predictions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    served, half, new = tmp_path / "served", tmp_path / "half", write_clicks(tmp_path / "new.csv", 70, seed=2)
    export = ["export", "saved", "--module", NET, "--format=program"]
    main([*export, "--format=onnx", "--format=tables", f"--output={served}"])
    assert load_file(served / "tables.safetensors").keys() == {"user", "tags.mean", "tags.max", "tags.sum"}
    inputs = CustomModule(TrainedRun.read(SAVED, print), NET, in_memory=True).encode(texts_of(new))
    expected = predicted_columns(SAVED, new, NET)
    assert largest_difference(by_program(served, inputs), expected) < 1e-6
    assert largest_difference(by_onnx(served, inputs), expected) < 1e-6
    main([*export, "--dtype=bfloat16", f"--output={half}"])
    assert "log loss" in capsys.readouterr().out
    assert 1e-6 < largest_difference(by_program(half, inputs), expected) < 1e-2


@pytest.mark.parametrize(
    ("module", "error", "message"),
    [
        (None, HybridError, "saved was saved by a custom training loop; add --module"),
        ("net_of_clicks.py:None_", ConfigError, "None_"),
        ("net_of_clicks:SCRIPT", ConfigError, "SCRIPT"),
        ("net_of_clicks.py:connects", HybridError, "__main__"),
        ("net_of_clicks.py:Twice", HybridError, r"\[\d+\], not \[\d+, 2\]"),
    ],
)
def test_other_modules_are_refused(module: str | None, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        evaluate(SAVED, [], module=module)


def test_configured_run_has_another_module(tmp_path: Path) -> None:
    run = write_trained(tmp_path / "run", clicks_config(tmp_path))
    with pytest.raises(HybridError, match=r"item, tags, user, Net has tags\.max"):
        evaluate(run, [], module=NET)
