"""Pipelined runs that go on from a checkpoint: their first step reads the rows that it would have read."""

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.cluster import Clusters, small_config
from support.stopped_runs import calls_of, checksums, lines, stop, train

from hybrid.checkpoint import checkpoint_folders
from hybrid.checkpoint.checkpoint_folders import step_folder
from hybrid.config import ColumnSection, RunConfig, TableSection
from workers.exit_codes import ExitCode

TOTAL = 31  # 24 steps make an epoch


def write_clicks(path: Path) -> None:
    """Clicks of one user each, and any number of brands, tags and words, of which few are frequent."""
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
    """Every way to pool, tables whole and split, one of which all rows take every step, micro-batches, and
    vectors that are rounded on the wire."""
    path = tmp_path_factory.mktemp("input") / "clicks.csv"
    write_clicks(path)
    columns = {"label": "clicked", "dense": ("price",), "sparse": ("user", "brand", "tag", "word")}
    return small_config(
        data={"format": "csv", "path": (str(path),), "multi_hot_separator": "|", **columns},
        train={
            "update": "pipelined",
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
    """A run that nobody stops; not to be changed."""
    run = tmp_path_factory.mktemp("whole") / "run"
    assert clusters.get(2, 2).run(train, config, cache, run) == []
    return run


def assert_same_run(run: Path, whole: Path) -> None:
    """See that one run logged the same lines, and came to the same end."""
    assert lines(run) == lines(whole)
    assert checksums(step_folder(run, TOTAL)) == checksums(step_folder(whole, TOTAL))


def test_rows_lack_one_update_but_at_the_start_of_an_epoch(whole: Path) -> None:
    """And a line says so of all of its steps, not of those of which the workers happen to be done."""
    staleness = {line["step"]: line["staleness_mean"] for line in lines(whole) if line["kind"] == "train"}
    logged = (1, 5, 9, 10, 15, 18, 20, 24, 25, 27, 30, 31)
    assert staleness == {step: float(step not in (1, 25)) for step in logged}


def assert_goes_on_when_killed(
    config: RunConfig, whole: Path, clusters: Clusters, cache: Path, run: Path, workers: Sequence[int]
) -> None:
    """See that a run that is killed in the midst of its epochs, but on some workers goes on, is the same."""
    clusters.get(2, 2).run(train, config, cache, run, last_step=10, saved_step=8)
    ends = ((8, 15, 12), (12, 30, 28), (28, 0, 0))
    for count, (cut, last_step, saved_step) in zip(workers, ends, strict=True):
        now = config.replace(cluster=dataclasses.replace(config.cluster, workers=count))
        said = clusters.get(2, count).run(train, now, cache, run, True, last_step, saved_step)
        assert said == [f"resuming from step {cut}: {step_folder(run, cut)}"]
    assert_same_run(run, whole)


def test_a_run_that_is_killed_again_and_again_goes_on_bit_for_bit_as_one_that_was_not(
    config: RunConfig, whole: Path, clusters: Clusters, cache: Path, tmp_path: Path
) -> None:
    assert_goes_on_when_killed(config, whole, clusters, cache, tmp_path / "run", (2, 2, 2))


def test_how_many_steps_trainers_take_at_a_time_means_nothing(
    config: RunConfig, whole: Path, clusters: Clusters, cache: Path, tmp_path: Path
) -> None:
    """Each update may be followed by a checkpoint then, though the next gradients come before it is made."""
    run = tmp_path / "run"
    assert clusters.get(2, 2).run(calls_of, config, cache, run, 1e-9) == [1] * TOTAL
    assert_same_run(run, whole)
    for folder in checkpoint_folders.list_checkpoints(run):
        assert checksums(folder) == checksums(step_folder(whole, checkpoint_folders.parse_step(folder)))


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
def test_a_run_that_was_asked_to_stop_goes_on_bit_for_bit_as_one_that_was_not(
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
    assert checkpoint_folders.parse_step(checkpoint_folders.list_checkpoints(run)[0]) == step
    cluster.run(train, config, cache, run, resume=True)
    assert_same_run(run, whole)


@pytest.mark.long
def test_one_goes_on_bit_for_bit_on_any_number_of_workers(
    config: RunConfig, clusters: Clusters, cache: Path, tmp_path: Path
) -> None:
    """But for pooled vectors of split tables: their parts add up in another order then."""
    pooled = {name: dataclasses.replace(config.tables[name], placement="table") for name in ("tag", "word")}
    config = config.replace(tables={**config.tables, **pooled})
    clusters.get(2, 2).run(train, config, cache, tmp_path / "whole")
    assert_goes_on_when_killed(config, tmp_path / "whole", clusters, cache, tmp_path / "run", (3, 1, 2))


@pytest.mark.parametrize("moment", [("counting staleness", 5), ("saving", 4)], ids=str)
def test_a_run_is_asked_to_stop_while_it_waits_for_workers(
    moment: tuple[str, int], config: RunConfig, clusters: Clusters, cache: Path, tmp_path: Path
) -> None:
    """Whoever asks is answered at once, even where a worker is frozen."""
    code, statuses = clusters.get(2, 2).run(stop, config, cache, tmp_path / "run", moment)
    assert code is ExitCode.TERMINATED
    said = [f"{doing} step {moment[1]}; again to stop at once" for doing in ("stopping after", "saving")]
    assert statuses[-2:] == said
