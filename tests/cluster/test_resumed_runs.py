"""Checkpoints of a running cluster: each of one moment, and what goes on from one is as if never stopped."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import flip_a_bit
from support.cluster import CaseError, Clusters, small_config
from support.far import in_store
from support.jobs import opened
from support.stopped_runs import calls_of, checksums, lines, stop, train
from support.stores import BUCKET, Proxy, Store

from hybrid import transport
from hybrid.checkpoint import checkpoint_folders
from hybrid.checkpoint.checkpoint_folders import step_folder
from hybrid.checkpoint.checkpoint_manifest import DENSE_FILE, PROGRESS_FILE, Files, Manifest
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.config import RunConfig
from hybrid.data.prepare.preparation import cache_folder
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


def tensors_of(stored: Checkpoint) -> dict[str, str]:
    """As :func:`checksums`, of an open one."""
    files = stored.manifest.files
    return {name: sha256 for name, (_, sha256) in files.items() if name.endswith(".safetensors")}


@pytest.fixture(scope="module")
def whole(clusters: Clusters, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody stops; not to be changed."""
    run = tmp_path_factory.mktemp("whole") / "run"
    assert clusters.get(2, 2).run(train, CONFIG, cache, run) == []
    return run


def test_a_run_writes_checkpoints_as_configured(whole: Path) -> None:
    steps = sorted(
        checkpoint_folders.parse_step(folder) for folder in checkpoint_folders.list_checkpoints(whole)
    )
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


def test_an_interrupted_run_goes_on_bit_for_bit_as_one_that_was_not(
    whole: Path, clusters: Clusters, cache: Path, tmp_path: Path
) -> None:
    """Between two lines of progress, in the middle of an epoch, with dropout and running statistics."""
    run, cluster = tmp_path / "run", clusters.get(2, 2)
    cluster.run(train, CONFIG, cache, run, last_step=15, saved_step=CUT)
    assert checkpoint_folders.parse_step(checkpoint_folders.list_checkpoints(run)[0]) == CUT
    assert not (run / "result.json").exists()
    (step_folder(run, 16).with_suffix(".partial")).mkdir()
    said = [f"resuming from step {CUT}: {step_folder(run, CUT)}"]
    assert cluster.run(train, CONFIG, cache, run, resume=True) == said
    assert lines(run) == lines(whole)
    assert checksums(step_folder(run, TOTAL)) == checksums(step_folder(whole, TOTAL))
    assert not list(run.glob("checkpoints/*.partial"))
    for folder in checkpoint_folders.list_checkpoints(run):
        here, there = (step_folder(each, checkpoint_folders.parse_step(folder)) for each in (run, whole))
        assert Checkpoint.open(here).manifest.metrics == Checkpoint.open(there).manifest.metrics
        assert checksums(here) == checksums(there)
    results = [json.loads((each / "result.json").read_text()) for each in (run, whole)]
    for key in ("auc", "steps", "skipped_steps"):
        assert results[0][key] == results[1][key]


def test_one_with_its_data_in_a_store_goes_on_as_one_that_has_them_in_a_folder(
    whole: Path, clusters: Clusters, store: Store, tmp_path: Path
) -> None:
    run, cluster, config = tmp_path / "run", clusters.get(2, 2), in_store(CONFIG, store, tmp_path)
    cluster.run(train, config, cache_folder(config), run, last_step=15, saved_step=CUT)
    cluster.run(train, config, cache_folder(config), run, resume=True)
    assert lines(run) == lines(whole)
    assert checksums(step_folder(run, TOTAL)) == checksums(step_folder(whole, TOTAL))


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
def test_a_run_that_was_asked_to_stop_goes_on_bit_for_bit_as_one_that_was_not(
    moment: tuple[str, int], step: int, whole: Path, clusters: Clusters, cache: Path, tmp_path: Path
) -> None:
    run, cluster = tmp_path / "run", clusters.get(2, 2)
    code, statuses = cluster.run(stop, CONFIG, cache, run, moment)
    assert code is ExitCode.TERMINATED
    assert statuses[-1] == f"saving step {step}; again to stop at once"
    assert f"stopping after step {step}; again to stop at once" in statuses or moment[0] == "done evaluating"
    assert checkpoint_folders.parse_step(checkpoint_folders.list_checkpoints(run)[0]) == step
    assert not (run / "result.json").exists()
    said = [f"resuming from step {step}: {step_folder(run, step)}"]
    assert cluster.run(train, CONFIG, cache, run, resume=True) == said
    assert lines(run) == lines(whole)
    assert checksums(step_folder(run, TOTAL)) == checksums(step_folder(whole, TOTAL))
    results = [json.loads((each / "result.json").read_text()) for each in (run, whole)]
    assert results[0]["auc"] == results[1]["auc"]
    kept = {checkpoint_folders.parse_step(folder) for folder in checkpoint_folders.list_checkpoints(whole)}
    assert {checkpoint_folders.parse_step(folder) for folder in checkpoint_folders.list_checkpoints(run)} == {
        *kept,
        step,
    }
    if step < TOTAL:
        bests = [Checkpoint.open(step_folder(each, 28)).manifest.progress["best"] for each in (run, whole)]
        assert bests[0] == bests[1]


