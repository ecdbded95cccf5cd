"""Sections [tasks.NAME]: what they mean, what is refused, and how their metrics are called."""

from pathlib import Path

import pytest

from hybrid.config import CheckpointSection, DataSection, RunConfig, TaskSection, TrainSection
from hybrid.config.loading import fixed_values, load_config, to_toml, validate
from hybrid.config.task_sections import (
    is_lower_better,
    leading_score,
    metric_name,
    metric_title,
    shown_metrics,
)
from hybrid.errors import ConfigError
from hybrid.input_spec import TaskSpec

CLICK = TaskSection()
STARS = TaskSection(type="classes(3)")
SPENT = TaskSection(type="regression")
GROUPED = DataSection(group="user")


def test_without_sections_the_label_column_is_the_one_task() -> None:
    config = RunConfig(data=DataSection(label="clicked"))
    assert config.all_tasks == {"label": TaskSection(label="clicked")}
    assert config.task_specs == (TaskSpec(),)
    assert (config.num_outputs, config.best_by) == (1, "auc")


def test_sections_are_tasks_in_their_order_and_named_after_their_columns(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[tasks.spent]\ntype = "regression"\n[tasks.click]\nlabel = "clicked"\nweight = 2\n')
    config = load_config(path, ["tasks.spent.loss=huber"])
    assert list(config.all_tasks) == ["spent", "click"]
    assert (config.all_tasks["spent"].label, config.all_tasks["spent"].loss_name) == ("spent", "huber")
    assert (config.all_tasks["click"].label, config.all_tasks["click"].loss_name) == ("clicked", "log_loss")
    path.write_text(to_toml(config))
    assert load_config(path) == config


def test_a_task_has_an_output_for_each_of_its_classes() -> None:
    assert RunConfig(tasks={"click": CLICK, "stars": STARS, "spent": SPENT}).num_outputs == 5


def test_names_of_metrics_begin_with_the_task_where_there_are_several() -> None:
    one, several = {"spent": SPENT}, {"spent": SPENT, "click": TaskSection(metrics=("ndcg@5", "my.mod:lift"))}
    assert (leading_score(one), leading_score(several)) == ("rmse", "spent.rmse")
    assert metric_name(several, "click", "auc") == "click.auc"
    assert shown_metrics(one) == ["rmse", "mae"]
    assert shown_metrics(several)[-2:] == ["click.ndcg@5", "click.lift"]


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("auc", "AUC"),
        ("log_loss", "log loss"),
        ("click.ndcg@10", "click NDCG@10"),
        ("spent.rmse", "spent RMSE"),
        ("click.lift", "click lift"),
    ],
)
def test_a_metric_is_shown_in_words(name: str, title: str) -> None:
    assert metric_title(name) == title


def test_errors_are_better_where_they_are_lower() -> None:
    assert [is_lower_better(name) for name in ("auc", "click.gauc", "lift")] == [False] * 3
    assert all(is_lower_better(name) for name in ("rmse", "spent.mae", "log_loss", "click.log_loss"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (RunConfig(tasks={"a b": CLICK}), "tasks.a b: must be named by letters, digits"),
        (
            RunConfig(tasks={"s": TaskSection(type="classes")}),
            "tasks.s.type = 'classes': must name its count",
        ),
        (RunConfig(tasks={"s": TaskSection(type="ordinal")}), "tasks.s.type = 'ordinal': must be one of bin"),
        (RunConfig(tasks={"s": TaskSection(weight=-1.0)}), "tasks.s.weight = -1.0: must be a finite number"),
        (RunConfig(tasks={"s": TaskSection(mask="s")}), "tasks.s.mask = 's': must be another column"),
        (
            RunConfig(tasks={"s": TaskSection(loss="huber")}),
            "tasks.s.loss = 'huber': must be log_loss or focal where type is binary, or module:function",
        ),
        (
            RunConfig(data=GROUPED, tasks={"s": TaskSection(type="regression", metrics=("mrr",))}),
            "tasks.s.metrics = 'mrr': must hold ndcg@K, module:function where type is regression",
        ),
        (
            RunConfig(tasks={"s": TaskSection(metrics=("ndcg@0",))}),
            "tasks.s.metrics = 'ndcg@0': must hold gauc, mrr, ndcg@K, recall@K, module:function where type",
        ),
        (
            RunConfig(tasks={"s": TaskSection(metrics=("gauc",))}),
            "tasks.s.metrics = 'gauc': needs data.group",
        ),
        (
            RunConfig(tasks={"s": TaskSection(metrics=("m:auc",))}),
            "tasks.s.metrics = ('m:auc',): must name each metric once",
        ),
        (
            RunConfig(data=GROUPED, tasks={"s": TaskSection(ranking_loss="lambda")}),
            "tasks.s.ranking_loss = 'lambda': must be one of pairwise, listwise",
        ),
        (
            RunConfig(tasks={"s": TaskSection(ranking_loss="pairwise")}),
            "tasks.s.ranking_loss = 'pairwise': needs data.group, the column whose values make groups",
        ),
        (
            RunConfig(data=GROUPED, tasks={"s": TaskSection(type="classes(3)", ranking_loss="listwise")}),
            "tasks.s.ranking_loss = 'listwise': is of type binary or regression: classes have no order",
        ),
        (
            RunConfig(data=GROUPED, tasks={"s": TaskSection(ranking_loss="pairwise(0)")}),
            "tasks.s.ranking_loss = 'pairwise(0)': fraction must be a finite number, above 0, at most 1",
        ),
        (
            RunConfig(tasks={"s": SPENT}, checkpoint=CheckpointSection(keep_best="auc")),
            "checkpoint.keep_best = 'auc': must be auto, none, or one of rmse, mae",
        ),
        (
            RunConfig(
                data=DataSection(format="csv", path=("x",), sparse=("u",), dense=("s",)), tasks={"s": SPENT}
            ),
            "data.dense = 's': must not hold the label column",
        ),
        (
            RunConfig(train=TrainSection(patience=2), checkpoint=CheckpointSection(keep_best="none")),
            "checkpoint.keep_best = 'none': must name a metric where train.patience ends the run by it",
        ),
        (
            RunConfig(train=TrainSection(patience=2), data=DataSection(test_fraction=0.0)),
            "train.patience = 2: needs test rows",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(config: RunConfig, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(config)
    assert str(caught.value).startswith(message)


def test_a_run_that_ranks_says_so() -> None:
    ranked = TaskSection(type="regression", ranking_loss="listwise")
    assert not RunConfig(tasks={"a": CLICK, "b": SPENT}).has_ranking_loss
    assert RunConfig(tasks={"a": CLICK, "b": ranked}).has_ranking_loss
    config = RunConfig(data=GROUPED, tasks={"b": ranked})
    validate(config)
    kept = fixed_values(config)
    assert kept["tasks.b.ranking_loss"] == "listwise"  # since it decides which rows a step has
    assert "tasks.b.ranking_share" not in kept


def test_what_goes_together_passes() -> None:
    tasks = {"click": TaskSection(metrics=("gauc", "mrr", "ndcg@10", "recall@1", "m:f")), "spent": SPENT}
    validate(RunConfig(data=GROUPED, tasks=tasks, checkpoint=CheckpointSection(keep_best="click.ndcg@10")))
