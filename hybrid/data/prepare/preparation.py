"""Preparation of a configuration's data set: made once, reused, shared by concurrent runs."""

import dataclasses
import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import torch

from hybrid.config import RunConfig
from hybrid.config.sections import NAMED_KEYS, SECTION_KEYS
from hybrid.data.dataset import dataset_manifest
from hybrid.data.dataset.atomic_directory import build_directory, keep_segments
from hybrid.data.dataset.dataset_manifest import DataManifest, DatasetReport
from hybrid.data.dataset.group_order import write_group_order
from hybrid.data.parse.input_files import InputFile, check_unchanged, input_files
from hybrid.data.prepare import synthetic_log
from hybrid.data.prepare.file_preparation import FilesPreparation
from hybrid.data.prepare.split_writer import SplitWriter
from hybrid.data.prepare.stages import TEST, TRAIN
from hybrid.errors import DataError, StorageError
from hybrid.metrics import binary_metrics
from hybrid.primitives.progress import Progress, ignore_progress
from hybrid.storage.remote_path import StoragePath, parse_path

LOCAL_CACHE = "runs/.prepared"


def cache_folder(config: RunConfig) -> StoragePath:
    """Return the folder of prepared data sets: beside the runs, unless the configuration names another."""
    return parse_path(config.data.cache_folder or LOCAL_CACHE)


def fingerprint(config: RunConfig, *files: tuple[InputFile, ...]) -> str:
    """Return the name of the folder of prepared data: a hash of everything that its content depends on.

    It does not depend on how the paths of the files are spelled.

    Args:
        files: the training files and the test files; by default those of ``config``, which must exist.
    """
    files = files or input_files(config.data)
    is_synthetic = config.data.format == "synthetic"
    keys = {
        name: value
        for name, value in dataclasses.asdict(config.data).items()
        if name == "format"
        or (is_synthetic and name in ("weight", "group"))
        or (name.startswith("synthetic_") == is_synthetic and SECTION_KEYS["data"][name].prepares)
    }
    for name in ("path", "test_path"):
        keys.pop(name, None)
    stamps = [[{**dataclasses.asdict(file), "path": ""} for file in group] for group in files]
    seed = None if config.data.test_path else config.run.seed  # it only selects the held-out rows
    task_keys = [name for name, key in NAMED_KEYS["tasks"].items() if key.prepares]
    tasks = [[name, *(getattr(task, key) for key in task_keys)] for name, task in config.tasks.items()]
    columns = {
        name: {key: getattr(section, key) for key, each in NAMED_KEYS["columns"].items() if each.prepares}
        for name, section in config.columns.items()
    }
    content: list[object] = [dataset_manifest.FORMAT_VERSION, seed, keys, tasks, columns, stamps]
    if shared := sorted(sorted(each.features) for each in config.tables.values() if len(each.features) > 1):
        content.append(shared)
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=10).hexdigest()


def prepare(
    config: RunConfig,
    cache: Path,
    report: Callable[[str], None] = ignore_progress,
    check: Callable[[], None] = lambda: None,
) -> Path:
    """Make sure that the training and test samples of ``config`` are prepared; return their folder.

    The folder's name is a fingerprint of everything that its content depends on. The folder appears
    atomically, so runs that share ``cache`` may prepare at the same time: the first to finish wins.

    Args:
        cache: folder of prepared data sets.
        report: receives progress, one line at a time.
        check: called between blocks of rows; what it raises ends the preparation. Nothing is left then,
            except, after a ClusterError, the parsed segments.

    Raises:
        ConfigError: a key does not fit the files.
        DataError: the files cannot be used, or memory runs out.
    """
    train_files, test_files = input_files(config.data)
    target = cache / fingerprint(config, train_files, test_files)
    try:
        is_complete = target.is_dir() and dataset_manifest.FILE_NAME in os.listdir(target)
    except OSError as error:  # it belongs to another user
        raise DataError(f"{target}: cannot be read ({error.strerror}); set data.cache_folder") from error
    if is_complete:
        report(f"prepared data found in {target}")
        return target
    started = time.monotonic()
    try:
        with build_directory(target, dataset_manifest.FILE_NAME) as folder:
            if config.data.format == "synthetic":
                report("making the synthetic click log")
                reports = _write_synthetic(config, folder, report)
            else:
                report(f"preparing {', '.join(file.path for file in train_files + test_files)}")
                reports = _write_files(config, train_files, test_files, target, folder, report, check)
    except StorageError:  # of the input
        raise
    except OSError as error:
        raise DataError(f"{target.parent}: cannot be written ({error}); set data.cache_folder") from error
    except MemoryError as error:
        rule = "set data.prepare_memory_gb lower, or data.vocabulary = hash, which holds no values"
        raise DataError(f"out of memory while preparing the data: give it more, {rule}") from error
    train, test = reports[TRAIN].num_rows, reports[TEST].num_rows
    seconds = time.monotonic() - started
    report(f"prepared {train:,} training and {test:,} test rows in {seconds:.1f} s: {target}")
    return target