def test_how_many_steps_trainers_take_at_a_time_means_nothing(
    whole: Path, clusters: Clusters, cache: Path, tmp_path: Path
) -> None:
    assert clusters.get(2, 2).run(calls_of, CONFIG, cache, tmp_path / "run", 1e-9) == [1] * TOTAL
    assert lines(tmp_path / "run") == lines(whole)
    assert checksums(step_folder(tmp_path / "run", TOTAL)) == checksums(step_folder(whole, TOTAL))


def test_a_run_without_a_checkpoint_begins_again_and_says_so(
    clusters: Clusters, cache: Path, tmp_path: Path
) -> None:
    config = small_config(train={"max_steps": 2, "batch_size": 128})
    (note,) = clusters.get(2, 2).run(train, config, cache, tmp_path, resume=True)
    assert note == f"{tmp_path} has no checkpoint: starting from the beginning"


def test_an_altered_checkpoint_is_said_and_the_one_before_is_taken(
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
    assert lines(run) == lines(whole)
    assert checksums(step_folder(run, 28)) == checksums(step_folder(whole, 28))
    assert checksums(step_folder(run, TOTAL)) == checksums(step_folder(whole, TOTAL))


def test_a_run_that_was_killed_after_its_last_checkpoint_only_ends(
    whole: Path, clusters: Clusters, cache: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    (run / "result.json").unlink()
    said = [f"resuming from step {TOTAL}: {step_folder(run, TOTAL)}"]
    assert clusters.get(2, 2).run(train, CONFIG, cache, run, resume=True) == said
    assert lines(run) == lines(whole)
    results = [json.loads((each / "result.json").read_text()) for each in (run, whole)]
    assert results[0]["auc"] == results[1]["auc"]
    with pytest.raises(CaseError, match=f"the run has taken all {TOTAL} steps; raise it to continue"):
        clusters.get(2, 2).run(train, CONFIG, cache, run, resume=True)


def losses_after(cluster: JoinedCluster, config: RunConfig, cache: Path, scratch: Path) -> list[list[float]]:
    """Those of all trainers in the steps after a checkpoint: trained on, and loaded from it."""
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
    """What trainers would write of their nets, as they took them from a checkpoint."""
    with opened(cluster, config, cache) as session:
        session.load(Checkpoint.open(scratch / "saved"))
        transport.gather([trainer.call(Trainer.begin_save, DENSE_FILE) for trainer in session.trainers])
        return transport.gather([trainer.call(Trainer.write, scratch) for trainer in session.trainers])


@pytest.mark.parametrize("ddp", ["none", "inside"])
def test_trainers_with_nets_of_their_own_go_on_with_those(
    ddp: str, clusters: Clusters, cache: Path, tmp_path: Path
) -> None:
    config = small_config(dense={"ddp": ddp})
    first, second, *again = clusters.get(2, 2).run(losses_after, config, cache, tmp_path)
    assert again == [first, second]
    shared = small_config(dense={"ddp": "outside"})
    nets = clusters.get(2, 2).run(nets_loaded, shared, cache, tmp_path)
    assert nets[0] == nets[1]


def saved_twice(cluster: JoinedCluster, config: RunConfig, cache: Path, scratch: Path) -> list[Manifest]:
    """A checkpoint written at once, and one of the same moment written after further steps."""
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
        {"train": {"update": "pipelined"}},
    ],
    ids=["sync", "pipelined"],
)
def test_a_checkpoint_is_of_its_moment_whatever_is_trained_while_it_is_written(
    sections: dict[str, dict[str, Any]], clusters: Clusters, cache: Path, tmp_path: Path
) -> None:
    at_once, later = clusters.get(2, 2).run(saved_twice, small_config(**sections), cache, tmp_path)
    assert at_once.files == later.files


