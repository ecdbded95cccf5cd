"""Sections [columns.NAME] and [tasks.NAME]: defaults, order in the file, and names of metrics."""

from pathlib import Path

from hybrid.config import ColumnSection, DataSection, RunConfig, TaskSection
from hybrid.config.data_sections import columns_of
from hybrid.config.loading import fixed_values, load_config, to_toml, validate
from hybrid.config.task_sections import main_metric, metric_name, shown_metrics

CLICK = TaskSection()
SPENT = TaskSection(type="regression")


def test_missing_keys_of_columns_are_those_of_data() -> None:
    data = DataSection(
        dense=("price",),
        sparse=("user", "age"),
        multi_hot_separator="|",
        numeric_scaling="standardize(log = true)",
        vocabulary="build(3)",
    )
    (price,), (user, age) = columns_of(
        data,
        {
            "price": ColumnSection(numeric_scaling="min_max", source=("cents",)),
            "age": ColumnSection(vocabulary="hash(9)", multi_hot_separator=""),
        },
    )
    assert (price.name, price.source, price.transform, price.scaling) == ("price", "cents", "none", "min_max")
    assert (user.source, user.kind, user.separator) == ("user", "value", "|")
    assert (user.vocabulary, user.min_count) == ("build", 3)
    assert (age.separator, age.vocabulary, age.hash_rows) == ("", "hash", 9)


def test_sections_are_read_and_written_equal() -> None:
    config = load_config(
        None,
        [
            *('data.format="csv"', 'data.path="x"', 'data.sparse=["age", "who.what"]'),
            *("columns.age.kind=buckets(18, 25.5)", "columns.who.what.kind=cross"),
            'columns.who.what.source=["a", "b"]',
        ],
    )
    assert config.columns["age"].kind == "buckets(18.0, 25.5)"
    assert config.columns["who.what"].source == ("a", "b")
    text = to_toml(config)
    assert '[columns."who.what"]\n' in text
    assert 'kind = "buckets(18.0, 25.5)"\n' in text


def test_columns_of_custom_batches_may_be_sequences() -> None:
    """The format of such a run is synthetic, the default."""
    config = load_config(None, ["columns.tags.pooling=none", "columns.tags.max_ids=5"])
    assert config.columns["tags"] == ColumnSection(pooling="none", max_ids=5)


def test_label_column_is_only_task_without_sections() -> None:
    config = RunConfig(data=DataSection(label="clicked"))
    assert config.all_tasks == {"label": TaskSection(label="clicked")}
    assert (config.num_outputs, config.best_by) == (1, "auc")


def test_tasks_are_in_file_order(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[tasks.spent]\ntype = "regression"\n[tasks.click]\nlabel = "clicked"\nweight = 2\n')
    config = load_config(path, ["tasks.spent.loss=huber"])
    assert list(config.all_tasks) == ["spent", "click"]
    spent, click = config.all_tasks.values()
    assert (spent.label, spent.loss_call.name) == ("spent", "huber")
    assert (click.label, click.loss_call.name) == ("clicked", "log_loss")
    path.write_text(to_toml(config))
    assert load_config(path) == config


def test_metric_names_begin_with_task_if_several() -> None:
    one, several = {"spent": SPENT}, {"spent": SPENT, "click": TaskSection(metrics=("ndcg@5", "my.mod:lift"))}
    assert (main_metric(one), main_metric(several)) == ("rmse", "spent.rmse")
    assert metric_name(several, "click", "auc") == "click.auc"
    assert shown_metrics(one) == ["rmse", "mae"]
    assert shown_metrics(several)[-2:] == ["click.ndcg@5", "click.lift"]


def test_ranking_loss_is_known_and_fixed() -> None:
    ranked = TaskSection(type="regression", ranking_loss="listwise")
    assert not RunConfig(tasks={"a": CLICK, "b": SPENT}).has_ranking_loss
    assert RunConfig(tasks={"a": CLICK, "b": ranked}).has_ranking_loss
    config = RunConfig(data=DataSection(group="user"), tasks={"b": ranked})
    validate(config)
    kept = fixed_values(config)
    assert kept["tasks.b.ranking_loss"] == "listwise"  # since it decides which rows a step has
    assert "tasks.b.ranking_share" not in kept