def _write_synthetic(
    config: RunConfig, folder: Path, report: Callable[[str], None]
) -> dict[str, DatasetReport]:
    log = synthetic_log.ClickLog(config.run.seed)
    spec = log.encoder.input_spec
    targets = synthetic_log.targets(config)
    reports, truth = {}, []
    for split, num_rows in ((TRAIN, config.data.synthetic_rows), (TEST, config.data.synthetic_test_rows)):
        progress = Progress(report, "making the synthetic click log")
        with closing(SplitWriter(folder / split, spec, targets)) as writer:
            for block in log.blocks(split, num_rows):
                writer.append(block.samples, block.targets(targets), block.rows_B)
                progress.add(len(block.rows_B))
                if split == TEST:
                    truth.append((block.logits_B, block.labels_B))
        reports[split] = writer.report()
    write_group_order(folder / TRAIN)
    # No model predicts clicks better than the true probabilities do.
    logits_B, labels_B = (torch.from_numpy(np.concatenate(blocks)) for blocks in zip(*truth, strict=True))
    best = binary_metrics(logits_B, labels_B)
    auc = None if math.isnan(best.auc) else best.auc
    labels = tuple(
        dataclasses.replace(label, best_auc=auc, best_log_loss=best.log_loss)
        if task.label == synthetic_log.CLICKED and not task.mask
        else label
        for label, task in zip(reports[TEST].labels, targets.tasks.values(), strict=True)
    )
    reports[TEST] = dataclasses.replace(reports[TEST], labels=labels)
    log.encoder.save(folder)
    DataManifest.write(folder, spec, reports)
    return reports


def _write_files(
    config: RunConfig,
    train_files: tuple[InputFile, ...],
    test_files: tuple[InputFile, ...],
    target: Path,
    folder: Path,
    report: Callable[[str], None],
    check: Callable[[], None],
) -> dict[str, DatasetReport]:
    spare = folder / "parts"
    memory_bytes = int(config.data.prepare_memory_gb * 2**30)
    with keep_segments(target, spare) as segments:
        preparation = FilesPreparation(config, folder, segments, report, check, memory_bytes)
        train, test = ([parse_path(file.path) for file in files] for files in (train_files, test_files))
        encoder, reports = preparation.write(train, test)
    shutil.rmtree(spare, ignore_errors=True)
    names = ", ".join(file.path for file in train_files)
    for label in reports[TRAIN].labels:
        key = f"tasks.{label.name}" if config.tasks else "data"
        of_task, mask = (f" for task {label.name}", f"{key}.mask and ") if config.tasks else ("", "")
        if not label.count:
            raise DataError(f"{names}: no training row counts{of_task}; check {mask}data.weight")
        if label.only is not None:
            rule = f"check {key}.label, data.positive_labels and data.negative_labels"
            raise DataError(
                f"{names}: every training row has label {label.only:g}{of_task}, nothing to learn; {rule}"
            )
    check_unchanged(train_files + test_files)
    write_group_order(folder / TRAIN)
    encoder.save(folder)
    DataManifest.write(folder, encoder.input_spec, reports, {TRAIN: train_files, TEST: test_files})
    return reports
