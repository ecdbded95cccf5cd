"""Checkpoints of a running cluster are consistent, and resumed runs have the bits of undisturbed ones."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import flip_a_bit
from support.cluster import CaseError, Clusters, small_config
from support.commands import result_of
from support.jobs import opened
from support.stopped_runs import assert_same_run, calls_of, checksums, lines, saved_steps, stop, train
from support.stores import BUCKET, Proxy, Store, in_store

from hybrid import transport
from hybrid.checkpoint import checkpoint_folders
from hybrid.checkpoint.checkpoint_folders import DENSE_FILE, PROGRESS_FILE, Files, Manifest, step_folder
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.config import RunConfig
from hybrid.data.prepare.preparation import cache_folder
from hybrid.metrics import Metrics
from hybrid.storage.files import exists, write_bytes
from hybrid.storage.remote_path import parse_path
from workers.controller.remote_trainer import Trainer
from workers.exit_codes import ExitCode
from workers.rendezvous.bootstrap import JoinedCluster
from workers.run_folder.run_access import hold_run

TOTAL, CUT = 31, 12  # 24 steps make an epoch
CONFIG = small_config(
    train={"epochs": 9, "max_steps": TOTAL, "log_every_steps": 5, "eval_every_steps": 9, "batch_size": 128},
    checkpoint={"every_steps": 4, "keep_last": 99},
    dense={"net": "support.dropout_net:build", "optimizer": "Adam", "learning_rate": 0.01},
    schedule={"kind": "cosine(warmup_steps = 4)"},
)


def auc_of(run: Path) -> float:
    """Return the AUC of the result of a run."""
    return float(result_of(run)["auc"])


@pytest.fixture(scope="module")
def whole(clusters: Clusters, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run. Tests do not change it."""
    run = tmp_path_factory.mktemp("whole") / "run"
    assert clusters.get(2, 2).run(train, CONFIG, cache, run) == []
    return run


def test_run_writes_the_configured_checkpoints(whole: Path) -> None:
    steps = sorted(saved_steps(whole))
    aucs = {line["step"]: line["auc"] for line in lines(whole) if line["kind"] == "test"}
    best = {step for step in aucs if aucs[step] > max([0.0, *(aucs[s] for s in aucs if s < step)])}
    assert steps == sorted({*range(4, TOTAL, 4), *best, TOTAL})
    records = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    saved = {record["step"]: record for record in records if record["kind"] == "checkpoint"}
    assert sorted(saved) == steps
    for step, record in saved.items():
        files = Checkpoint.newest_valid(step_folder(whole, step), pytest.fail).manifest.files
        assert record["bytes"] == sum(size for size, _ in files.values())
        assert record["seconds_stopped"] > 0
        assert record["seconds_writing"] > 0
    assert PROGRESS_FILE in Checkpoint.open(step_folder(whole, CUT)).manifest.files
    assert PROGRESS_FILE not in Checkpoint.open(step_folder(whole, 20)).manifest.files  # a line was logged


def test_killed_run_has_the_bits_of_an_undisturbed_one(
    whole: Path, clusters: Clusters, cache: Path, tmp_path: Path
) -> None:
    """The kill is within an epoch, between two lines of progress; the net has dropout."""
    run, cluster = tmp_path / "run", clusters.get(2, 2)
    cluster.run(train, CONFIG, cache, run, last_step=15, saved_step=CUT)
    assert saved_steps(run)[0] == CUT
    assert not (run / "result.json").exists()
    (step_folder(run, 16).with_suffix(".partial")).mkdir()
    notes = [f"resuming from step {CUT}: {step_folder(run, CUT)}"]
    assert cluster.run(train, CONFIG, cache, run, resume=True) == notes
    assert_same_run(run, whole)
    assert not list(run.glob("checkpoints/*.partial"))
    for step in saved_steps(run):
        first, second = (step_folder(each, step) for each in (run, whole))
        assert Checkpoint.open(first).manifest.metrics == Checkpoint.open(second).manifest.metrics
        assert checksums(first) == checksums(second)
    for key in ("auc", "steps", "skipped_steps"):
        assert result_of(run)[key] == result_of(whole)[key]


