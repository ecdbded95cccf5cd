"""Growing tables of a checkpoint: loaded, mapped and exported, they read what a dictionary holds."""

import runpy
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import onnxruntime
import pyarrow as pa
import pytest
import torch
from support.commands import ROOT
from support.trained import (
    Shapes,
    clicks_config,
    largest_difference,
    predicted_columns,
    texts_of,
    write_clicks,
    write_trained,
)
from torch import Tensor, nn

import hybrid
from hybrid import Jagged
from hybrid.checkpoint.checkpoint_folders import Files, Manifest, shard_file
from hybrid.checkpoint.stored_keys import Arrays
from hybrid.checkpoint.tensor_file import write_tensors
from hybrid.config import RunConfig
from hybrid.config.loading import to_toml
from hybrid.data.values.canonical import compute_keys
from hybrid.embedding.initial_rows import random_rows
from hybrid.embedding.table_spec import Growth, OptimizerSpec, Pooling, TableSpec
from hybrid.engine.model_builder import Blueprint
from hybrid.inference import table_export
from hybrid.inference.custom_module import CustomModule
from hybrid.inference.table_modules import GrowingTable, MappedTable, initial_rows, read_by_key
from hybrid.inference.trained_module import ConfiguredModule, load
from hybrid.inference.trained_run import TrainedRun
from workers.cli.command_line import main
from workers.cli.model_commands import export_run

NUM_SHARDS = 3
M = 2**64
KNOWN = [*(f"u{i}" for i in range(10)), "7", "i1", "a", "b"]  # of the values of write_clicks
BFLOAT16 = torch.bfloat16
EXTREME = [0, 1, M - 1, 2**63 - 1, 2**63, *(round(M / 3) * i + d for i in (1, 2) for d in (-1, 0, 1))]


def draw_rows(dim: int, dtype: torch.dtype) -> dict[int, Tensor]:
    """Return rows by their keys, as uint64: of known values, and at the ends of shards."""
    draw = torch.Generator().manual_seed(len(EXTREME))
    keys = {*compute_keys(pa.array(KNOWN)).view(np.uint64).tolist(), *EXTREME}
    return {key: torch.randn(dim, generator=draw, dtype=dtype) for key in sorted(keys)}


def shard_tensors(rows: Mapping[int, Tensor], index: int, count: int) -> dict[str, Tensor]:
    """Return the tensors of a shard: its rows, and what training needs."""
    keys = [key for key in sorted(rows) if index * 1024 <= (key >> 54) * count < (index + 1) * 1024]
    dim = len(next(iter(rows.values())))
    weight_ND = torch.stack([rows[key] for key in keys]) if keys else torch.empty(0, dim)
    keys_N = torch.from_numpy(np.array(keys, np.uint64).view(np.int64))
    pending = {
        f"pending_{name}": torch.zeros(0, dtype=torch.int64) for name in ("keys", "counts", "last_steps")
    }
    of_rows = {name: torch.ones_like(keys_N) for name in ("counts", "last_steps")}
    pending["steps_before"] = torch.zeros(1, dtype=torch.int64)
    return {"keys": keys_N, "weight": weight_ND, "sum": weight_ND.abs(), **of_rows, **pending}


def write_grown(folder: Path, config: RunConfig) -> dict[str, dict[int, Tensor]]:
    """Write a run whose tables all grow; return their rows by key."""
    grown: dict[str, dict[int, Tensor]] = {}

    def write_tables(partial: Path, blueprint: Blueprint) -> tuple[Files, Shapes]:
        files = Files()
        for table in blueprint.tables:
            dtype = BFLOAT16 if table.has_bfloat16_rows else blueprint.dtype
            grown[table.name] = draw_rows(table.dim, dtype)
            for index in range(NUM_SHARDS):
                tensors = shard_tensors(grown[table.name], index, NUM_SHARDS)
                files |= write_tensors(partial, shard_file(table.name, index, NUM_SHARDS), tensors)
        return files, {table.name: (0, table.dim, NUM_SHARDS) for table in blueprint.tables}

    write_trained(folder, config, write_tables)
    return grown


class Dictionary(nn.Module):
    """A table as a dictionary of rows by key."""

    def __init__(self, table: TableSpec, rows: Mapping[int, Tensor], seed: int) -> None:
        super().__init__()
        self.table, self.rows, self.seed = table, rows, seed

    def forward(self, keys_L: Tensor) -> Tensor:
        keys = keys_L.numpy().view(np.uint64)
        table = self.table
        initial = random_rows(keys, table, self.seed)
        if table.growth is not None and table.growth.unknown == "zeros":
            initial = torch.zeros_like(initial)
        dtype = next(iter(self.rows.values())).dtype
        found = [self.rows.get(key, row.to(dtype)) for key, row in zip(keys.tolist(), initial, strict=True)]
        return torch.stack(found) if found else initial.to(dtype)


