"""Preparation of the data set of a configuration. Later and concurrent runs use the same prepared data.

The data are in a folder that every trainer can read, or in an object store. With a store, one process
prepares the data in a local folder and sends the files of this folder::

    CACHE/FINGERPRINT/attempt.txt   the name of the folder ATTEMPT with all files; written last
    CACHE/FINGERPRINT/ATTEMPT/...   the files, in a folder with a random name

Every other host fetches all files once, into a folder that its trainers share.
"""

import dataclasses
import hashlib
import json
import math
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path

import numpy as np
import torch

from hybrid.config import DataSection, RunConfig
from hybrid.config.data_sections import TEST, TRAIN, VALIDATION, without_growth
from hybrid.config.sections import NAMED_KEYS, SECTION_KEYS
from hybrid.data.dataset import dataset_manifest, prepared_dataset
from hybrid.data.dataset.dataset_manifest import NO_INVALID_ROWS, DataManifest, DatasetReport
from hybrid.data.dataset.prepared_dataset import LabelSums, PreparedDataset, SplitWriter, label_reports
from hybrid.data.encode.feature_encoder import FILE_NAME as FEATURES, FeatureEncoder
from hybrid.data.parse.input_files import InputFile, check_unchanged, find_input_files, path_columns
from hybrid.data.prepare import synthetic_log
from hybrid.data.prepare.file_preparation import FilesPreparation
from hybrid.errors import ConfigError, DataError, StorageError
from hybrid.metrics import binary_metrics
from hybrid.primitives.progress import Progress, ignore_progress
from hybrid.storage import files as storage
from hybrid.storage.locked_folders import build_directory, hold_lock
from hybrid.storage.private_files import make_folder
from hybrid.storage.remote_path import RemotePath, StoragePath, parse_path

LOCAL_CACHE = "runs/.prepared"
SET_CACHE = "set data.cache_folder"
_ATTEMPT = "attempt.txt"


def fingerprint(config: RunConfig, files: Mapping[str, Sequence[InputFile]] | None = None) -> str:
    """Return the folder name of prepared data: a hash of everything that determines the data.

    Different spellings of a path give the same name. Without ``files``, find the input files of ``config``,
    and raise the errors of :func:`find_input_files`.
    """
    files = files or find_input_files(config.data)
    is_synthetic = config.data.format == "synthetic"
    keys = {
        name: value
        for name, value in dataclasses.asdict(config.data).items()
        if name == "format"
        or (is_synthetic and name in ("weight", "group", "validation"))
        or (name.startswith("synthetic_") == is_synthetic and SECTION_KEYS["data"][name].prepares)
    }
    if config.data.paths[VALIDATION]:
        keys["validation"] = "path"
    if not is_synthetic:
        keys["vocabulary"] = without_growth(config.data.vocabulary)
    stamps = [
        [{**dataclasses.asdict(file), "path": path_columns(parse_path(file.path))} for file in group]
        for group in files.values()
    ]
    seed = config.run.seed if is_synthetic or config.data.holdouts else None
    task_keys = [name for name, key in NAMED_KEYS["tasks"].items() if key.prepares]
    tasks = [[name, *(getattr(task, key) for key in task_keys)] for name, task in config.tasks.items()]
    columns = {
        name: {key: getattr(section, key) for key, each in NAMED_KEYS["columns"].items() if each.prepares}
        for name, section in config.columns.items()
    }
    for section in columns.values():
        section["vocabulary"] = without_growth(section["vocabulary"])
    content: list[object] = [dataset_manifest.FORMAT_VERSION, seed, keys, tasks, columns, stamps]
    content += [{**call.arguments, "path": None} for call in config.data.join_calls]
    if shared := sorted(sorted(each.features) for each in config.tables.values() if len(each.features) > 1):
        content.append(shared)
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=10).hexdigest()