def test_killed_run_with_stored_data_has_the_same_bits(
    whole: Path, clusters: Clusters, store: Store, tmp_path: Path
) -> None:
    run, cluster, config = tmp_path / "run", clusters.get(2, 2), in_store(CONFIG, store, tmp_path)
    cluster.run(train, config, cache_folder(config), run, last_step=15, saved_step=CUT)
    cluster.run(train, config, cache_folder(config), run, resume=True)
    assert_same_run(run, whole)


@pytest.mark.parametrize(
    ("moment", "step"),
    [
        pytest.param(("training", 6), 8, marks=pytest.mark.long),  # where a checkpoint is due
        pytest.param(("training", 13), 15, marks=pytest.mark.long),
        (("training", 8), 9),  # where an evaluation is due
        pytest.param(("evaluating", 18), 18, marks=pytest.mark.long),
        pytest.param(("done evaluating", 18), 18, marks=pytest.mark.long),
        pytest.param(("evaluating", TOTAL), TOTAL, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_stopped_run_has_the_bits_of_an_undisturbed_one(
    moment: tuple[str, int], step: int, whole: Path, clusters: Clusters, cache: Path, tmp_path: Path
) -> None:
    run, cluster = tmp_path / "run", clusters.get(2, 2)
    code, statuses = cluster.run(stop, CONFIG, cache, run, moment)
    assert code is ExitCode.TERMINATED
    assert statuses[-1] == f"saving step {step}; a second Ctrl-C stops at once"
    announced = f"stopping after step {step}; a second Ctrl-C stops at once"
    assert announced in statuses or moment[0] == "done evaluating"
    assert saved_steps(run)[0] == step
    assert not (run / "result.json").exists()
    notes = [f"resuming from step {step}: {step_folder(run, step)}"]
    assert cluster.run(train, CONFIG, cache, run, resume=True) == notes
    assert_same_run(run, whole)
    assert auc_of(run) == auc_of(whole)
    assert {*saved_steps(run)} == {*saved_steps(whole), step}
    if step < TOTAL:
        bests = [Checkpoint.open(step_folder(each, 28)).manifest.progress["best"] for each in (run, whole)]
        assert bests[0] == bests[1]


def test_number_of_steps_per_call_changes_no_bit(
    whole: Path, clusters: Clusters, cache: Path, tmp_path: Path
) -> None:
    assert clusters.get(2, 2).run(calls_of, CONFIG, cache, tmp_path / "run", 1e-9) == [1] * TOTAL
    assert_same_run(tmp_path / "run", whole)


def test_resumed_run_without_a_checkpoint_starts_from_the_beginning(
    clusters: Clusters, cache: Path, tmp_path: Path
) -> None:
    config = small_config(train={"max_steps": 2, "batch_size": 128})
    (note,) = clusters.get(2, 2).run(train, config, cache, tmp_path, resume=True)
    assert note == f"{tmp_path} has no checkpoint: starting from the beginning"


def test_damaged_checkpoint_is_reported_and_skipped(
    whole: Path, clusters: Clusters, cache: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    for step in range(CUT + 4, TOTAL + 1):
        if step_folder(run, step).exists() and step != 28:
            checkpoint_folders.remove(step_folder(run, step))
    (run / "result.json").unlink()
    altered = step_folder(run, 28) / "dense.safetensors"
    flip_a_bit(altered)
    note, _ = clusters.get(2, 2).run(train, CONFIG, cache, run, resume=True)
    assert note.startswith(f"{altered}: missing or altered since the checkpoint was written; step-000000")
    assert_same_run(run, whole)
    assert checksums(step_folder(run, 28)) == checksums(step_folder(whole, 28))


def test_run_killed_after_its_last_checkpoint_writes_its_result(
    whole: Path, clusters: Clusters, cache: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    (run / "result.json").unlink()
    notes = [f"resuming from step {TOTAL}: {step_folder(run, TOTAL)}"]
    assert clusters.get(2, 2).run(train, CONFIG, cache, run, resume=True) == notes
    assert lines(run) == lines(whole)
    assert auc_of(run) == auc_of(whole)
    with pytest.raises(CaseError, match=f"the run has taken all {TOTAL} steps; raise it to continue"):
        clusters.get(2, 2).run(train, CONFIG, cache, run, resume=True)


def losses_after(cluster: JoinedCluster, config: RunConfig, cache: Path, scratch: Path) -> list[list[float]]:
    """Return the losses after a checkpoint: of the same session, and of one that loaded it."""
    found = []
    with opened(cluster, config, cache) as session:
        session.train(0, 0, 3, 0)
        session.save(scratch / "saved", 3, 0)
        found += [report.losses for report in session.train(0, 3, 3, 3)]
    with opened(cluster, config, cache) as session:
        session.load(Checkpoint.open(scratch / "saved"))
        found += [report.losses for report in session.train(0, 3, 3, 3)]
    return found


def nets_loaded(cluster: JoinedCluster, config: RunConfig, cache: Path, scratch: Path) -> list[Files]:
    """Return the files that trainers write of nets loaded from a checkpoint."""
    with opened(cluster, config, cache) as session:
        session.load(Checkpoint.open(scratch / "saved"))
        transport.gather([trainer.call(Trainer.begin_save, DENSE_FILE) for trainer in session.trainers])
        # One after the other: they write the same file.
        return [trainer.call(Trainer.write, scratch).wait() for trainer in session.trainers]


@pytest.mark.parametrize("ddp", ["none", "inside"])
def test_trainers_resume_with_their_own_nets(
    ddp: str, clusters: Clusters, cache: Path, tmp_path: Path
) -> None:
    config = small_config(dense={"ddp": ddp})
    first, second, *again = clusters.get(2, 2).run(losses_after, config, cache, tmp_path)
    assert again == [first, second]
    shared = small_config(dense={"ddp": "outside"})
    nets = clusters.get(2, 2).run(nets_loaded, shared, cache, tmp_path)
    assert nets[0] == nets[1]


def saved_twice(cluster: JoinedCluster, config: RunConfig, cache: Path, scratch: Path) -> list[Manifest]:
    """Return a checkpoint written at once, and one of the same step written after further steps."""
    with opened(cluster, config, cache) as session:
        session.train(0, 0, 3, 0)
        session.save(scratch / "at-once", 3, 0)
        held = session.begin_save(scratch / "later", 3, 0)
        assert held.is_copied
        session.train(0, 3, 3, 3)
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


def test_run_that_stopped_early_resumes_only_with_more_patience(
    clusters: Clusters, cache: Path, tmp_path: Path
) -> None:
    """Learning rates are so small that no evaluation is better than the first."""

    def config(patience: int, keep_best: str = "log_loss") -> RunConfig:
        return small_config(
            train={"max_steps": 20, "eval_every_steps": 2, "patience": patience},
            checkpoint={"keep_last": 1, "keep_best": keep_best},
            embedding={"learning_rate": 1e-30},
            dense={"learning_rate": 1e-30},
        )

    def ended(step: int, evaluations: int, metric: str = "log loss") -> str:
        return f"ended at step {step}: {evaluations} evaluation(s) without a better {metric}"

    run, cluster = tmp_path / "run", clusters.get(2, 2)
    assert cluster.run(train, config(2), cache, run) == [ended(6, 2)]
    assert saved_steps(run) == [6, 2]
    assert (result_of(run)["steps"], result_of(run)["best"]["step"]) == (6, 2)
    with pytest.raises(CaseError, match=r"train\.patience = 2: the run ended without a better log loss"):
        cluster.run(train, config(2), cache, run, resume=True)
    notes = cluster.run(train, config(3), cache, run, resume=True)
    assert notes == [f"resuming from step 6: {step_folder(run, 6)}", ended(8, 3)]
    (run / "result.json").unlink()  # as if killed right before it was written
    notes = cluster.run(train, config(3), cache, run, resume=True)
    assert notes == [f"resuming from step 8: {step_folder(run, 8)}", ended(8, 3)]
    assert result_of(run)["steps"] == 8
    notes = cluster.run(train, config(3, "auc"), cache, run, resume=True)  # counts from step 8
    assert notes == [f"resuming from step 8: {step_folder(run, 8)}", ended(16, 3, "AUC")]


def metrics_of(cluster: JoinedCluster, config: RunConfig, cache: Path, folder: Path, step: int) -> Metrics:
    """Return the metrics of a checkpoint on the test rows."""
    with opened(cluster, config, cache) as session:
        session.load(Checkpoint.open(folder))
        return session.evaluate(step)


@pytest.mark.parametrize("update", ["sync", "lookahead"])
def test_validation_rows_select_the_model_that_is_tested_once(
    update: str, clusters: Clusters, cache: Path, tmp_path: Path
) -> None:
    """The learning rates are so high that an early evaluation is the best; the end is within an epoch."""
    config = small_config(
        data={"validation": "random(0.2)"},
        train={"max_steps": 20, "eval_every_steps": 2, "patience": 3, "update": update},
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
    assert max(losses) == result["steps"] == best + 6 < 20
    assert tested["step"] == result["tested_step"] == result["best"]["step"] == best
    assert result["validation"]["log_loss"] == losses[max(losses)]
    assert cluster.run(metrics_of, config, cache, step_folder(run, best), best)["auc"] == tested["auc"]
    # A stop, or a kill, before the result is written changes nothing.
    code, _ = cluster.run(stop, config, cache, stopped, ("testing", best))
    assert code is ExitCode.TERMINATED
    assert not (stopped / "result.json").exists()
    for _ in range(2):
        cluster.run(train, config, cache, stopped, resume=True)
        assert lines(stopped) == records
        assert auc_of(stopped) == result["auc"]
        (stopped / "result.json").unlink()


@pytest.mark.long
def test_run_in_an_unreliable_store_has_the_same_bits(
    whole: Path, clusters: Clusters, cache: Path, tmp_path: Path, store: Store
) -> None:
    config = CONFIG.replace(checkpoint=dataclasses.replace(CONFIG.checkpoint, every_steps=CUT))
    with Proxy(store) as proxy:
        query = f"scheme=http&endpoint_override={proxy.address}"
        stored, cluster = parse_path(f"s3://{BUCKET}/resumed?{query}"), clusters.get(2, 2)
        with hold_run(stored, is_resumed=False) as (run, _):
            pass
        proxy.plan = lambda method, path: "503" if len(proxy.seen) % 100 == 30 else None
        cluster.run(train, config, cache, run, last_step=15, saved_step=CUT)
        left = checkpoint_folders.begin(step_folder(stored, 16))
        write_bytes(left / DENSE_FILE, b"left by a kill")
        notes = [f"resuming from step {CUT}: {step_folder(stored, CUT)}"]
        assert cluster.run(train, config, cache, run, resume=True) == notes
        assert not (run / "checkpoints").exists()
        assert lines(run) == lines(whole)
        for step in saved_steps(stored):
            assert checksums(step_folder(stored, step)) == checksums(step_folder(whole, step))
        assert not exists(left)
        assert len(proxy.seen) > 30  # of which some were refused


@pytest.mark.parametrize(
    ("trainers", "update", "cuts"),
    [
        (3, "sync", [11]),
        (4, "lookahead", [5]),
        pytest.param(3, "sync", [5], marks=pytest.mark.long),
        pytest.param(4, "lookahead", [11], marks=pytest.mark.long),
        pytest.param(3, "lookahead", [5, 11], marks=pytest.mark.long),
        pytest.param(4, "sync", [5, 11], marks=pytest.mark.long),
    ],
)
def test_resumed_run_that_reduces_by_the_process_group_has_the_same_bits(
    trainers: int, update: str, cuts: list[int], clusters: Clusters, cache: Path, tmp_path: Path
) -> None:
    """Sums do not depend on the buckets of DDP, whose layout changes after the first step."""
    last = 13
    config = small_config(
        cluster={"trainers": trainers},
        train={"update": update, "max_steps": last, "batch_size": 128, "log_every_steps": 1},
        checkpoint={"every_steps": 1, "keep_last": 99, "keep_best": "none"},
        dense={"optimizer": "Adam", "learning_rate": 0.01},
    )
    cluster = clusters.get(trainers, 2, has_many_hosts=True)
    cluster.run(train, config, cache, tmp_path / "whole")
    for cut in cuts:
        run = tmp_path / str(cut)
        cluster.run(train, config, cache, run, last_step=cut + 1, saved_step=cut)
        notes = cluster.run(train, config, cache, run, resume=True)
        assert "from step" in notes[0]
        for step in range(cut, last + 1):
            assert checksums(step_folder(run, step)) == checksums(step_folder(tmp_path / "whole", step)), step