def with_dictionaries(run: Path, grown: Mapping[str, Mapping[int, Tensor]]) -> ConfiguredModule:
    """Return the model of a run with dictionaries instead of its tables."""
    trained = TrainedRun.read(run, print)
    model = ConfiguredModule(trained)
    for index, table in enumerate(trained.blueprint.tables):
        model.tables[index] = Dictionary(table, grown[table.name], trained.config.run.seed)
    return model


@pytest.mark.parametrize(
    ("vocabulary", "init", "dtype"),
    [
        ("grow", "uniform", "float32"),
        ("grow(2, max_rows = 9000)", "normal", "float64"),
        ('grow(unknown = "zeros")', "uniform", "float32"),
        ("grow", "zeros", "float32"),
        ("grow", "uniform", "bfloat16"),
    ],
)
def test_keys_read_what_a_dictionary_holds(tmp_path: Path, vocabulary: str, init: str, dtype: str) -> None:
    inits = {f"tables.{name}": {"init": init} for name in ("user", "item", "tags")}
    sections: dict[str, dict[str, object]] = {"data": {"vocabulary": vocabulary}}
    sections |= (
        {"embedding": {"dtype": dtype, "dim": 4}} if dtype == "bfloat16" else {"train": {"dtype": dtype}}
    )
    run = tmp_path / "run"
    grown = write_grown(run, clicks_config(tmp_path, **sections, **inits))
    new = write_clicks(tmp_path / "new.csv", 70, seed=2)
    model, expected = load(run), with_dictionaries(run, grown)
    mapped = ConfiguredModule(TrainedRun.read(run, print), in_memory=False)
    assert [type(table) for table in mapped.tables] == 3 * [MappedTable]
    draw = torch.Generator().manual_seed(1)
    keys = torch.randint(-(2**63), 2**63 - 1, (50,), generator=draw)
    keys = torch.cat([keys, torch.tensor([(key ^ 2**63) - 2**63 for key in grown["user"]]), keys[:3]])
    for table, of_file, dictionary in zip(model.tables, mapped.tables, expected.tables, strict=True):
        for some in (keys, keys[:1], keys[:0]):
            assert table(some).equal(dictionary(some))
            assert of_file(some).equal(dictionary(some))
    with torch.no_grad():
        batch = model.encode(texts_of(new))
        found, right = model(batch), expected(batch)
    assert right["probability"].std() > 1e-3
    assert found["probability"].equal(right["probability"])
    assert largest_difference(found, predicted_columns(run, new)) < 1e-6
    assert model.rows("user").shape == (len(grown["user"]), 4)
    assert model.keys("user").numpy().view(np.uint64).tolist() == [*grown["user"]]


def test_exported_models_have_keys_as_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unknown users read initial rows, other unknown values read zeros; also in programs of custom loops."""
    monkeypatch.setattr(table_export, "SHARD_BYTES", 64)
    run, served = tmp_path / "run", tmp_path / "served"
    data = {"vocabulary": 'grow(unknown = "zeros")', "sparse": ["user", "tags"], "dense": []}
    net = {"net": "dcn_v2(cross_layers = 1)", "top_mlp": [4]}
    sections = {"columns.user": {"vocabulary": "grow"}, "columns.tags": {"pooling": "max"}}
    grown = write_grown(run, clicks_config(tmp_path, data=data, dense=net, **sections))
    export_run(run, served, ["onnx", "tables"], None)
    model = load(run)
    session = onnxruntime.InferenceSession(served / "model.onnx")
    columns = texts_of(new := write_clicks(tmp_path / "new.csv", 70, seed=2))
    for size in (0, 1, 2, 70):
        batch = model.encode({name: values[:size] for name, values in columns.items()})
        expected = model(batch)["probability"]
        (found,) = session.run(None, {name: batch[name].numpy() for name in model.input_names})
        torch.testing.assert_close(torch.from_numpy(found), expected, rtol=0, atol=1e-6)
    monkeypatch.setattr(sys, "argv", ["serve_onnx.py", str(served), str(new)])
    capsys.readouterr()
    runpy.run_path(str(ROOT / "examples/serve_onnx.py"))
    printed = [float(line.split(",")[1]) for line in capsys.readouterr().out.splitlines()]
    assert printed == pytest.approx(expected.tolist(), abs=1e-6)
    manifest = Manifest.read(served / "manifest.json")
    assert manifest.tables["user"] == (0, 4, 16)
    replace(manifest, step=0).write(served)  # as of a run that has rows of its initial model, and no step
    exported = load(served)
    assert exported.keys("user").numpy().view(np.uint64).tolist() == [*grown["user"]]
    assert exported.rows("user").equal(torch.stack([*grown["user"].values()]))
    assert exported(batch)["probability"].equal(expected)


SCRIPT = """
import torch
from torch import nn
import hybrid