def test_a_run_ends_by_its_patience_and_goes_on_with_more_of_it_only(
    clusters: Clusters, cache: Path, tmp_path: Path
) -> None:
    """At rates at which nothing moves, so that no evaluation is better than the first."""

    def config(patience: int) -> RunConfig:
        return small_config(
            train={"max_steps": 20, "eval_every_steps": 2, "patience": patience},
            checkpoint={"keep_last": 1, "keep_best": "log_loss"},
            embedding={"learning_rate": 1e-30},
            dense={"learning_rate": 1e-30},
        )

    def ended(step: int, evaluations: int) -> str:
        return f"ended at step {step}: {evaluations} evaluation(s) without a better log loss"

    run, cluster = tmp_path / "run", clusters.get(2, 2)
    assert cluster.run(train, config(2), cache, run) == [ended(6, 2)]
    assert [checkpoint_folders.parse_step(folder) for folder in checkpoint_folders.list_checkpoints(run)] == [
        6,
        2,
    ]
    result = json.loads((run / "result.json").read_text())
    assert (result["steps"], result["best"]["step"]) == (6, 2)
    with pytest.raises(CaseError, match=r"train\.patience = 2: the run ended without a better log loss"):
        cluster.run(train, config(2), cache, run, resume=True)
    said = cluster.run(train, config(3), cache, run, resume=True)
    assert said == [f"resuming from step 6: {step_folder(run, 6)}", ended(8, 3)]
    (run / "result.json").unlink()  # as if killed right before it was written
    said = cluster.run(train, config(3), cache, run, resume=True)
    assert said == [f"resuming from step 8: {step_folder(run, 8)}", ended(8, 3)]
    assert json.loads((run / "result.json").read_text())["steps"] == 8


@pytest.mark.long
def test_a_run_in_a_store_that_fails_now_and_then_goes_on_bit_for_bit(
    whole: Path, clusters: Clusters, cache: Path, tmp_path: Path, store: Store
) -> None:
    config = CONFIG.replace(checkpoint=dataclasses.replace(CONFIG.checkpoint, every_steps=CUT))
    with Proxy(store) as proxy:
        query = f"scheme=http&endpoint_override={proxy.address}"
        there, cluster = parse_path(f"s3://{BUCKET}/resumed?{query}"), clusters.get(2, 2)
        with hold_run(there, is_resumed=False) as (run, _):
            pass
        proxy.plan = lambda method, path: "503" if len(proxy.seen) % 100 == 30 else None
        cluster.run(train, config, cache, run, last_step=15, saved_step=CUT)
        left = checkpoint_folders.begin(step_folder(there, 16))
        write_bytes(left / DENSE_FILE, b"left by a kill")
        said = [f"resuming from step {CUT}: {step_folder(there, CUT)}"]
        assert cluster.run(train, config, cache, run, resume=True) == said
        assert not (run / "checkpoints").exists()
        assert lines(run) == lines(whole)
        for found in checkpoint_folders.list_checkpoints(there):
            folder = step_folder(whole, checkpoint_folders.parse_step(found))
            assert tensors_of(Checkpoint.open(found)) == checksums(folder)
        assert not exists(left)
        assert len(proxy.seen) > 30  # of which some were refused


@pytest.mark.parametrize(
    ("trainers", "update"),
    [
        (3, "sync"),
        (4, "pipelined"),
        pytest.param(3, "pipelined", marks=pytest.mark.long),
        pytest.param(4, "sync", marks=pytest.mark.long),
    ],
)
def test_a_resumed_run_that_reduces_by_the_process_group_has_the_same_bits(
    trainers: int, update: str, clusters: Clusters, cache: Path, tmp_path: Path
) -> None:
    """As on several hosts; sums do not depend on DDP's buckets, whose layout changes after the first step."""
    last = 13
    config = small_config(
        cluster={"trainers": trainers},
        train={"update": update, "max_steps": last, "batch_size": 128, "log_every_steps": 1},
        checkpoint={"every_steps": 1, "keep_last": 99, "keep_best": "none"},
        dense={"optimizer": "Adam", "learning_rate": 0.01},
    )
    cluster = clusters.get(trainers, 2, has_many_hosts=True)
    cluster.run(train, config, cache, tmp_path / "whole")
    for cut in (5, 11):
        run = tmp_path / str(cut)
        cluster.run(train, config, cache, run, last_step=cut + 1, saved_step=cut)
        notes = cluster.run(train, config, cache, run, resume=True)
        assert "from step" in notes[0]
        for step in range(cut, last + 1):
            assert checksums(step_folder(run, step)) == checksums(step_folder(tmp_path / "whole", step)), step
