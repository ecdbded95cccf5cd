"""Tables from the configuration and the columns, and their placement."""

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hybrid
from hybrid.config import (
    ClusterSection,
    ColumnSection,
    DenseSection,
    EmbeddingSection,
    RunConfig,
    TableSection,
    TrainSection,
)
from hybrid.embedding.table_spec import OptimizerSpec, Pooling, TableSpec, tables_of
from hybrid.engine.initial_model import InitialModel
from hybrid.engine.model_builder import place_configured_tables, table_specs
from hybrid.errors import ConfigError, DataError
from hybrid.input_spec import FeatureSpec, InputSpec

COLUMNS = InputSpec(("age",), (FeatureSpec("user", 100), FeatureSpec("item", 25), FeatureSpec("friend", 400)))


def config(**tables: TableSection) -> RunConfig:
    return RunConfig(tables=tables)


def test_each_column_has_a_table_by_default() -> None:
    specs = table_specs(RunConfig(embedding=EmbeddingSection(dim=8, optimizer="adagrad(eps = 0.5)")), COLUMNS)
    assert [(t.name, t.num_rows, t.dim, t.features) for t in specs] == [
        ("user", 100, 8, ("user",)),
        ("item", 25, 8, ("item",)),
        ("friend", 400, 8, ("friend",)),
    ]
    item = specs[1]
    assert item.optimizer == OptimizerSpec("adagrad", 0.05, 0.5)
    assert (item.pooling, item.placement, item.workers) == (Pooling.SUM, "auto", ())
    assert item.init_scale == pytest.approx(1 / 5)


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        ("ftrl(beta = 0.7, l1 = 0.8, weight_decay = 0.6)",
         OptimizerSpec("ftrl", 0.1, weight_decay=0.6, ftrl_beta=0.7, ftrl_l1=0.8)),
        ("adamw(betas = [0.3, 0.4], eps = 0.2, all_rows = true)",
         OptimizerSpec("adamw", 0.1, eps=0.2, betas=(0.3, 0.4), weight_decay=0.01, all_rows=True)),
        ("momentum(0.5)", OptimizerSpec("momentum", 0.1, momentum=0.5)),
    ],
)  # fmt: skip
def test_optimizer_arguments_reach_the_tables(optimizer: str, expected: OptimizerSpec) -> None:
    embedding = EmbeddingSection(optimizer=optimizer, learning_rate=0.1)
    assert {t.optimizer for t in table_specs(RunConfig(embedding=embedding), COLUMNS)} == {expected}


@pytest.mark.parametrize(
    ("name", "of_loops", "of_torch"),
    [
        ("sgd", hybrid.SGD, torch.optim.SGD),
        ("momentum", hybrid.Momentum, None),
        ("adagrad", hybrid.Adagrad, torch.optim.Adagrad),
        ("rowwise_adagrad", hybrid.RowwiseAdagrad, torch.optim.Adagrad),
        ("adam", hybrid.Adam, torch.optim.Adam),
        ("adamw", hybrid.AdamW, torch.optim.AdamW),
        ("ftrl", hybrid.Ftrl, None),
    ],
)
def test_defaults_of_optimizers_are_those_of_loops_and_of_torch(
    name: str, of_loops: Callable[..., OptimizerSpec], of_torch: Callable[..., Any] | None
) -> None:
    embedding = EmbeddingSection(optimizer=name, learning_rate=0.1)
    (spec,) = {table.optimizer for table in table_specs(RunConfig(embedding=embedding), COLUMNS)}
    assert spec == of_loops(lr=0.1)
    if of_torch is not None:
        defaults = of_torch([torch.zeros(1)]).defaults
        settings = dataclasses.asdict(spec)
        shared = (settings.keys() & defaults.keys() & inspect.signature(of_loops).parameters.keys()) - {"lr"}
        assert {key: settings[key] for key in shared} == {key: defaults[key] for key in shared}