def prepare(
    config: RunConfig, cache: Path, report: Callable[[str], None] = ignore_progress, remedy: str = SET_CACHE
) -> Path:
    """Make sure that the samples of all splits of ``config`` are prepared; return their folder.

    The folder is ``cache/FINGERPRINT`` (:func:`fingerprint`), and appears atomically. If several processes
    need the same data at the same time, one prepares them, and the others wait. ``report`` receives progress,
    one line at a time. Error messages about the folder ``cache`` end with ``remedy``.

    Raises:
        ConfigError: a key contradicts the input files, or the columns of the synthetic click log.
        DataError: an input file is unusable, or changes during the preparation; all training rows have one
            label, or weight 0; the process cannot read or write in ``cache``; or memory runs out.
        StorageError: a store refuses a request.
    """
    files = find_input_files(config.data)
    target = cache / fingerprint(config, files)
    try:
        with build_directory(target) as folder:
            if folder is None:
                if not os.access(target, os.R_OK | os.X_OK):
                    raise DataError(f"{target}: belongs to another user; {remedy}")
                report(f"prepared data found in {target}")
                return target
            started = time.monotonic()
            if config.data.format == "synthetic":
                report("making the synthetic click log")
                files = {}
                encoder, reports = _write_synthetic(config, folder, report)
            else:
                report(f"preparing {', '.join(file.path for file in chain(*files.values()))}")
                encoder, reports = _write_files(config, files, folder, report)
            prepared_dataset.write_group_order(folder / TRAIN)
            encoder.save(folder)
            DataManifest.write(folder, encoder.input_spec, reports, files)
    except StorageError:  # of the input
        raise
    except OSError as error:
        raise DataError(f"{target.parent}: cannot be written ({error}); {remedy}") from error
    except MemoryError as error:
        rule = "set data.vocabulary = hash or grow, which keep no values, or add memory"
        raise DataError(f"out of memory while preparing the data; {rule}") from error
    train, *others = (f"{reports[split].num_rows:,} {split}" for split in config.data.splits)
    seconds = time.monotonic() - started
    report(f"prepared {train}ing and {' and '.join(others)} rows in {seconds:.1f} s: {target}")
    return target


def _write_synthetic(
    config: RunConfig, folder: Path, report: Callable[[str], None]
) -> tuple[FeatureEncoder, dict[str, DatasetReport]]:
    log = synthetic_log.ClickLog(config.run.seed)
    spec = synthetic_log.INPUT_SPEC
    targets = synthetic_log.targets(config)
    reports, truth = {}, []
    for split, num_rows in config.data.synthetic_splits.items():
        progress = Progress(report, "making the synthetic click log")
        writer, at = SplitWriter(folder / split, spec, targets, np.array([num_rows])), np.array([0])
        sums = []
        for block in log.blocks(split, num_rows):
            of_block = block.targets(targets)
            at = writer.write(at, block.samples._replace(targets=of_block), block.rows_B)
            sums.append(LabelSums.of(of_block))
            progress.add(len(block.rows_B))
            if split == TEST:
                truth.append((block.logits_B, block.columns[synthetic_log.CLICKED]))
        labels = label_reports(targets.tasks, sums)
        reports[split] = DatasetReport(num_rows, labels, NO_INVALID_ROWS)
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
    return FeatureEncoder.identity(spec), reports


def _write_files(
    config: RunConfig, files: dict[str, tuple[InputFile, ...]], folder: Path, report: Callable[[str], None]
) -> tuple[FeatureEncoder, dict[str, DatasetReport]]:
    encoder, reports = FilesPreparation(config, files, folder, report).write()
    names = ", ".join(file.path for file in files[TRAIN])
    for label in reports[TRAIN].labels:
        key = f"tasks.{label.name}" if config.tasks else "data"
        of_task, mask = (f" for task {label.name}", f"{key}.mask and ") if config.tasks else ("", "")
        mask = f"{key}.label and " if label.kind == "retrieval" else mask
        if not label.count:
            raise DataError(f"{names}: all training weights are 0{of_task}; check {mask}data.weight")
        if label.constant is not None:
            rule = f"check {key}.label, data.positive_labels and data.negative_labels"
            found = f"every training row has label {label.constant:g}{of_task}, nothing to learn; {rule}"
            if (invalid := reports[TRAIN].bad_rows).total:
                found += f"; {invalid.total:,} rows are invalid, the first: {invalid.examples[0]}"
            raise DataError(f"{names}: {found}")
    check_unchanged([*chain(*files.values())])
    return encoder, reports


