"""The initial model of a run: rows by value from another run or an export, and what does not fit."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from support.trained import clicks_config, shop_config, write_clicks, write_shop, write_trained
from torch import Tensor

from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.config import RunConfig
from hybrid.data.encode.feature_encoder import FeatureEncoder
from hybrid.data.prepare.preparation import prepare
from hybrid.embedding.placement import place
from hybrid.embedding.worker.table_shards import TableShards
from hybrid.engine.initial_model import InitialModel
from hybrid.errors import ConfigError
from hybrid.updates.update_rules import UpdateRules
from workers.cli.model_commands import export_run
from workers.jobs.comparison import VALUE, stored_tables

Tensors = dict[str, dict[str, Tensor]]  # rows and optimizer state, by table and name
Sections = Mapping[str, Mapping[str, Any]]


class Started(NamedTuple):
    """A new run: its tables, its encoder, and its console output."""

    tensors: Tensors
    encoder: FeatureEncoder
    matches: str
    notes: str
    warnings: str

    def row(self, column: str, value: str) -> int:
        """Return the row of a value; 0 if the vocabulary does not have it."""
        values = next(each.values for each in self.encoder.sparse if each.name == column)
        return 1 + [*values].index(value) if values and value in values else 0

    def of(self, column: str, value: str) -> dict[str, Any]:
        """Return the row of a value and its optimizer state."""
        row = self.row(column, value)
        return {name: tensor[row].tolist() for name, tensor in self.tensors[column].items()}


def start(config: RunConfig, workers: int = 2) -> Started:
    """Fill the tables of a new run on some workers."""
    folder = prepare(config, Path(config.data.cache_folder))
    encoder = FeatureEncoder.load(folder)
    warnings: list[str] = []
    model = InitialModel(config, encoder.input_spec, str(folder), warnings.append)
    placement, matches = place(model.tables, workers), Counter[str]()
    tensors: Tensors = {table.name: {} for table in model.tables}
    for worker in range(workers):
        shards = TableShards(placement, worker, UpdateRules(1))
        matches.update(shards.initialize(3))
        for group in shards.groups:
            for shard in group.group.shards:
                for name, rows in group.shard_tensors(shard).items():
                    shape = (shard.table.num_rows, *rows.shape[1:])
                    full = tensors[shard.table.name].setdefault(name, torch.full(shape, torch.nan))
                    full[shard.index :: shard.count] = rows
        shards.close()
    lines = "\n".join(model.describe_matches(matches))
    return Started(tensors, encoder, lines, "\n".join(model.notes), "\n".join(warnings))


def saved(run: Path, config: RunConfig) -> Started:
    """Return the tables of a run that ``write_trained`` wrote."""
    encoder = FeatureEncoder.load(prepare(config, Path(config.data.cache_folder)))
    tensors: Tensors = {}
    for (name, kind), rows in stored_tables(Checkpoint.newest_valid(run, print)).items():
        tensors.setdefault(name.removeprefix("table "), {})["weight" if kind == VALUE else kind] = rows
    return Started(tensors, encoder, "", "", "")


ADAM = {"dim": 4, "placement": "row", "optimizer": "adam"}


@pytest.fixture(scope="module")
def yesterday(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Started]:
    folder = tmp_path_factory.mktemp("yesterday")
    config = clicks_config(folder, embedding=ADAM)
    run = write_trained(folder / "run", config)
    return run, saved(run, config)


def today(folder: Path, item: str = "item", /, **sections: Mapping[str, object]) -> RunConfig:
    """Return the configuration of a run on another log, with one new user and other frequencies."""
    clicks = write_clicks(folder / "today.csv", seed=2, item=item)
    with clicks.open("a") as file:
        file.writelines(["1,2.0,30,new,i1,a\r\n", "0,2.0,30,u3,i2,b\r\n"] * 30)
    data = {"path": clicks, "sparse": ["user", item, "tags"], **sections.pop("data", {})}
    return clicks_config(folder, data=data, **{"embedding": ADAM, **sections})


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_values_keep_rows_and_states(yesterday: tuple[Path, Started], tmp_path: Path, workers: int) -> None:
    """The second day has another vocabulary, a new user, and a renamed column."""
    run, before = yesterday
    item = {"initial": f"{run}#item"}
    now = start(today(tmp_path, "product", train={"initial": run}, **{"tables.product": item}), workers)
    new = start(today(tmp_path, "product"), workers)
    users = [f"u{i}" for i in range(20)]
    assert [now.row("user", user) for user in users] != [before.row("user", user) for user in users]
    missing = [user for user in (*users, "new") if not before.row("user", user)]
    assert "new" in missing
    for user in users:
        if user not in missing and now.row("user", user):
            assert now.of("user", user) == before.of("user", user)
    for value in ("i1", "i2", "7"):
        assert now.of("product", value) == before.of("item", value)
    for column, old in (("user", "user"), ("product", "item"), ("tags", "tags")):
        assert now.of(column, "no such value") == before.of(old, "no such value")  # as of missing values
    for user in missing:
        assert now.of("user", user) == new.of("user", user)
    num_users = len(now.tensors["user"]["weight"]) - 1
    assert f"user {num_users - len(missing)} of {num_users}" in now.matches
    assert "product 3 of 3" in now.matches
    assert not now.warnings


def test_a_table_without_a_counterpart_is_new(yesterday: tuple[Path, Started], tmp_path: Path) -> None:
    now = start(today(tmp_path, "product", train={"initial": yesterday[0]}))
    assert "product" in now.warnings
    assert " item " in now.warnings
    assert now.of("product", "i1") == start(today(tmp_path, "product")).of("product", "i1")
    assert now.of("user", "u3") == yesterday[1].of("user", "u3")


def test_another_optimizer_starts_with_new_state(yesterday: tuple[Path, Started], tmp_path: Path) -> None:
    run, before = yesterday
    sections = {"tables.user": {"optimizer": "adagrad"}, "dense": {"optimizer": "SGD"}}
    now = start(today(tmp_path, train={"initial": run}, **sections))
    assert now.of("user", "u3") == {"weight": before.of("user", "u3")["weight"], "sum": [0.0] * 4}
    assert now.of("item", "i1") == before.of("item", "i1")
    assert "table user" in now.notes
    assert "dense" in now.notes
    assert "table item" not in now.notes


def test_rows_of_an_export_are_found_by_value(yesterday: tuple[Path, Started], tmp_path: Path) -> None:
    run, before = yesterday
    export_run(run, tmp_path / "served", ["tables"], None)
    tables = {f"tables.{name}": {"initial": tmp_path / "served"} for name in ("user", "item")}
    now = start(today(tmp_path, **tables, train={"initial": run}))
    assert now.of("user", "u3") == {
        "weight": before.of("user", "u3")["weight"], "mean": [0.0] * 4, "square": [0.0] * 4, "steps": 0.0
    }  # fmt: skip
    assert now.of("tags", "a") == before.of("tags", "a")
    save_file({"tags": before.tensors["tags"]["weight"]}, tmp_path / "tags.safetensors")
    rows = f"positions({tmp_path}/tags.safetensors#tags)"
    by_position = start(today(tmp_path, **{"tables.tags": {"initial": rows}}))
    assert torch.equal(by_position.tensors["tags"]["weight"], before.tensors["tags"]["weight"])
    new = start(today(tmp_path, train={"initial": run}, **{"tables.user": {"initial": "random"}}))
    assert new.of("user", "u3") == start(today(tmp_path)).of("user", "u3")


def test_rows_of_hashes_and_buckets_keep_their_meaning(tmp_path: Path) -> None:
    for name in ("before", "now"):
        (tmp_path / name).mkdir()
    config = shop_config(tmp_path / "before", **{"columns.age": {"kind": "buckets(18, 40, 65)"}})
    before = saved(run := write_trained(tmp_path / "run", config), config)
    config = shop_config(
        tmp_path / "now", train={"initial": run}, **{"columns.age": {"kind": "buckets(20, 66)"}}
    )
    write_shop(tmp_path / "now/shop.csv", seed=2)
    now = start(config)
    weights = {name: (before.tensors[name]["weight"], now.tensors[name]["weight"]) for name in now.tensors}
    for name in ("val_0", "embedding", "sigmoid"):
        assert torch.equal(*weights[name])
    # Missing; below 20: as below 18; from 20 to 66: as 43, from 40 to 65; above 66: as above 65.
    assert torch.equal(weights["age"][0][[0, 1, 3, 4]], weights["age"][1])
    assert torch.equal(*weights["cat"])  # one quantile, with another bound


@pytest.mark.parametrize(
    ("sections", "key", "named"),
    [
        ({"embedding": {**ADAM, "dim": 8}}, "train.initial", "table user"),
        ({"tables.user": {"dim": 8, "initial": "RUN"}}, "tables.user.initial", "table user"),
        ({"tables.user": {"initial": "RUN#buyer"}}, "tables.user.initial", "RUN#user"),
        ({"tables.user": {"initial": "RUN#tags"}}, "tables.user.initial", "none"),
        ({"columns.user": {"vocabulary": "hash(50)"}}, "train.initial", "50 rows"),
        ({"data": {"sparse": ["item", "user", "tags"]}}, "data.sparse", "item"),
        ({"dense": {"remote_mlp": [4]}}, "dense.remote_mlp", "remote net"),
        ({"train": {"initial": "RUN/tables"}}, "train.initial", "no checkpoint"),
        ({"tables.user": {"initial": "RUN/tables"}}, "tables.user.initial", "no checkpoint"),
    ],
)
def test_another_model_is_refused_in_one_line(
    sections: Sections, key: str, named: str, yesterday: tuple[Path, Started], tmp_path: Path
) -> None:
    run = str(yesterday[0])
    given: dict[str, Any] = {
        section: {
            name: value.replace("RUN", run) if isinstance(value, str) else value
            for name, value in keys.items()
        }
        for section, keys in sections.items()
    }
    with pytest.raises(ConfigError) as caught:
        start(today(tmp_path, **{"train": {"initial": run}, **given}))
    assert caught.value.key == key
    assert "\n" not in str(caught.value)
    if named != "none":
        assert named.replace("RUN", run) in str(caught.value)
