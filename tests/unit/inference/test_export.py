"""Exported and served models compute the predictions of ``hybrid predict``; modules of custom loops."""

import json
import os
import re
import resource
import runpy
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints import flip_a_bit
from support.commands import ROOT, code_block
from support.descriptors import redirected
from support.trained import (
    clicks_config,
    history_config,
    largest_difference,
    predicted_columns,
    texts_of,
    write_clicks,
    write_shop,
    write_trained,
)
from torch._ops import OpOverload
from torch.nn.functional import binary_cross_entropy_with_logits

from hybrid.checkpoint.checkpoint_folders import Manifest, shard_file
from hybrid.checkpoint.deltas import ChangedRows
from hybrid.config.loading import to_toml
from hybrid.embedding.placement import place
from hybrid.embedding.worker.table_shards import TableShards
from hybrid.errors import CheckpointError, HybridError
from hybrid.inference import table_export
from hybrid.inference.custom_module import CustomModule
from hybrid.inference.trained_module import load
from hybrid.inference.trained_run import TrainedRun
from hybrid.updates.update_rules import UpdateRules
from workers.cli import main
from workers.cli.model_commands import evaluate, export_run

# Runs a program in a process that cannot import this project.
ALONE = """
import sys
import torch
program, inputs, output = sys.argv[1:]
sys.modules["hybrid"] = sys.modules["workers"] = None
torch.save(torch.export.load(program).module()(*torch.load(inputs)), output)
"""


def shard(served: Path, table: str, index: int = 0) -> Path:
    """Return the path of a shard in an export."""
    return served / shard_file(table, index, Manifest.read(served / "manifest.json").tables[table][2])


Model = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


def program_of(served: Path) -> Model:
    """Return the program, as a function of inputs by name."""
    names = [each["name"] for each in json.loads((served / "preprocessing.json").read_text())["inputs"]]
    exported = torch.export.load(served / "program.pt2")
    operators = [node.target for node in exported.graph.nodes if isinstance(node.target, OpOverload)]
    assert {each.namespace for each in operators} == {"aten"}, "other programs have torch's operators only"
    program = exported.module()
    return lambda inputs: program(*[inputs[name] for name in names])


