"""From a configuration to a prepared data set: made once, reused, shared by concurrent runs."""

import dataclasses
import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import torch

from hybrid.config import RunConfig
from hybrid.config.sections import NAMED_KEYS, SECTION_KEYS
from hybrid.data.dataset import dataset_manifest
from hybrid.data.dataset.atomic_directory import building, parts_of_building
from hybrid.data.dataset.dataset_manifest import DataManifest, DatasetReport
from hybrid.data.dataset.group_order import write_group_order
from hybrid.data.parse.input_files import InputFile, check_unchanged, input_files
from hybrid.data.prepare import synthetic_log
from hybrid.data.prepare.file_preparation import FilesPreparation
from hybrid.data.prepare.memory_limit import memory_at_hand
from hybrid.data.prepare.other_hosts import Helpers, Host
from hybrid.data.prepare.split_writer import SplitWriter
from hybrid.data.prepare.stages import TEST, TRAIN, Reading
from hybrid.data.values.targets import TargetSpec
from hybrid.errors import DataError, StorageError
from hybrid.metrics import BinaryMetrics, binary_metrics
from hybrid.primitives.meter import Meter, tell_nobody
from hybrid.storage.remote_path import Place, RemotePath, place

LOCAL_CACHE = "runs/.prepared"


def cache_folder(config: RunConfig) -> Place:
    """Where prepared data sets are kept: beside the runs, if the configuration does not say otherwise."""
    return place(config.data.cache_folder or LOCAL_CACHE)


def fingerprint(config: RunConfig) -> str:
    """What :func:`prepare` calls the folder of the data of ``config``; raises what that does of the files."""
    return _fingerprint(config, *input_files(config.data))


def prepare(
    config: RunConfig,
    cache: Path,
    tell: Callable[[str], None] = tell_nobody,
    check: Callable[[], None] = lambda: None,
    hosts: Callable[[], Sequence[Host]] = tuple,
    sent: RemotePath | None = None,
) -> Path:
    """Make sure that the training and test samples of ``config`` are prepared; the folder they are in.

    The folder's name is a fingerprint of all that its content depends on. It appears whole or not at all, so
    runs that share ``cache`` may prepare at the same time: the first to finish wins.

    Args:
        cache: where prepared data sets are kept; made where it does not exist.
        tell: told what is going on, a line at a time.
        check: called between blocks of rows; what it raises ends the preparation, which leaves nothing, or,
            of a ClusterError, its parts.
        hosts: gives those that may help, from when they are there.
        sent: where in a store they send parts, if they do not see ``cache``.

    Raises:
        ConfigError: a key does not fit the files.
        DataError: the files cannot be used, or memory runs out.
    """
    train_files, test_files = input_files(config.data)
    target = cache / _fingerprint(config, train_files, test_files)
    if _is_whole(target):
        if config.data.checksum == "whole":
            _verify(target)
        tell(f"prepared data found in {target}")
        return target
    started = time.monotonic()
    with memory_at_hand(), _building(target) as folder:
        if config.data.format == "synthetic":
            tell("making the synthetic click log")
            reports = _write_synthetic(config, folder, tell)
        else:
            tell(f"preparing {', '.join(file.path for file in train_files + test_files)}")
            helpers = Helpers(hosts, train_files + test_files, sent)
            reports = _write_files(config, train_files, test_files, target, folder, tell, check, helpers)
    train, test = reports[TRAIN].num_rows, reports[TEST].num_rows
    tell(
        f"prepared {train:,} training and {test:,} test rows in {time.monotonic() - started:.1f} s: {target}"
    )
    return target


def _verify(folder: Path) -> None:
    try:
        DataManifest.read(folder / dataset_manifest.FILE_NAME).verify(folder)
    except DataError as error:
        raise DataError(f"{error}; delete {folder} to prepare it anew") from error


def _fingerprint(config: RunConfig, *files: tuple[InputFile, ...]) -> str:
    """A name for all that the prepared content depends on."""
    is_synthetic = config.data.format == "synthetic"
    keys = {
        name: value
        for name, value in dataclasses.asdict(config.data).items()
        if name == "format"
        or (is_synthetic and name in ("weight", "group"))
        or (name.startswith("synthetic_") == is_synthetic and SECTION_KEYS["data"][name].prepares)
    }
    stamps = [[{**dataclasses.asdict(file), "path": ""} for file in group] for group in files]
    seed = None if config.data.test_path else config.run.seed  # it only chooses what is held out
    columns = {
        name: {key: getattr(section, key) for key, each in NAMED_KEYS["columns"].items() if each.prepares}
        for name, section in config.columns.items()
    }
    decisive: list[object] = [
        dataset_manifest.FORMAT_VERSION,
        seed,
        keys,
        _prepared_tasks(config),
        columns,
        stamps,
    ]
    if shared := sorted(sorted(each.features) for each in config.tables.values() if len(each.features) > 1):
        decisive.append(shared)
    text = json.dumps(decisive, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=10).hexdigest()