def ensure_prepared(
    config: RunConfig, report: Callable[[str], None] = ignore_progress, remedy: str = SET_CACHE
) -> StoragePath:
    """Prepare the data in ``data.cache_folder``, which may be in a store; return the folder with the files.

    Raise the errors of :func:`prepare`, and ConfigError if ``data.stream`` is set. With a store, also raise
    DataError for altered data, an unreadable list of files, or an unusable ``data.local_cache_folder``.
    """
    if config.data.is_stream:
        rule = "is read by cluster.stream(), not by cluster.prepare(); evaluations of its runs need --input"
        raise ConfigError("data.stream", rule, config.data.stream)
    cache = parse_path(config.data.cache_folder or LOCAL_CACHE)
    if not isinstance(cache, RemotePath):
        return prepare(config, cache, report, remedy)
    target = cache / fingerprint(config)
    local = Path(config.data.local_cache_folder or LOCAL_CACHE)
    # One process of this machine sends the data.
    with _convert_local_errors(local), hold_lock(local / f"{target.name}.sending"):
        with suppress(FileNotFoundError):
            folder = target / storage.read_text(target / _ATTEMPT)
            storage.require_file(folder / dataset_manifest.FILE_NAME)
            manifest = DataManifest.read(folder / dataset_manifest.FILE_NAME)
            if storage.compute_checksum(folder / FEATURES) != manifest.stored[FEATURES].whole:
                raise _altered_error(folder / FEATURES)
            report(f"prepared data found in {target}")
            return folder
        prepared = prepare(config, local, report, "set data.local_cache_folder")
        report(f"sending the prepared data to {target}")
        # If two masters send at the same time, both folders are complete, and the name written last is valid.
        folder = target / uuid.uuid4().hex
        try:
            _send(prepared, folder, report)
            storage.write_bytes(target / _ATTEMPT, folder.name.encode())
        except BaseException:
            with suppress(OSError):
                storage.remove(folder)
            raise
    return folder


def open_split(source: str | StoragePath, split: str, data: DataSection) -> PreparedDataset:
    """Open the split "train", "validation" or "test" of prepared data.

    Args:
        source: the result of :func:`ensure_prepared`, or its absolute path or URL.
        data: names the folder (``local_cache_folder``) to which data from a store are copied.

    Raises:
        DataError: the data are incomplete or altered, or the local folder cannot be written.
        StorageError: the store refuses a request.
    """
    path = parse_path(source)
    if isinstance(path, RemotePath):
        path = _fetch(path, Path(data.local_cache_folder or LOCAL_CACHE))
    return PreparedDataset(path, split)


def _altered_error(path: RemotePath) -> DataError:
    return DataError(f"{path}: altered since it was prepared; delete its folder")


def _send(folder: Path, target: RemotePath, report: Callable[[str], None]) -> None:
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    total, done = sum(path.stat().st_size for path in paths), 0
    progress = Progress(report, f"sending {target}")
    for path in paths:
        with storage.open_writer(target / str(path.relative_to(folder))) as file:
            for block in storage.read_blocks(path):
                file.write(block)
                done += len(block)
                progress.add(0, done / total)


def _fetch(source: RemotePath, cache: Path) -> Path:
    target = cache / source.parent.name
    with _convert_local_errors(cache):
        try:
            with build_directory(target) as folder:
                if folder is None:
                    return target
                for name, file in DataManifest.read(source / dataset_manifest.FILE_NAME).stored.items():
                    make_folder((folder / name).parent)
                    storage.copy(source / name, folder / name)
                    if storage.compute_checksum(folder / name) != file.whole:
                        raise _altered_error(source / name)
                storage.copy(source / dataset_manifest.FILE_NAME, folder / dataset_manifest.FILE_NAME)
        except FileNotFoundError as error:
            rule = "delete the folder to prepare again"
            raise DataError(f"{source}: a file is missing ({error}); {rule}") from error
    return target


@contextmanager
def _convert_local_errors(cache: Path) -> Iterator[None]:
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        reason = error.strerror or error
        rule = "free space there, or set data.local_cache_folder to another folder of this host"
        raise DataError(f"{cache}: cannot hold prepared data: {reason}; {rule}") from error