def onnx_of(served: Path) -> Model:
    """Return the ONNX model, as a function of inputs by name."""
    session = onnxruntime.InferenceSession(served / "model.onnx")
    content = json.loads((served / "preprocessing.json").read_text())
    assert [each.name for each in session.get_inputs()] == [each["name"] for each in content["inputs"]]
    names = [each["name"] for each in content["outputs"]]

    def predict(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        given = session.run(names, {name: each.numpy() for name, each in inputs.items()})
        return dict(zip(names, map(torch.from_numpy, given), strict=True))

    return predict


def check_served(run: Path, served: Path, new: Path) -> None:
    """Compare program and ONNX with ``hybrid predict`` on a new file, and on few of its rows."""
    model, columns = load(run), texts_of(new)
    inputs, expected = model.encode(columns), predicted_columns(run, new)
    assert min(values.std() for values in expected.values()) > 1e-3
    for exported in (program_of(served), onnx_of(served)):
        assert largest_difference(exported(inputs), expected) < 1e-6
        for size in (0, 1, 2):
            few = model.encode(pa.table({n: pa.array(v[:size], pa.string()) for n, v in columns.items()}))
            torch.testing.assert_close(exported(few), dict(model(few)), rtol=0, atol=1e-6, check_dtype=False)


def check_export(run: Path, served: Path, new: Path) -> None:
    """Export a run in all formats, and check it."""
    export_run(run, served, ["program", "onnx", "tables"], None)
    check_served(run, served, new)


@pytest.mark.long
@pytest.mark.parametrize(("net", "pooling"), [("ple", "sum"), ("deepfm", "max"), ("wide_deep", "mean")])
def test_other_nets_compute_the_predictions(tmp_path: Path, net: str, pooling: str) -> None:
    config = clicks_config(tmp_path, dense={"net": net}, embedding={"dim": 4, "pooling": pooling})
    run = write_trained(tmp_path / "run", config)
    check_export(run, tmp_path / "served", write_clicks(tmp_path / "new.csv", 70, seed=2))


def test_tasks_and_columns_of_every_kind_compute(shop_run: Path, shop_served: Path, tmp_path: Path) -> None:
    check_served(shop_run, shop_served, write_shop(tmp_path / "new.csv", 70, seed=2))
    content = json.loads((shop_served / "preprocessing.json").read_text())
    ids = {"type": "int64", "shape": ["ids of tags"]}
    assert content["inputs"][6:9] == [
        {"name": "tags", **ids},
        {"name": "tags.weights", "type": "float32", "shape": ["ids of tags"]},
        {"name": "tags.offsets", "type": "int64", "shape": ["samples + 1"]},
    ]
    assert [(each["name"], each["shape"], each["task"], each["kind"]) for each in content["outputs"]] == [
        ("click.probability", ["samples"], "click", "binary"),
        ("buy.probability", ["samples"], "buy", "binary"),
        ("spent.value", ["samples"], "spent", "regression"),
        ("stars.probability", ["samples", 5], "stars", "classes"),
    ]


HISTORY = "history = 'seen', candidate = 'item'"


@pytest.mark.long
@pytest.mark.parametrize("net", [f"din({HISTORY})", f"self_attention({HISTORY}, blocks = 1)", "dcn_v2"])
def test_sequences_compute_the_predictions(tmp_path: Path, net: str) -> None:
    tags = {} if net == "dcn_v2" else {"columns.tags": {"pooling": "sum"}}
    config = history_config(tmp_path, dense={"net": net}, **tags)
    run = write_trained(tmp_path / "run", config)
    check_export(run, tmp_path / "served", write_shop(tmp_path / "new.csv", 70, seed=2))


def test_a_column_with_the_name_of_an_output_is_refused(tmp_path: Path) -> None:
    """In ONNX, an input must not have the name of an output."""
    path = write_clicks(tmp_path / "new.csv", item="probability")
    config = clicks_config(tmp_path, data={"path": path, "sparse": ["user", "probability"]})
    run = write_trained(tmp_path / "run", config)
    with pytest.raises(HybridError, match="onnx: probability "):
        export_run(run, tmp_path / "none", ["onnx"], None)


@pytest.mark.long
def test_a_program_is_loaded_without_this_project(shop_run: Path, shop_served: Path, tmp_path: Path) -> None:
    model, new = load(shop_run), write_shop(tmp_path / "new.csv", 20, seed=2)
    inputs = model.encode(texts_of(new))
    torch.save([inputs[name] for name in model.input_names], tmp_path / "inputs.pt")
    command = [
        sys.executable,
        "-c",
        ALONE,
        shop_served / "program.pt2",
        tmp_path / "inputs.pt",
        tmp_path / "out",
    ]
    subprocess.run(list(map(str, command)), cwd=tmp_path, check=True, timeout=60)
    found = torch.load(tmp_path / "out")
    assert largest_difference(found, predicted_columns(shop_run, new)) < 1e-6


def test_export_in_shards_predicts_alike(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_export, "SHARD_BYTES", 64)
    served, again = tmp_path / "served", tmp_path / "again"
    export_run(run, served, ["tables"], None)
    export_run(served, again, ["tables"], None)
    assert Manifest.read(served / "manifest.json").tables["user"][2] > 2
    model = load(run)
    inputs = model.encode(texts_of(write_clicks(tmp_path / "new.csv", 70, seed=2)))
    expected = model(inputs)["probability"]
    for folder in (served, again):
        exported = load(folder)
        assert not [name for name, _ in exported.named_parameters() if name.startswith("tables")]
        assert all(exported.rows(name).equal(model.rows(name)) for name in model.table_names)
        assert exported(inputs)["probability"].equal(expected)


@pytest.mark.parametrize("damage", ["bit", "size", "missing"])
def test_a_damaged_shard_is_refused_by_name(run: Path, tmp_path: Path, damage: str) -> None:
    export_run(run, tmp_path / "served", ["tables"], None)
    path = shard(tmp_path / "served", "item")
    if damage == "bit":
        flip_a_bit(path)
    elif damage == "size":
        path.write_bytes(path.read_bytes()[:-4])
    else:
        path.unlink()
    with pytest.raises(CheckpointError, match=rf"^{path}: [^\n]*$"):
        load(tmp_path / "served")


def test_only_changed_shards_are_written(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_export, "SHARD_BYTES", 64)
    model = load(run)
    tables = table_export.TableExport(model, model.dtype)
    for folder in ("1", "2", "3"):
        (tmp_path / folder).mkdir()
    tables.write(tmp_path / "1", {})
    before = load(tmp_path / "1")
    expected = {name: model.rows(name).detach().clone() for name in model.table_names}
    expected["user"][5] = 7.0
    change = ChangedRows(np.array([5]), np.full((1, 4), 7.0, np.float32), np.empty(0, np.int64))
    tables.write(tmp_path / "2", {"user": [change]}, tmp_path / "1")
    shards = [path.relative_to(tmp_path / "1") for path in sorted((tmp_path / "1/tables").iterdir())]
    written = [path.name for path in shards if not (tmp_path / "1" / path).samefile(tmp_path / "2" / path)]
    assert [name.partition(".")[0] for name in written] == ["user"]
    tables.write(tmp_path / "3", {}, tmp_path / "absent")  # as on another file system
    for folder in ("2", "3"):
        after = load(tmp_path / folder)
        assert all(after.rows(name).equal(expected[name]) for name in expected)
    assert all(before.rows(name).equal(model.rows(name)) for name in expected)


def test_narrow_tables_and_programs_have_almost_the_predictions_of_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The net has one input, a bag, which needs another mode of torch's export."""
    config = clicks_config(tmp_path, data={"dense": [], "sparse": ["tags"]}, dense={"net": "dcn_v2"})
    run, served = write_trained(tmp_path / "run", config), tmp_path / "served"
    export_run(run, served, ["program", "tables"], "bfloat16")
    printed = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert printed["tables"] == "bfloat16"
    assert "before" in printed["auc"]
    model, narrow, program = load(run), load(served), program_of(served)
    rows = model.rows("tags").detach().bfloat16().float()
    texts = texts_of(write_clicks(tmp_path / "new.csv", 40, seed=2))
    for size in (0, 1, 40):
        inputs = model.encode({name: values[:size] for name, values in texts.items()})
        found = program(inputs)["probability"]
        assert (found.dtype, found.shape) == (torch.float32, (size,))
    assert 1e-6 < (model(inputs)["probability"] - found).abs().max() < 0.05
    assert {each.dtype for each in load_file(shard(served, "tags")).values()} == {torch.bfloat16}
    assert narrow.rows("tags").equal(rows)
    model.tables.to(torch.bfloat16)
    assert narrow(inputs)["probability"].equal(model(inputs)["probability"])


CUSTOM_NET = """
from torch import nn
from hybrid.models.dense_net import DenseNet

class Interaction(nn.Module):
    def forward(self, bottom_BD, pooled_BE):
        BODY

def build(config, input_spec, widths):
    return DenseNet(nn.Identity(), Interaction(), nn.Linear(WIDTH, 1))
"""


def custom_run(folder: Path, name: str, body: str, width: int, **sections: dict[str, object]) -> Path:
    """Write a run whose net has ``body`` as its interaction."""
    (folder / f"{name}.py").write_text(CUSTOM_NET.replace("BODY", body).replace("WIDTH", str(width)))
    return write_trained(folder / "run", clicks_config(folder, dense={"net": f"{name}:build"}, **sections))


def test_a_custom_net_may_reshape_and_keep_row_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With float64, and bfloat16 in two tables."""
    monkeypatch.syspath_prepend(tmp_path)
    body = "return pooled_BE[:, :8].reshape(pooled_BE.shape[0], 2, 4).sum(1)"
    sections: dict[str, dict[str, object]] = {
        "train": {"dtype": "float64"},
        "embedding": {"dim": 4, "dtype": "bfloat16"},
        "tables.item": {"dtype": "train"},
    }
    run, served = custom_run(tmp_path, "reshaping", body, 4, **sections), tmp_path / "served"
    new = write_clicks(tmp_path / "new.csv", 70, seed=2)
    check_export(run, served, new)
    assert {each.dtype for each in load_file(shard(served, "user")).values()} == {torch.bfloat16}
    model, exported = load(run), load(served)
    for name in model.table_names:
        assert exported.rows(name).dtype == (torch.float64 if name == "item" else torch.bfloat16)
        assert exported.rows(name).equal(model.rows(name))
    inputs = model.encode(texts_of(new))
    assert exported(inputs)["probability"].equal(model(inputs)["probability"])
    program = torch.export.load(served / "program.pt2")
    dtypes = [each.dtype for name, each in program.state_dict.items() if "table" in name]
    assert sorted(dtypes, key=str) == [torch.bfloat16, torch.bfloat16, torch.float64]


def test_an_operator_that_onnx_lacks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    body = "return pooled_BE.repeat_interleave(pooled_BE.new_ones(4).long(), dim=1)"
    run = custom_run(tmp_path, "repeating", body, 4, data={"sparse": ["item"]})
    with pytest.raises(HybridError, match=r"^--format onnx: [^\n]*$"):
        export_run(run, tmp_path / "other", ["tables", "onnx"], None)
    assert not list(tmp_path.glob("*other*"))


@pytest.mark.parametrize("export_format", ["program", "onnx", "tables"])
def test_a_failed_export_leaves_no_files(run: Path, tmp_path: Path, export_format: str) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, hard))  # as a full disk
    try:
        with pytest.raises(HybridError, match="File too large"):
            export_run(run, tmp_path / "served", [export_format], None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert not list(tmp_path.iterdir())
    (tmp_path / "served").mkdir()
    with pytest.raises(HybridError, match="exists already"):
        export_run(run, tmp_path / "served", ["tables"], None)


SCRIPT = """
import torch
from torch import nn
import hybrid

HALF = torch.bfloat16

class Net(nn.Module):
    def __init__(self, data):
        super().__init__()
        self.user = hybrid.Embedding(data.num_rows["user"], 3, ids="user", padding_idx=0, dtype=HALF)
        modes = ("mean", "max", "sum")
        self.tags = nn.ModuleDict({m: hybrid.EmbeddingBag(3, 3, mode=m, padding_idx=0) for m in modes})
        self.head = nn.Linear(12 + len(data.dense_columns), 1)

    def forward(self, batch):
        tags = hybrid.Jagged(batch["tags"].values % 3, batch["tags"].offsets)
        bags = [self.tags["mean"](tags), self.tags["max"](tags.values, tags.offsets[:-1])]
        bags.append(self.tags["sum"](tags, per_sample_weights=tags.values + 0.5))
        return self.head(torch.cat([self.user(batch["user"]), *bags, batch["dense"]], dim=1))

class Pair(Net):
    def forward(self, batch):
        return super().forward(batch), batch

def train(data=None):
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

if __name__ == "__main__":
    train()
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a custom training loop; read-only."""
    folder = tmp_path_factory.mktemp("loop")
    (folder / "clicks.toml").write_text(to_toml(clicks_config(folder)))
    (folder / "clicks_net.py").write_text(SCRIPT)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        with pytest.warns(UserWarning, match=r"ids .*not looked up"):
            runpy.run_path("clicks_net.py", run_name="__main__")
    return folder / "saved"


def test_custom_modules_are_exported(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logits, labels = torch.load(saved.with_name("expected.pt"))
    new, net = write_clicks(tmp_path / "new.csv", 70, seed=2), f"{saved.parent}/clicks_net.py:Net"
    arguments = [str(saved), "--module", net]
    main(["evaluate", *arguments])
    printed = dict(re.findall(r"^(.*?)  +(.*)$", capsys.readouterr().out, re.MULTILINE))
    loss = binary_cross_entropy_with_logits(logits, labels)
    assert float(printed["log loss"]) == pytest.approx(loss.item(), abs=1e-4)
    main(["predict", *arguments, "--output", str(tmp_path / "p.csv")])
    lines = (tmp_path / "p.csv").read_text().splitlines()
    probabilities = torch.tensor([float(line.split(",")[1]) for line in lines[1:]])
    assert torch.allclose(probabilities, logits.sigmoid(), atol=1e-6)
    main(["export", *arguments, "--format=program", f"--output={tmp_path / 'served'}"])
    assert f"wrote               {tmp_path / 'served/program.pt2'}\n" in capsys.readouterr().out
    main(["export", *arguments, "--format=tables", "--dtype=bfloat16", f"--output={tmp_path / 'half'}"])
    model, half = (
        CustomModule(TrainedRun.read(each, print), net, in_memory=True) for each in (saved, tmp_path / "half")
    )
    inputs, expected = model.encode(texts_of(new)), predicted_columns(saved, new, net)
    assert largest_difference(model(dict(reversed(inputs.items()))), expected) < 1e-6
    assert largest_difference(program_of(tmp_path / "served")(inputs), expected) < 1e-6
    assert 1e-6 < largest_difference(half(inputs), expected) < 1e-2
    with closing(TableShards(place([], num_workers=1), 0, UpdateRules(1), torch.float32)) as shards:
        with pytest.raises(CheckpointError, match="half: is an export"):
            shards.load(tmp_path / "half", 1)


def test_other_modules_are_refused(saved: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(saved.parent)
    for file in (Path("other/clicks_net.py"), Path("scripts/code.py")):
        file.parent.mkdir()
        file.touch()
    for folder, module, message in (
        (saved, None, "--module"),
        (saved, "clicks_net:SCRIPT", "SCRIPT"),
        (saved, "clicks_net.py:train", "__main__"),
        (saved, "clicks_net.py:Pair", "not tuple"),
        (saved, "builtins:repr", "not a str"),
        (saved, "clicks_net.py", "'clicks_net.py': "),
        (saved, ":Net", "':Net': must be"),
        (saved, "other/clicks_net:Net", "FILE.py:FUNCTION"),
        (saved, "missing/clicks_net.py:Net", "'missing/clicks_net.py': "),
        (saved, f"{'x' * 300}.py:Net", "File name too long"),
        (saved, "other/clicks_net.py:Net", "module of this name is .*"),
        (saved, "scripts/code.py:InteractiveConsole", "module of this name is .*code.py"),
        (run, "clicks_net.py:Net", r"has item, tags, user, Net has tags\.max"),
    ):
        with pytest.raises(HybridError, match=message):
            evaluate(folder, [], module=module)


PAGE = "docs/serving.md"


def test_the_documented_server_computes_the_predictions(
    shop_run: Path,
    shop_served: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With missing, unknown and differently written values, and invalid rows."""
    new = write_shop(tmp_path / "new.csv", 150, seed=8)
    labels = "0,0,0,0,1"
    bad = [
        f"2024-02-30,1,65,u1,i1,a:1,i1,{labels}",
        f"24:00,1,65,u1,i1,a:1,i1,{labels}",
        f"1706693400000,1,65,u1,i1,a:1,i1,{labels}",
        *(f"2024-02-01,{price},65,u1,i1,a:1,i1,{labels}" for price in ("much", "1_0", "1e39", "nan")),
        f"2024-02-01,1,old,u1,i1,a:1,i1,{labels}",
        *(f"2024-02-01,1,65,u1,i1,{tags},i1,{labels}" for tags in ("a:1|b", "a:-1", "a:1|b:1|c:1|d:1")),
        f"2024-02-01,1,65,u1,i1,a:1,i1,{labels},0",
        "2024-02-01,1,65,u1,i1,a:1",
    ]
    more = [
        f"?,?,?,?,?,,,{labels}",
        f"2024-02-29T23:59:59.5+02:00,1,65,u1,i1,a:b:1|?:2| a:1e-1,i1|?|i2|zz,{labels}",
        f",,3,no\u2028body,7.00,a:1|other:2||b:1,,{labels}",
        f"2024-02-01,1e1,0,?, 7,,i1,{labels}",
    ]
    new.write_text("\ufeff" + new.read_text() + "".join(f"{line}\n" for line in (*bad, *more)))
    expected = predicted_columns(shop_run, new)
    capsys.readouterr()
    program = ROOT / "examples/serve_onnx.py"
    assert not re.search("(from|import) hybrid", program.read_text())
    monkeypatch.setattr(sys, "argv", [str(program), str(shop_served), str(new)])
    runpy.run_path(str(program))
    lines = capsys.readouterr().out.splitlines()
    stop = 150 + len(bad)
    assert all(line.startswith(f"{row},invalid row: ") for row, line in enumerate(lines[150:stop], start=150))
    printed = [[float(each) for each in line.split(",")] for line in lines[:150] + lines[stop:]]
    assert [row for row, *_ in printed] == [*range(150), *range(stop, stop + len(more))]
    for column, values in enumerate(expected.values(), start=1):
        assert [line[column] for line in printed] == pytest.approx(values.tolist(), abs=1e-6)
    assert len(printed[0]) == 1 + len(expected)


def test_the_documented_notebook_computes_the_predictions(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run, tmp_path / "runs/NAME")
    new = tmp_path / "new.csv"
    new.write_text("price,age,user,item,tags\n9.5,30,u7,i3,a|b\n")
    expected = predicted_columns(run, new)["probability"].tolist()
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {}
    exec(code_block(PAGE, "python", 'hybrid.load("runs/NAME'), found)
    assert found["probabilities"].tolist() == pytest.approx(expected, abs=1e-6)


def test_a_row_is_predicted_at_once(run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A client writes a row and waits for its line before it writes the next."""
    header, *rows = write_clicks(tmp_path / "new.csv", 5, seed=4).read_text().splitlines()
    (rows_read, rows_written), (read, written) = os.pipe(), os.pipe()
    lines_read: list[str] = []

    def run_client() -> None:
        with os.fdopen(rows_written, "w") as requests, os.fdopen(read) as lines:
            requests.write(f"{header}\n")
            for number, row in enumerate(rows):
                requests.write(f"{row}\n")
                requests.flush()
                while not (lines_read and lines_read[-1].startswith(f"{number},")):
                    lines_read.append(lines.readline())

    client = threading.Thread(target=run_client, daemon=True)
    client.start()
    with redirected(0, rows_read), redirected(1, written):
        main(["predict", str(run), "--input", "-", "--keep", "user"])
    client.join(10)
    for descriptor in (rows_read, written):
        os.close(descriptor)
    assert lines_read[0] == "row,user,probability\n"
    assert [line.split(",")[:2] for line in lines_read[1:]] == [
        [str(number), row.split(",")[3]] for number, row in enumerate(rows)
    ]
    assert "wrote 5 predictions to standard output" in capfd.readouterr().err