def _prepared_tasks(config: RunConfig) -> list[list[object]]:
    """What of the sections [tasks.NAME] prepared data depend on."""
    keys = [name for name, key in NAMED_KEYS["tasks"].items() if key.prepares]
    return [[name, *(getattr(task, key) for key in keys)] for name, task in config.tasks.items()]


def _is_whole(target: Path) -> bool:
    """Whether a data set is prepared; DataError where it is another user's."""
    try:
        return target.is_dir() and dataset_manifest.FILE_NAME in os.listdir(target)
    except OSError as error:
        raise DataError(f"{target}: cannot be read ({error.strerror}); set data.cache_folder") from error


@contextmanager
def _building(target: Path) -> Iterator[Path]:
    """As :func:`building`; what the disk refuses is a DataError."""
    try:
        with building(target, dataset_manifest.FILE_NAME) as folder:
            yield folder
    except StorageError:  # of the input
        raise
    except OSError as error:
        raise DataError(f"{target.parent}: cannot be written ({error}); set data.cache_folder") from error


def _write_synthetic(
    config: RunConfig, folder: Path, tell: Callable[[str], None]
) -> dict[str, DatasetReport]:
    log = synthetic_log.ClickLog(config.run.seed)
    spec = log.encoder.input_spec
    targets = synthetic_log.targets(config)
    with closing(SplitWriter(folder / TRAIN, spec, targets)) as writer:
        meter = Meter("making the synthetic click log", tell)
        for block in log.blocks(TRAIN, config.data.synthetic_rows):
            writer.append(block.samples, block.targets(targets), block.rows_B)
            meter.add(len(block.rows_B))
    write_group_order(folder / TRAIN)
    reports = {TRAIN: writer.report()}
    truth = []
    with closing(SplitWriter(folder / TEST, spec, targets)) as writer:
        for block in log.blocks(TEST, config.data.synthetic_test_rows):
            writer.append(block.samples, block.targets(targets), block.rows_B)
            truth.append((block.logits_B, block.labels_B))
    logits_B, labels_B = (torch.from_numpy(np.concatenate(parts)) for parts in zip(*truth, strict=True))
    reports[TEST] = _with_best(writer.report(), targets, binary_metrics(logits_B, labels_B))
    log.encoder.save(folder)
    DataManifest.write(folder, spec, reports)
    return reports


def _with_best(report: DatasetReport, targets: TargetSpec, best: BinaryMetrics) -> DatasetReport:
    """A report that says how well clicks can be predicted: only luck does better."""
    auc = None if math.isnan(best.auc) else best.auc
    labels = tuple(
        dataclasses.replace(label, best_auc=auc, best_log_loss=best.log_loss)
        if task.label == synthetic_log.CLICKED and not task.mask
        else label
        for label, task in zip(report.labels, targets.tasks.values(), strict=True)
    )
    return dataclasses.replace(report, labels=labels)


def _write_files(
    config: RunConfig,
    train_files: tuple[InputFile, ...],
    test_files: tuple[InputFile, ...],
    target: Path,
    folder: Path,
    tell: Callable[[str], None],
    check: Callable[[], None],
    helpers: Helpers,
) -> dict[str, DatasetReport]:
    reading = Reading(config.data, dict(config.columns), dict(config.tasks))
    spare = folder / "parts"
    memory_bytes = int(config.data.prepare_memory_gb * 2**30)
    with parts_of_building(target, spare) as parts:
        preparation = FilesPreparation(config, reading, folder, parts, tell, check, memory_bytes, helpers)
        train, test = ([place(file.path) for file in files] for files in (train_files, test_files))
        encoder, reports = preparation.write(train, test)
    shutil.rmtree(spare, ignore_errors=True)
    _check_labels(reports[TRAIN], config, train_files)
    check_unchanged(train_files + test_files)
    write_group_order(folder / TRAIN)
    encoder.save(folder)
    DataManifest.write(folder, encoder.input_spec, reports, {TRAIN: train_files, TEST: test_files})
    return reports


def _check_labels(report: DatasetReport, config: RunConfig, files: tuple[InputFile, ...]) -> None:
    """DataError where there is nothing to learn of a task."""
    for label in report.labels:
        key = f"tasks.{label.name}" if config.tasks else "data"
        of_task, mask = (f" for task {label.name}", f"{key}.mask and ") if config.tasks else ("", "")
        if not label.count:
            raise DataError(f"{_names(files)}: no training row counts{of_task}; check {mask}data.weight")
        if label.only is not None:
            rule = f"check {key}.label, data.positive_labels and data.negative_labels"
            raise DataError(
                f"{_names(files)}: every training row has label {label.only:g}{of_task}, nothing to learn; "
                f"{rule}"
            )


def _names(files: tuple[InputFile, ...]) -> str:
    return ", ".join(file.path for file in files)
