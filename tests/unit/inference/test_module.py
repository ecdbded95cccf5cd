"""A module from a checkpoint computes what the training engine computes."""

import dataclasses
from itertools import cycle
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pytest
import torch
from support.trained import (
    clicks_config,
    engine_columns,
    history_config,
    largest_difference,
    texts_of,
    write_clicks,
    write_shop,
    write_trained,
)
from torch import Tensor, nn

import hybrid
from hybrid.checkpoint.checkpoint_folders import MANIFEST_FILE, Manifest, step_folder, write_text
from hybrid.checkpoint.checkpoint_reader import MappedRows
from hybrid.config.loading import CONFIG_FILE
from hybrid.config.sections import HISTORY_NETS, NETS
from hybrid.errors import CheckpointError, ConfigError, DataError
from hybrid.inference.trained_module import load


def check_outputs(run: Path, inputs: Path, tolerance: float) -> list[str]:
    """Compare the predictions with the engine's, and return the names of their columns."""
    model, expected = load(run), engine_columns(run, inputs)
    with torch.no_grad():
        found = model(model.encode(texts_of(inputs)))
    assert min(values.std() for values in expected.values()) > 1e-3, "equal predictions compare nothing"
    assert largest_difference(found, expected) < tolerance
    return list(expected)


WITHOUT_HISTORY = [name for name in NETS if name not in (*HISTORY_NETS, "two_towers")]


@pytest.mark.parametrize(("net", "pooling"), [*zip(WITHOUT_HISTORY, cycle(["sum", "mean", "max"]))])
def test_outputs_of_built_in_nets_equal_the_engine(tmp_path: Path, net: str, pooling: str) -> None:
    config = clicks_config(
        tmp_path,
        dense={"net": net},
        train={"dtype": "float64", "batch_size": 32},
        embedding={"dim": 4, "pooling": pooling, "placement": "row"},
    )
    run = write_trained(tmp_path / "run", config)
    check_outputs(run, write_clicks(tmp_path / "new.csv", 70, seed=2), 1e-12)
    model = load(run)
    assert sorted(model.table_names) == ["item", "tags", "user"]
    assert all(type(table) is nn.Embedding for table in model.tables)


@pytest.mark.parametrize(
    "sections",
    [
        {"dense": {"remote_mlp": [8]}},
        {"dense": {"autocast": "bfloat16"}},
        {"embedding": {"dtype": "bfloat16"}},
        {"tables.user": {"dtype": "bfloat16"}},
        {"data": {"vocabulary": "hash(50)", "numeric_scaling": "standardize(log = true)"}},
        {"data": {"dense": []}},
        {"tables.shared": {"features": ["user", "tags"]}},
    ],
    ids=lambda sections: "-".join(f"{k}.{n}" for k, values in sections.items() for n in values),
)
def test_other_outputs_equal_the_engine(tmp_path: Path, sections: dict[str, dict[str, object]]) -> None:
    run = write_trained(tmp_path / "run", clicks_config(tmp_path, **sections))
    check_outputs(run, write_clicks(tmp_path / "new.csv", 70, seed=2), 1e-6)


def test_outputs_of_several_tasks_and_weighted_ids_equal_the_engine(shop_run: Path, tmp_path: Path) -> None:
    check_outputs(shop_run, write_shop(tmp_path / "new.csv", 70, seed=2), 1e-6)


def test_long_sequences_are_cut_or_rejected(tmp_path: Path) -> None:
    """Sequences that are given as rows are cut after the first ones."""
    model = load(write_trained(tmp_path / "run", history_config(tmp_path)))
    columns = {"price": ["1", "2"], "user": ["u1", "u2"], "item": ["i1", "i2"]}
    columns |= {"seen": ["i0|i1|i2|i3", ""], "tags": ["a:1|b:2|c:3", ""]}
    batch = model.encode(columns)
    cut = model.encode({**columns, "seen": ["i1|i2|i3", ""]})
    assert torch.equal(batch["seen"], cut["seen"])
    longer = {**cut, "seen": torch.cat([cut["seen"], cut["seen"]]), "seen.offsets": torch.tensor([0, 6, 6])}
    assert torch.equal(*(torch.cat([*model(each).values()]) for each in (longer, cut)))
    with pytest.raises(DataError, match=r"^encode\(columns\): row 0: "):
        model.encode({**columns, "tags": ["a:1|b:2|c:3|d:4", ""]})


@pytest.mark.parametrize(
    "tags",
    [
        ["a:0.5|b:2", "", "zz:1"],
        [["a:0.5", "b:2"], [], ["zz:1"]],
        pa.array([[("a", 0.5), ("b", 2)], [], [("zz", 1)]], pa.map_(pa.string(), pa.float32())),
        [[{"id": "a", "weight": 0.5}, {"id": "b", "weight": 2}], [], [{"id": "zz", "weight": 1}]],
    ],
)
def test_weighted_ids_have_several_forms(shop_run: Path, tags: object) -> None:
    model = load(shop_run)
    others = {name: values[:3] for name, values in texts_of(shop_run.parent / "shop.csv").items()}
    batch = model.encode(pa.table({**others, "tags": tags}))
    assert batch["tags.weights"].tolist() == [0.5, 2, 1]
    assert batch["tags.offsets"].tolist() == [0, 2, 2, 3]
    assert batch["tags"][2] == 0
    names = ("tags", "tags.weights")
    jagged = {**batch, **{name: hybrid.Jagged(batch[name], batch["tags.offsets"]) for name in names}}
    found, expected = ([each.tolist() for each in model(inputs).values()] for inputs in (jagged, batch))
    assert found == expected
    for tags in ([None] * 3, [[]] * 3):
        assert model.encode({**others, "tags": tags})["tags.offsets"].tolist() == [0, 0, 0, 0]


