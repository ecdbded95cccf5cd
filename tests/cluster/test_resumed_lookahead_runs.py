"""Resumed lookahead runs have the bits of an undisturbed run."""

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.cluster import Clusters, small_config
from support.stopped_runs import assert_same_run, calls_of, checksums, saved_steps, stop, train

from hybrid.checkpoint.checkpoint_folders import step_folder
from hybrid.config import ColumnSection, RunConfig, TableSection
from workers.exit_codes import ExitCode

TOTAL = 31  # 24 steps make an epoch


def write_clicks(path: Path) -> None:
    """Write clicks of one user each, with any number of brands, tags and words; few values are frequent."""
    chance = random.Random(4)

    def several() -> str:
        return "|".join(f"v{int(40 * chance.random() ** 3)}" for _ in range(chance.randrange(4)))

    rows = ["clicked,price,user,brand,tag,word"]
    for _ in range(1640):
        user, price = chance.randrange(30), chance.random()
        clicked = int(user % 3 + price + chance.random() > 2)
        rows.append(f"{clicked},{price:.3f},u{user},{several()},{several()},{several()}")
    path.write_text("\n".join(rows) + "\n")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """Every pooling, split and unsplit tables, updates of all rows, micro-batches, rounded vectors."""
    path = tmp_path_factory.mktemp("input") / "clicks.csv"
    write_clicks(path)
    columns = {"label": "clicked", "dense": ("price",), "sparse": ("user", "brand", "tag", "word")}
    return small_config(
        data={"format": "csv", "path": (str(path),), "multi_hot_separator": "|", **columns},
        train={
            "update": "lookahead",
            "micro_batches": 2,
            "batch_size": 64,
            "epochs": 9,
            "max_steps": TOTAL,
            "log_every_steps": 5,
            "eval_every_steps": 9,
        },
        checkpoint={"every_steps": 4, "keep_last": 99, "keep_best": "none"},
        dense={"net": "support.dropout_net:build", "optimizer": "Adam", "learning_rate": 0.01},
        embedding={"optimizer": "adam(weight_decay = 0.01)", "dim": 4, "wire_dtype": "bfloat16"},
    ).replace(
        columns={"tag": ColumnSection(pooling="mean"), "word": ColumnSection(pooling="max")},
        tables={
            "user": TableSection(placement="row", optimizer="sgd", learning_rate=0.5),
            "tag": TableSection(placement="row"),
            "brand": TableSection(placement="table", optimizer="adam(weight_decay = 0.01, all_rows = true)"),
            "word": TableSection(placement="row"),
        },
    )


@pytest.fixture(scope="module")
def whole(
    config: RunConfig, clusters: Clusters, cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """An undisturbed run. Tests do not change it."""
    run = tmp_path_factory.mktemp("whole") / "run"
    assert clusters.get(2, 2).run(train, config, cache, run) == []
    return run


def assert_same_run_after_kills(
    config: RunConfig, whole: Path, clusters: Clusters, cache: Path, run: Path, workers: Sequence[int]
) -> None:
    """Check that a run killed within epochs, and resumed with these numbers of workers, has the same bits."""
    clusters.get(2, 2).run(train, config, cache, run, last_step=10, saved_step=8)
    ends = ((8, 15, 12), (12, 30, 28), (28, 0, 0))
    for count, (cut, last_step, saved_step) in zip(workers, ends, strict=True):
        now = config.replace(cluster=dataclasses.replace(config.cluster, workers=count))
        notes = clusters.get(2, count).run(train, now, cache, run, True, last_step, saved_step)
        assert notes == [f"resuming from step {cut}: {step_folder(run, cut)}"]
    assert_same_run(run, whole)


def test_repeatedly_killed_run_has_the_bits_of_an_undisturbed_one(
    config: RunConfig, whole: Path, clusters: Clusters, cache: Path, tmp_path: Path
) -> None:
    assert_same_run_after_kills(config, whole, clusters, cache, tmp_path / "run", (2, 2, 2))


def test_number_of_steps_per_call_changes_no_bit(
    config: RunConfig, whole: Path, clusters: Clusters, cache: Path, tmp_path: Path
) -> None:
    """With one step per call, the next gradients may arrive before the checkpoint of a step is made."""
    run = tmp_path / "run"
    assert clusters.get(2, 2).run(calls_of, config, cache, run, 1e-9) == [1] * TOTAL
    assert_same_run(run, whole)
    for step in saved_steps(run):
        assert checksums(step_folder(run, step)) == checksums(step_folder(whole, step))


@pytest.mark.parametrize(
    ("moment", "step"),
    [
        (("training", 13), 15),
        pytest.param(("training", 6), 8, marks=pytest.mark.long),
        pytest.param(("done evaluating", 18), 18, marks=pytest.mark.long),
        pytest.param(("training", 23), 24, marks=pytest.mark.long),
        pytest.param(("training", 24), 25, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_stopped_run_has_the_bits_of_an_undisturbed_one(
    moment: tuple[str, int],
    step: int,
    config: RunConfig,
    whole: Path,
    clusters: Clusters,
    cache: Path,
    tmp_path: Path,
) -> None:
    run, cluster = tmp_path / "run", clusters.get(2, 2)
    code, _ = cluster.run(stop, config, cache, run, moment)
    assert code is ExitCode.TERMINATED
    assert saved_steps(run)[0] == step
    cluster.run(train, config, cache, run, resume=True)
    assert_same_run(run, whole)


@pytest.mark.long
def test_killed_run_has_the_same_bits_on_any_number_of_workers(
    config: RunConfig, clusters: Clusters, cache: Path, tmp_path: Path
) -> None:
    """Tables with pooled vectors are not split; partial sums would be added in another order."""
    pooled = {name: dataclasses.replace(config.tables[name], placement="table") for name in ("tag", "word")}
    config = config.replace(tables={**config.tables, **pooled})
    clusters.get(2, 2).run(train, config, cache, tmp_path / "whole")
    assert_same_run_after_kills(config, tmp_path / "whole", clusters, cache, tmp_path / "run", (3, 1, 2))


def test_stop_is_announced_while_the_run_waits_for_workers(
    config: RunConfig, clusters: Clusters, cache: Path, tmp_path: Path
) -> None:
    """The request is announced at once, even if a worker is frozen."""
    code, statuses = clusters.get(2, 2).run(stop, config, cache, tmp_path / "run", ("saving", 4))
    assert code is ExitCode.TERMINATED
    announced = [f"{doing} step 4; a second Ctrl-C stops at once" for doing in ("stopping after", "saving")]
    assert statuses[-2:] == announced