def test_table_section_overrides_one_table() -> None:
    section = TableSection(dim=4, optimizer="adam", learning_rate=0.5, placement="row(workers = [1])")
    user, item, _ = table_specs(config(item=section), COLUMNS)
    assert (item.dim, item.placement, item.workers) == (4, "row", (1,))
    assert (item.optimizer.name, item.optimizer.learning_rate) == ("adam", 0.5)
    assert (user.dim, user.optimizer.name) == (16, "adagrad")


def test_table_section_overrides_the_type_of_rows() -> None:
    for shared, own, expected in (("train", "bfloat16", [4, 2, 4]), ("bfloat16", "train", [2, 4, 2])):
        changed = dataclasses.replace(
            config(item=TableSection(dtype=own)), embedding=EmbeddingSection(dtype=shared)
        )
        assert [table.row_bytes_per_value for table in table_specs(changed, COLUMNS)] == expected


def test_shared_table_has_the_most_rows() -> None:
    people, item = table_specs(config(people=TableSection(features=("friend", "user"))), COLUMNS)
    assert (people.name, people.num_rows, people.features) == ("people", 400, ("user", "friend"))
    assert people.init_scale == pytest.approx(1 / 20)
    assert item.name == "item"
    specs = table_specs(config(user=TableSection(features=("user", "friend"))), COLUMNS)
    assert [(t.name, t.features) for t in specs] == [("user", ("user", "friend")), ("item", ("item",))]


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"brand": TableSection()}, r"^tables\.brand: .*'brand'$"),
        ({"t": TableSection(features=("user", "brand"))}, r"^tables\.t: .*'brand'$"),
        (
            {"t": TableSection(features=("user",)), "user": TableSection(dim=4)},
            r"^tables\.user\.features = 'user': .*tables\.t$",
        ),
        # Without this rule, column item would read the table of user and friend.
        ({"item": TableSection(features=("user", "friend"))}, r"^tables\.item\.features: "),
    ],
)
def test_invalid_table_section_raises_an_error(tables: dict[str, TableSection], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        table_specs(config(**tables), COLUMNS)


@pytest.mark.parametrize(("net", "dim"), [("dlrm", 16), ("wide_deep", 17)])
def test_nets_with_first_order_weights_widen_every_table(net: str, dim: int) -> None:
    cluster = ClusterSection(workers=3)
    config = RunConfig(cluster=cluster, dense=DenseSection(net=net))
    tables = table_specs(config, COLUMNS)
    placement = place_configured_tables(config, tables, {})
    assert [t.dim for t in tables] == [dim] * 3
    assert placement.num_workers == 3


def test_pooling_side_depends_on_the_traffic() -> None:
    """Of 20 rows, 64 samples of 4 ids name all; 8 samples name 16, which are more bytes than 8 vectors."""
    bags = FeatureSpec("tags", 20, True), FeatureSpec("shops", 4000, True)
    tags = InputSpec((), (*bags, FeatureSpec("age", 9)))
    means = {"tags": 4.0, "shops": 4.0}

    def by_trainers(**sections: object) -> tuple[str, ...]:
        train = TrainSection(batch_size=128)
        config = RunConfig(cluster=ClusterSection(trainers=2), train=train).replace(**sections)
        return place_configured_tables(config, table_specs(config, tags), means).pooled_by_trainers

    assert by_trainers() == ("tags",)
    assert by_trainers(train=TrainSection(batch_size=128, micro_batches=8)) == ()
    assert by_trainers(cluster=ClusterSection(trainers=16)) == ()
    workers = TableSection(placement='auto(pooled_by = "workers")')
    trainers = TableSection(placement='auto(pooled_by = "trainers")')
    assert by_trainers(tables={"tags": workers, "shops": trainers}) == ("shops",)


def test_initializers_and_frozen_tables() -> None:
    sections = {"user": TableSection(init="normal(0.01)"), "item": TableSection(frozen=True, init="zeros")}
    user, item, friend = table_specs(config(**sections), COLUMNS)
    assert (user.init, user.init_scale) == ("normal", 0.01)
    assert (item.optimizer.name, item.init) == ("frozen", "zeros")
    assert (friend.init, friend.init_scale, friend.optimizer.name) == ("uniform", 1 / 20, "adagrad")


def initial_tables(**tables: TableSection) -> tuple[TableSpec, ...]:
    return InitialModel(config(**tables), COLUMNS, None, print).tables


def test_shape_of_pretrained_rows_is_checked(tmp_path: Path) -> None:
    file = tmp_path / "rows.npy"
    np.save(file, np.zeros((25, 16), np.float32))
    positions = f"positions({file})"
    _, item, _ = initial_tables(item=TableSection(initial=positions))
    assert (item.initial, item.is_initial_by_position) == (str(file), True)
    for section, message in (
        (TableSection(initial=positions, dim=8), "25 .* 8"),
        (TableSection(initial=positions, features=("item", "user")), "100 .* 16"),
    ):
        with pytest.raises(ConfigError, match=rf"^tables\.item\.initial = .*: .*{message}"):
            initial_tables(item=section)
    with pytest.raises(DataError, match=r"nowhere\.npy: "):
        initial_tables(item=TableSection(initial="positions(nowhere.npy)"))


def test_column_overrides_the_pooling_of_its_table() -> None:
    columns = {"user": ColumnSection(pooling="mean")}
    tables = {"people": TableSection(features=("user", "friend"))}
    embedding = EmbeddingSection(pooling="max")
    config = RunConfig(tables=tables, columns=columns, embedding=embedding)
    people, item = table_specs(config, COLUMNS)
    assert (people.pooling, people.poolings) == (Pooling.MAX, (Pooling.MEAN, Pooling.MAX))
    assert [table.pooling for table in tables_of(COLUMNS, [people, item])] == ["mean", "max", "max"]
    assert item.poolings == ()
    weighted = InputSpec((), (FeatureSpec("user", 9, multi_hot=True, weighted=True),))
    max_of_user = RunConfig(columns={"user": ColumnSection(pooling="max")})
    with pytest.raises(ConfigError, match=r"^columns\.user\.pooling = 'max': "):
        table_specs(max_of_user, weighted)
    with pytest.raises(ConfigError, match=r"^embedding\.pooling = 'max': "):
        table_specs(RunConfig(embedding=embedding), weighted)


def test_unpooled_column_is_a_sequence() -> None:
    spec = InputSpec((), (FeatureSpec("item", 9), FeatureSpec("seen", 7, multi_hot=True)))
    columns = {"seen": ColumnSection(pooling="none", max_ids=3)}
    tables = {"item": TableSection(features=("item", "seen"), dim=4)}
    (item,) = table_specs(RunConfig(tables=tables, columns=columns), spec)
    assert (item.sequences, item.poolings) == ((0, 3), ())
    candidate, seen = tables_of(spec, [item])
    assert (candidate.sequence, candidate.width, candidate.num_vectors) == (0, 4, 1)
    assert (seen.sequence, seen.width, seen.num_vectors) == (3, 13, 3)
    (item, seen) = table_specs(RunConfig(columns=columns), spec)
    assert (item.sequences, seen.sequences) == ((), (3,))
    weighted = InputSpec((), (FeatureSpec("seen", 7, multi_hot=True, weighted=True),))
    (seen,) = table_specs(RunConfig(embedding=EmbeddingSection(pooling="max"), columns=columns), weighted)
    assert seen.sequences == (3,)
    single = {"item": ColumnSection(pooling="none", max_ids=3)}
    with pytest.raises(ConfigError, match=r"^columns\.item\.pooling = 'none': "):
        table_specs(RunConfig(columns=single), spec)