def test_inputs_of_one_name_are_refused(tmp_path: Path) -> None:
    new = write_clicks(tmp_path / "dense.csv")
    new.write_text(new.read_text().replace("user", "tags.offsets", 1))
    config = clicks_config(tmp_path, data={"path": new, "sparse": ["tags.offsets", "item", "tags"]})
    with pytest.raises(ConfigError, match=r"data\.sparse = \['tags\.offsets'\]: "):
        load(write_trained(tmp_path / "run", config))


ROW: dict[str, list[object]] = {"age": [1], "user": ["u"], "item": ["i"], "tags": [[]]}


@pytest.mark.parametrize(
    ("columns", "error", "message"),
    [
        ({"price": [1.0]}, ConfigError, r"^data\.dense = 'age'"),
        ({**ROW, "price": ["much"]}, DataError, "row 0: price "),
        ({"price": [1.0], "age": [1, 2]}, DataError, r"^encode\(columns\): "),
        ({**ROW, "price": [1.0], "user": [2**70]}, DataError, r"^encode\(columns\): "),
    ],
)
def test_invalid_raw_values_are_refused(
    run: Path, columns: dict[str, list[object]], error: type[Exception], message: str
) -> None:
    model = load(run)
    with pytest.raises(error, match=message):
        model.encode(columns)


class Net(nn.Module):
    """A custom module."""

    def __init__(self, rows: int = 9) -> None:
        super().__init__()
        self.user = hybrid.Embedding(rows, 3, ids="user", padding_idx=2)
        self.tags = hybrid.EmbeddingBag(5, 3, ids="tags", mode="mean")
        self.linear = nn.Linear(3, 1)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        out: Tensor = self.linear(self.user(batch["user"]) + self.tags(batch["tags"]))
        return out.squeeze(1)


BATCH = {"user": torch.tensor([0, 2, 8]), "tags": torch.tensor([[0, 1], [2, 2], [4, 0]])}


def test_module_of_a_custom_loop_is_loaded_into_modules_of_torch(tmp_path: Path) -> None:
    cluster, folder = hybrid.connect(), tmp_path / "step-1"
    trained = cluster.distribute(Net())
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    for batch in cluster.batches(BATCH):
        cluster.backward(trained(batch).square())
        optimizer.step()
    cluster.save(folder, optimizer)
    model = load(folder, Net())
    assert type(model.user) is nn.Embedding
    assert type(model.tags) is nn.EmbeddingBag
    with torch.no_grad():
        assert torch.allclose(model(BATCH), trained(BATCH), atol=1e-7)
    with pytest.raises(CheckpointError, match="tags, user, Sequential"):
        load(folder, nn.Sequential(hybrid.Embedding(9, 3)))
    with pytest.raises(CheckpointError, match="table user"):
        load(folder, Net(rows=10))
    with pytest.raises(CheckpointError, match=r"hybrid\.load\(FOLDER, MODULE\)"):
        load(folder)


@pytest.mark.parametrize(
    ("net", "before", "after"),
    [
        ("dlrm", "top_mlp = [256, 128]", "top_mlp = [1000000, 1000000]"),
        ("dlrm", "remote_mlp = [8]", "remote_mlp = [4000000000, 4000000000]"),
        ("wide_deep", "dim = 4", "dim = 1000000000"),
        ("mmoe", 'net = "mmoe"', 'net = "mmoe(experts = 1000)"'),
    ],
)
def test_a_net_of_other_shapes_is_not_built(net: str, before: str, after: str, tmp_path: Path) -> None:
    """A foreign run of a few bytes must not fill the memory."""
    remote = {"remote_mlp": [8]} if "remote" in before else {}
    dense = {"net": net, "top_mlp": [256, 128], **remote}
    run = write_trained(tmp_path / "run", clicks_config(tmp_path, dense=dense))
    folder = step_folder(run, 1)
    text = (folder / CONFIG_FILE).read_text()
    assert before in text
    manifest = Manifest.read(folder / MANIFEST_FILE)
    changed = write_text(folder, CONFIG_FILE, text.replace(before, after))
    dataclasses.replace(manifest, files=manifest.files | changed).write(folder)
    with pytest.raises(CheckpointError, match=f"^{folder}: "):
        load(run)


def test_a_table_larger_than_memory_is_read_row_by_row(tmp_path: Path) -> None:
    """The files have holes except for one row; the system would not map them for writing."""
    num_bytes = psutil.virtual_memory().total + psutil.swap_memory().total
    num_rows, shards = num_bytes // 256, []
    for shard in range(2):
        path = tmp_path / f"shard-{shard}"
        with path.open("wb") as file:
            file.seek((num_rows - 3) * 256)
            file.write(np.full(64, 10.0 + shard, np.float32).tobytes())
            file.truncate(num_rows * 256)
        shards.append({"weight": np.memmap(path, np.float32, "r", shape=(num_rows, 64))})
    rows_N = np.array([2 * num_rows - 5, 0, 2 * num_rows - 6, 2 * num_rows - 5])
    vectors_ND = MappedRows(shards, 2 * num_rows, has_ranges=False).read(rows_N)["weight"]
    assert vectors_ND[:, 7].tolist() == [11.0, 0.0, 10.0, 11.0]
