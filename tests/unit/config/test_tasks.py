"""Sections [tasks.NAME]: defaults, refused keys, and names of metrics."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from hybrid.config import CheckpointSection, DataSection, DenseSection, RunConfig, TaskSection, TrainSection
from hybrid.config.loading import fixed_values, load_config, to_toml, validate
from hybrid.config.task_sections import main_metric, metric_name, shown_metrics
from hybrid.errors import ConfigError

CLICK = TaskSection()
SPENT = TaskSection(type="regression")
GROUPED = DataSection(group="user")


def test_label_column_is_only_task_without_sections() -> None:
    config = RunConfig(data=DataSection(label="clicked"))
    assert config.all_tasks == {"label": TaskSection(label="clicked")}
    assert (config.num_outputs, config.best_by) == (1, "auc")


def test_sections_are_tasks_in_file_order(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[tasks.spent]\ntype = "regression"\n[tasks.click]\nlabel = "clicked"\nweight = 2\n')
    config = load_config(path, ["tasks.spent.loss=huber"])
    assert list(config.all_tasks) == ["spent", "click"]
    spent, click = config.all_tasks.values()
    assert (spent.label, spent.loss_call.name) == ("spent", "huber")
    assert (click.label, click.loss_call.name) == ("clicked", "log_loss")
    path.write_text(to_toml(config))
    assert load_config(path) == config


def test_class_task_has_one_output_per_class() -> None:
    stars = TaskSection(type="classes(3)")
    assert RunConfig(tasks={"click": CLICK, "stars": stars, "spent": SPENT}).num_outputs == 5


def test_metric_names_begin_with_task_if_several() -> None:
    one, several = {"spent": SPENT}, {"spent": SPENT, "click": TaskSection(metrics=("ndcg@5", "my.mod:lift"))}
    assert (main_metric(one), main_metric(several)) == ("rmse", "spent.rmse")
    assert metric_name(several, "click", "auc") == "click.auc"
    assert shown_metrics(one) == ["rmse", "mae"]
    assert shown_metrics(several)[-2:] == ["click.ndcg@5", "click.lift"]


def tasks(**keys: Any) -> dict[str, TaskSection]:
    return {"s": TaskSection(**keys)}


CSV = DataSection(format="csv", path=("x",), sparse=("u",), dense=("s",))

CHOICES = RunConfig(
    data=dataclasses.replace(CSV, dense=()),
    tasks=tasks(type="retrieval(u)"),
    dense=DenseSection(net="two_towers"),
)


def test_a_retrieval_task_ranks_without_groups() -> None:
    validate(CHOICES.replace(tasks=tasks(type="retrieval(u, dim = 8)", metrics=("recall@10", "ndcg@10"))))


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (RunConfig(tasks={"a b": CLICK}), "tasks.a b"),
        (RunConfig(tasks=tasks(type="classes")), "tasks.s.type"),
        (RunConfig(tasks=tasks(type="ordinal")), "tasks.s.type"),
        (RunConfig(tasks=tasks(weight=-1.0)), "tasks.s.weight"),
        (RunConfig(tasks=tasks(mask="s")), "tasks.s.mask"),
        (RunConfig(tasks=tasks(loss="huber")), "tasks.s.loss"),
        (RunConfig(data=GROUPED, tasks=tasks(type="regression", metrics=("mrr",))), "tasks.s.metrics"),
        (RunConfig(data=GROUPED, tasks=tasks(metrics=("ndcg@0",))), "tasks.s.metrics"),
        (RunConfig(tasks=tasks(metrics=("gauc",))), "tasks.s.metrics"),
        (RunConfig(tasks=tasks(metrics=("m:auc",))), "tasks.s.metrics"),
        (RunConfig(data=GROUPED, tasks=tasks(ranking_loss="lambda")), "tasks.s.ranking_loss"),
        (RunConfig(tasks=tasks(ranking_loss="pairwise")), "tasks.s.ranking_loss"),
        (
            RunConfig(data=GROUPED, tasks=tasks(type="classes(3)", ranking_loss="listwise")),
            "tasks.s.ranking_loss",
        ),
        (RunConfig(data=GROUPED, tasks=tasks(ranking_loss="pairwise(0)")), "tasks.s.ranking_loss"),
        (
            RunConfig(tasks={"s": SPENT}, checkpoint=CheckpointSection(keep_best="auc")),
            "checkpoint.keep_best",
        ),
        (RunConfig(data=CSV, tasks={"s": SPENT}), "data.dense"),
        *(
            (CHOICES.replace(tasks=tasks(type="retrieval(u)", **keys)), f"tasks.s.{next(iter(keys))}")
            for keys in (
                {"loss": "log_loss"},
                {"loss": "m:loss"},
                {"metrics": ("gauc",)},
                {"metrics": ("m:auc",)},
                {"ranking_loss": "listwise"},
            )
        ),
        (CHOICES.replace(tasks=tasks(type="retrieval(other)")), "tasks.s.type"),
        (CHOICES.replace(tasks=tasks(type="retrieval")), "tasks.s.type"),
        (CHOICES.replace(tasks=tasks(type="retrieval(u)") | {"t": CLICK}), "tasks"),
        (CHOICES.replace(tasks={"s": CLICK}), "dense.net"),
        (CHOICES.replace(dense=DenseSection(net="dlrm")), "dense.net"),
        (CHOICES.replace(dense=DenseSection(net="two_towers", remote_mlp=(4,))), "dense.remote_mlp"),
        (CHOICES.replace(dense=DenseSection(net="two_towers", ddp="none")), "dense.ddp"),
        (CHOICES.replace(train=TrainSection(micro_batches=2)), "train.micro_batches"),
        (CHOICES.replace(data=DataSection(dense=("x",))), "data.format"),
        (
            CHOICES.replace(
                data=dataclasses.replace(CSV, dense=(), stream="files()", split="none", vocabulary="hash(9)")
            ),
            "data.stream",
        ),
        (
            RunConfig(train=TrainSection(patience=2), checkpoint=CheckpointSection(keep_best="none")),
            "checkpoint.keep_best",
        ),
        (
            RunConfig(train=TrainSection(patience=2), data=dataclasses.replace(CSV, split="none")),
            "train.patience",
        ),
    ],
)
def test_contradicting_keys_are_refused(config: RunConfig, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(config)
    assert caught.value.key == key


def test_ranking_loss_is_known_and_fixed() -> None:
    ranked = TaskSection(type="regression", ranking_loss="listwise")
    assert not RunConfig(tasks={"a": CLICK, "b": SPENT}).has_ranking_loss
    assert RunConfig(tasks={"a": CLICK, "b": ranked}).has_ranking_loss
    config = RunConfig(data=GROUPED, tasks={"b": ranked})
    validate(config)
    kept = fixed_values(config)
    assert kept["tasks.b.ranking_loss"] == "listwise"  # since it decides which rows a step has
    assert "tasks.b.ranking_share" not in kept