class Net(nn.Module):
    def __init__(self, data=None):
        super().__init__()
        growth = hybrid.Growth(admit_after=20)
        self.user = hybrid.Embedding(None, 3, growing=growth, ids="user", dtype=torch.bfloat16, init_scale=1)
        growth = hybrid.Growth(admit_after=20, unknown="zeros")
        self.tags = hybrid.EmbeddingBag(None, 3, growing=growth, mode="max", ids="tags", padding_idx=PADDING)
        self.head = nn.Linear(6, 1)

    def forward(self, batch):
        return self.head(torch.cat([self.user(batch["user"]), self.tags(batch["tags"])], dim=1))

if __name__ == "__main__":
    cluster = hybrid.connect("clicks.toml")
    train, test = cluster.prepare()
    model = cluster.distribute(Net())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for epoch in range(12):
        for batch in cluster.batches(train):
            cluster.backward(nn.functional.softplus(model(batch) * (1 - 2 * batch["label"].unsqueeze(1))))
            optimizer.step()
    cluster.save("saved", optimizer)
    with torch.no_grad():
        outputs = [model(batch).squeeze(1) for batch in cluster.batches(test)]
    torch.save(torch.cat(outputs), "expected.pt")
"""


def test_tables_of_a_custom_loop_are_read_by_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clicks.toml").write_text(to_toml(clicks_config(tmp_path, data={"vocabulary": "grow"})))
    padding = int(compute_keys(pa.array(["a"]))[0])
    (tmp_path / "grown_net.py").write_text(SCRIPT.replace("PADDING", str(padding)))
    net = runpy.run_path("grown_net.py", run_name="__main__")["Net"]
    expected = torch.load("expected.pt")
    assert expected.std() > 1e-3
    arguments = ("saved", "--module", "grown_net.py:Net")
    main(["predict", *arguments, "--output", "p.csv"])
    lines = (tmp_path / "p.csv").read_text().splitlines()[1:]
    found = torch.tensor([float(line.split(",")[1]) for line in lines])
    assert torch.allclose(found, expected.sigmoid(), atol=1e-6)
    model = CustomModule(TrainedRun.read(tmp_path / "saved", print), "grown_net.py:Net", in_memory=True)
    assert 0 < len(model.keys("user")) < 20, "some users have no row"
    batch = model.encode(texts_of(write_clicks(tmp_path / "new.csv", 70, seed=2)))
    tags = Jagged(batch["tags"], batch["tags.offsets"])
    loaded = hybrid.load("saved", net())({"user": batch["user"], "tags": tags})
    assert torch.allclose(loaded.squeeze(1).sigmoid(), model(batch)["probability"], atol=1e-6)
    main(["export", *arguments, "--output=served", "--format=program"])
    program = torch.export.load("served/program.pt2").module()
    exported = program(*(batch[name] for name in model.input_names))
    assert torch.allclose(exported["probability"], model(batch)["probability"], atol=1e-6)


@pytest.mark.parametrize("init", ["uniform", "normal"])
@pytest.mark.parametrize(("dim", "scale"), [(1, 0.001), (7, 1 / 3), (16, 1.0)])
def test_initial_rows_have_the_bits_of_training(init: str, dim: int, scale: float) -> None:
    spec = TableSpec(
        *("t", 0, dim, Pooling.SUM, ("t",), OptimizerSpec("sgd", 0.1), scale), init=init, growth=Growth()
    )
    keys = np.random.default_rng(0).integers(0, M, 5000, np.uint64)
    keys[: len(EXTREME)] = EXTREME
    rows = initial_rows(torch.from_numpy(keys.view(np.int64)), spec, 2**40 + 3)
    assert rows.equal(random_rows(keys, spec, 2**40 + 3))


def test_a_table_without_rows_reads_initial_rows_of_any_key() -> None:
    spec = TableSpec(*("t", 0, 2, Pooling.SUM, ("t",), OptimizerSpec("sgd", 0.1), 1.0), growth=Growth())
    empty: Arrays = {"keys": np.empty(0, np.int64), "weight": np.empty((0, 2), np.float32)}
    keys = np.array(EXTREME, np.uint64)
    keys_L = torch.from_numpy(keys.view(np.int64))
    expected = random_rows(keys, spec, 3)
    assert GrowingTable(spec, 3, [empty], torch.float32)(keys_L).equal(expected)
    read = partial(read_by_key, shards=[empty], table=spec, seed=3)
    assert MappedTable(read, [empty], torch.float32)(keys_L).equal(expected)
