"""Checkpoints of a running cluster are consistent, and resumed runs have the bits of uninterrupted ones."""

import dataclasses
import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import flip_a_bit
from support.cluster import CaseError, Clusters, small_config
from support.commands import result_of
from support.jobs import opened
from support.stopped_runs import assert_same_run, calls_of, checksums, lines, saved_steps, stop, train

from hybrid import transport
from hybrid.checkpoint import checkpoint_folders
from hybrid.checkpoint.checkpoint_folders import DENSE_FILE, PROGRESS_FILE, Files, Manifest, step_folder
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.checkpoint.deltas import DeltaChain
from hybrid.config import ColumnSection, RunConfig, TableSection
from hybrid.metrics import Metrics
from workers.controller.remote_trainer import Trainer
from workers.exit_codes import ExitCode
from workers.rendezvous.bootstrap import JoinedCluster

TOTAL, CUT = 17, 6  # 12 steps make an epoch
CONFIG = small_config(
    data={"synthetic_rows": 1500},
    train={"epochs": 9, "max_steps": TOTAL, "log_every_steps": 4, "eval_every_steps": 5, "batch_size": 128},
    checkpoint={"every_steps": 3, "keep_last": 99},
    dense={"net": "support.custom_nets:build", "optimizer": "Adam", "learning_rate": 0.01},
    schedule={"kind": "cosine(warmup_steps = 4)"},
)


def write_clicks(path: Path) -> None:
    """Write clicks of one user each, with any number of brands, tags and words; few values are frequent."""
    chance = random.Random(4)

    def several() -> str:
        return "|".join(f"v{int(40 * chance.random() ** 3)}" for _ in range(chance.randrange(4)))

    rows = ["clicked,price,user,brand,tag,word"]
    for _ in range(790):
        user, price = chance.randrange(30), chance.random()
        clicked = int(user % 3 + price + chance.random() > 2)
        rows.append(f"{clicked},{price:.3f},u{user},{several()},{several()},{several()}")
    path.write_text("\n".join(rows) + "\n")


def lookahead_config(path: Path) -> RunConfig:
    """Every pooling, split and unsplit tables, updates of all rows, micro-batches, rounded rows."""
    write_clicks(path)
    columns = {"label": "clicked", "dense": ("price",), "sparse": ("user", "brand", "tag", "word")}
    train = dataclasses.replace(CONFIG.train, update="lookahead", micro_batches=2, batch_size=64)
    return small_config(
        data={"format": "csv", "path": (str(path),), "multi_hot_separator": "|", **columns},
        embedding={"optimizer": "adam(weight_decay = 0.01)", "dim": 4, "dtype": "bfloat16"},
    ).replace(
        train=train,
        checkpoint=CONFIG.checkpoint,
        dense=CONFIG.dense,
        columns={"tag": ColumnSection(pooling="mean"), "word": ColumnSection(pooling="max")},
        tables={
            "user": TableSection(placement="row", optimizer="sgd", learning_rate=0.5),
            "tag": TableSection(placement="row", dtype="train"),
            "brand": TableSection(placement="table", optimizer="adam(weight_decay = 0.01, all_rows = true)"),
            "word": TableSection(placement="row"),
        },
    )


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunConfig]:
    clicks = tmp_path_factory.mktemp("input") / "clicks.csv"
    return {"sync": CONFIG, "lookahead": lookahead_config(clicks)}


@pytest.fixture
def job(request: pytest.FixtureRequest, jobs: dict[str, RunConfig]) -> RunConfig:
    return jobs[request.param]


only_sync = pytest.mark.parametrize("job", ["sync"], indirect=True)
only_lookahead = pytest.mark.parametrize("job", ["lookahead"], indirect=True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of uninterrupted runs."""
    return tmp_path_factory.mktemp("whole")


@pytest.fixture
def whole(job: RunConfig, clusters: Clusters, cache: Path, trained: Path) -> Path:
    """An uninterrupted run, which the first test that needs it trains. Tests do not change it."""
    if not (run := trained / job.train.update).exists():
        assert clusters.get(2, 2).run(train, job, cache, run) == []
    return run


def resuming(run: Path, step: int) -> str:
    return f"resuming from step {step}: {step_folder(run, step)}"


@only_sync
def test_run_writes_the_configured_checkpoints(whole: Path) -> None:
    steps = sorted(saved_steps(whole))
    aucs = {line["step"]: line["auc"] for line in lines(whole) if line["kind"] == "test"}
    best = {step for step in aucs if aucs[step] > max([0.0, *(aucs[s] for s in aucs if s < step)])}
    assert steps == sorted({*range(3, TOTAL, 3), *best, TOTAL})
    records = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    saved = {record["step"]: record for record in records if record["kind"] == "checkpoint"}
    assert sorted(saved) == steps
    for step, record in saved.items():
        files = Checkpoint.newest_valid(step_folder(whole, step), pytest.fail).manifest.files
        assert record["bytes"] == sum(size for size, _ in files.values())
        assert record["seconds_stopped"] > 0
        assert record["seconds_writing"] > 0
    assert PROGRESS_FILE in Checkpoint.open(step_folder(whole, CUT)).manifest.files
    assert PROGRESS_FILE not in Checkpoint.open(step_folder(whole, 12)).manifest.files  # a line was logged


def kill_and_resume(
    job: RunConfig, clusters: Clusters, cache: Path, run: Path, workers: Sequence[int] = (2, 2)
) -> None:
    """Kill a run twice within epochs and between two lines of progress; resume it with numbers of workers.

    The first part takes one step per call.
    """
    assert clusters.get(2, 2).run(calls_of, job, cache, run, 8, CUT) == [1] * 8
    assert not (run / "result.json").exists()
    (step_folder(run, 9).with_suffix(".partial")).mkdir()
    for count, (cut, last_step, saved_step) in zip(workers, ((CUT, 16, 15), (15, 0, 0)), strict=True):
        now = job.replace(cluster=dataclasses.replace(job.cluster, workers=count))
        notes = clusters.get(2, count).run(train, now, cache, run, True, last_step, saved_step)
        assert notes == [resuming(run, cut)]


@pytest.mark.parametrize("job", [pytest.param("sync", marks=pytest.mark.long), "lookahead"], indirect=True)
def test_killed_run_has_the_bits_of_an_uninterrupted_one(
    job: RunConfig, whole: Path, clusters: Clusters, cache: Path, tmp_path: Path
) -> None:
    """With one step per call, the next gradients may arrive before the checkpoint of a step is made."""
    run = tmp_path / "run"
    kill_and_resume(job, clusters, cache, run)
    assert_same_run(run, whole)
    assert not list(run.glob("checkpoints/*.partial"))
    for step in saved_steps(run):
        first, second = (step_folder(each, step) for each in (run, whole))
        assert Checkpoint.open(first).manifest.metrics == Checkpoint.open(second).manifest.metrics
        assert checksums(first) == checksums(second)
    for key in ("auc", "steps", "skipped_steps"):
        assert result_of(run)[key] == result_of(whole)[key]


@only_lookahead
@pytest.mark.long
def test_killed_run_has_the_same_bits_on_any_number_of_workers(
    job: RunConfig, clusters: Clusters, cache: Path, tmp_path: Path
) -> None:
    """Tables with pooled vectors are not split; partial sums would be added in another order."""
    pooled = {name: dataclasses.replace(job.tables[name], placement="table") for name in ("tag", "word")}
    job = job.replace(tables={**job.tables, **pooled})
    clusters.get(2, 2).run(train, job, cache, tmp_path / "whole")
    kill_and_resume(job, clusters, cache, tmp_path / "run", (3, 2))
    assert_same_run(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize(
    ("job", "moment", "step"),
    [
        pytest.param("sync", ("training", 4), 5, marks=pytest.mark.long),
        pytest.param("sync", ("training", 8), 9, marks=pytest.mark.long),  # where a checkpoint is due
        pytest.param("sync", ("evaluating", 10), 10, marks=pytest.mark.long),
        pytest.param("sync", ("evaluating", TOTAL), TOTAL, marks=pytest.mark.long),
        ("lookahead", ("training", 4), 5),  # where an evaluation is due
        pytest.param("lookahead", ("training", 6), 8, marks=pytest.mark.long),
        pytest.param("lookahead", ("done evaluating", 10), 10, marks=pytest.mark.long),
        pytest.param("lookahead", ("training", 11), 12, marks=pytest.mark.long),
        pytest.param("lookahead", ("training", 12), 15, marks=pytest.mark.long),
    ],
    indirect=["job"],
    ids=str,
)
def test_stopped_run_has_the_bits_of_an_uninterrupted_one(
    job: RunConfig,
    moment: tuple[str, int],
    step: int,
    whole: Path,
    clusters: Clusters,
    cache: Path,
    tmp_path: Path,
) -> None:
    run, cluster = tmp_path / "run", clusters.get(2, 2)
    code, statuses = cluster.run(stop, job, cache, run, moment)
    assert code is ExitCode.TERMINATED
    assert statuses[-1].startswith(f"saving step {step};")
    assert saved_steps(run)[0] == step
    assert not (run / "result.json").exists()
    assert cluster.run(train, job, cache, run, resume=True) == [resuming(run, step)]
    assert_same_run(run, whole)
    assert result_of(run)["auc"] == result_of(whole)["auc"]
    assert {*saved_steps(run)} == {*saved_steps(whole), step}
    if step < TOTAL:
        bests = [Checkpoint.open(step_folder(each, 15)).manifest.progress["best"] for each in (run, whole)]
        assert bests[0] == bests[1]


@only_lookahead
def test_stop_is_announced_at_once(job: RunConfig, clusters: Clusters, cache: Path, tmp_path: Path) -> None:
    """The request is announced at once, even if a worker is frozen. Followers of the run do not end."""
    job = job.replace_value("checkpoint", "deltas", "every(1, seconds = 0)")
    code, statuses = clusters.get(2, 2).run(stop, job, cache, tmp_path / "run", ("saving", 3))
    assert code is ExitCode.TERMINATED
    assert [each.partition(";")[0] for each in statuses[-2:]] == ["stopping after step 3", "saving step 3"]
    chain = DeltaChain.read(tmp_path / "run")
    assert chain is not None
    assert not chain.has_ended


def test_resume_without_a_checkpoint_starts_anew(clusters: Clusters, cache: Path, tmp_path: Path) -> None:
    config = small_config(train={"max_steps": 2, "batch_size": 128})
    (note,) = clusters.get(2, 2).run(train, config, cache, tmp_path, resume=True)
    assert note.startswith(f"{tmp_path} has no checkpoint")


@only_sync
def test_damaged_checkpoint_is_skipped(whole: Path, clusters: Clusters, cache: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    for step in range(CUT + 3, TOTAL + 1):
        if step_folder(run, step).exists() and step != 15:
            checkpoint_folders.remove(step_folder(run, step))
    (run / "result.json").unlink()
    altered = step_folder(run, 15) / "dense.safetensors"
    flip_a_bit(altered)
    note, _ = clusters.get(2, 2).run(train, CONFIG, cache, run, resume=True)
    assert note.startswith(f"{altered}: ")
    assert_same_run(run, whole)
    assert checksums(step_folder(run, 15)) == checksums(step_folder(whole, 15))


@only_sync
def test_run_killed_after_its_last_checkpoint_writes_its_result(
    whole: Path, clusters: Clusters, cache: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    (run / "result.json").unlink()
    assert clusters.get(2, 2).run(train, CONFIG, cache, run, resume=True) == [resuming(run, TOTAL)]
    assert lines(run) == lines(whole)
    assert result_of(run)["auc"] == result_of(whole)["auc"]
    with pytest.raises(CaseError, match=f"all {TOTAL} steps"):
        clusters.get(2, 2).run(train, CONFIG, cache, run, resume=True)


def losses_after(cluster: JoinedCluster, config: RunConfig, cache: Path, scratch: Path) -> list[list[float]]:
    """Return the losses after a checkpoint: of the same session, and of one that loaded it."""
    found = []
    with opened(cluster, config, cache) as session:
        session.train(0, 3)
        session.save(scratch / "saved", 3)
        found += [report.losses for report in session.train(3, 3)]
    with opened(cluster, config, cache) as session:
        session.load(Checkpoint.open(scratch / "saved"))
        found += [report.losses for report in session.train(3, 3)]
    return found


def nets_loaded(cluster: JoinedCluster, config: RunConfig, cache: Path, scratch: Path) -> list[Files]:
    """Return the files that trainers write of nets loaded from a checkpoint."""
    with opened(cluster, config, cache) as session:
        session.load(Checkpoint.open(scratch / "saved"))
        transport.gather([trainer.call(Trainer.begin_save, DENSE_FILE) for trainer in session.trainers])
        # One after the other: they write the same file.
        return [trainer.call(Trainer.write, scratch).wait() for trainer in session.trainers]


def test_trainers_resume_with_their_own_nets(clusters: Clusters, cache: Path, tmp_path: Path) -> None:
    config = small_config(dense={"ddp": "inside"})
    first, second, *again = clusters.get(2, 2).run(losses_after, config, cache, tmp_path)
    assert again == [first, second]
    shared = small_config(dense={"ddp": "outside"})
    nets = clusters.get(2, 2).run(nets_loaded, shared, cache, tmp_path)
    assert nets[0] == nets[1]


def saved_twice(cluster: JoinedCluster, config: RunConfig, cache: Path, scratch: Path) -> list[Manifest]:
    """Return a checkpoint written at once, and one of the same step written after further steps."""
    with opened(cluster, config, cache) as session:
        session.train(0, 3)
        session.save(scratch / "at-once", 3)
        held = session.begin_save(scratch / "later", Manifest(3, 0, {}))
        assert held.is_copied
        session.train(3, 3)
        held.write()
    return [Checkpoint.open(scratch / name).manifest for name in ("at-once", "later")]


@pytest.mark.parametrize(
    "sections",
    [
        {"embedding": {"optimizer": "adam"}, "dense": {"remote_mlp": (8,), "optimizer": "Adam"}},
        {"train": {"update": "lookahead"}},
    ],
    ids=["sync", "lookahead"],
)
def test_steps_during_a_checkpoint_do_not_change_it(
    sections: dict[str, dict[str, Any]], clusters: Clusters, cache: Path, tmp_path: Path
) -> None:
    at_once, later = clusters.get(2, 2).run(saved_twice, small_config(**sections), cache, tmp_path)
    assert at_once.files == later.files


def test_early_stop_resumes_only_with_more_patience(clusters: Clusters, cache: Path, tmp_path: Path) -> None:
    """Learning rates are so small that no evaluation is better than the first."""

    def config(patience: int, keep_best: str = "log_loss") -> RunConfig:
        return small_config(
            train={"max_steps": 20, "eval_every_steps": 1, "patience": patience},
            checkpoint={"keep_last": 1, "keep_best": keep_best},
            embedding={"learning_rate": 1e-30},
            dense={"learning_rate": 1e-30},
        )

    def ended(step: int, evaluations: int, metric: str = "log loss") -> str:
        return f"ended at step {step}: {evaluations} evaluation(s) without a better {metric}"

    run, cluster = tmp_path / "run", clusters.get(2, 2)
    assert cluster.run(train, config(2), cache, run) == [ended(3, 2)]
    assert saved_steps(run) == [3, 1]
    assert (result_of(run)["steps"], result_of(run)["best"]["step"]) == (3, 1)
    with pytest.raises(CaseError, match=r"train\.patience = 2: "):
        cluster.run(train, config(2), cache, run, resume=True)
    notes = cluster.run(train, config(3), cache, run, resume=True)
    assert notes == [resuming(run, 3), ended(4, 3)]
    notes = cluster.run(train, config(3, "auc"), cache, run, resume=True)  # counts from step 4
    assert notes == [resuming(run, 4), ended(8, 3, "AUC")]


def metrics_of(cluster: JoinedCluster, config: RunConfig, cache: Path, folder: Path, step: int) -> Metrics:
    """Return the metrics of a checkpoint on the test rows."""
    with opened(cluster, config, cache) as session:
        session.load(Checkpoint.open(folder))
        return session.evaluate(step)


def test_validation_rows_select_the_tested_model(clusters: Clusters, cache: Path, tmp_path: Path) -> None:
    """The learning rates are so high that an early evaluation is the best; the end is within an epoch."""
    config = small_config(
        data={"validation": "random(0.2)", "synthetic_rows": 1500},
        train={"max_steps": 20, "eval_every_steps": 2, "patience": 2, "update": "lookahead"},
        checkpoint={"keep_last": 1, "keep_best": "log_loss"},
        embedding={"learning_rate": 3.0, "optimizer": "adam"},
        dense={"learning_rate": 0.3},
    )
    run, stopped, cluster = tmp_path / "run", tmp_path / "stopped", clusters.get(2, 2)
    cluster.run(train, config, cache, run)
    records = lines(run)
    losses = {r["step"]: r["log_loss"] for r in records if r["kind"] == "validation"}
    best = min(losses, key=lambda step: losses[step])
    (tested,) = (record for record in records if record["kind"] == "test")
    result = result_of(run)
    assert max(losses) == result["steps"] == best + 4 < 20
    assert tested["step"] == result["tested_step"] == result["best"]["step"] == best
    assert result["validation"]["log_loss"] == losses[max(losses)]
    assert cluster.run(metrics_of, config, cache, step_folder(run, best), best)["auc"] == tested["auc"]
    # A stop before the result is written changes nothing.
    code, _ = cluster.run(stop, config, cache, stopped, ("testing", best))
    assert code is ExitCode.TERMINATED
    assert not (stopped / "result.json").exists()
    cluster.run(train, config, cache, stopped, resume=True)
    assert lines(stopped) == records
    assert result_of(stopped)["auc"] == result["auc"]


@pytest.mark.parametrize(
    ("trainers", "update"),
    [
        (3, "lookahead"),
        pytest.param(3, "sync", marks=pytest.mark.long),
        pytest.param(4, "sync", marks=pytest.mark.long),
    ],
)
def test_resumed_run_that_reduces_by_the_process_group_has_the_same_bits(
    trainers: int, update: str, clusters: Clusters, cache: Path, tmp_path: Path
) -> None:
    """Sums do not depend on the buckets of DDP, whose layout changes after the first step."""
    cut, last, run, whole = 2, 4, tmp_path / "run", tmp_path / "whole"
    config = small_config(
        cluster={"trainers": trainers},
        train={"update": update, "max_steps": last, "batch_size": 128, "log_every_steps": 1},
        checkpoint={"every_steps": 1, "keep_last": 99, "keep_best": "none"},
        dense={"optimizer": "Adam", "learning_rate": 0.01},
    )
    cluster = clusters.get(trainers, 2, has_many_hosts=True)
    cluster.run(train, config, cache, whole)
    cluster.run(train, config, cache, run, last_step=cut + 1, saved_step=cut)
    assert "from step" in cluster.run(train, config, cache, run, resume=True)[0]
    for step in range(cut, last + 1):
        assert checksums(step_folder(run, step)) == checksums(step_folder(whole, step)), step
