"""Checkpoints of configured runs, written without a cluster."""

import csv
import random
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hybrid.checkpoint import checkpoint_folders
from hybrid.checkpoint.checkpoint_folders import DENSE_FILE, REMOTE_FILE, Files, Manifest, write_text
from hybrid.checkpoint.tensor_file import pack_dense, write_tensors
from hybrid.config import RunConfig
from hybrid.config.loading import CONFIG_FILE, load_config
from hybrid.data.dataset import dataset_manifest
from hybrid.data.encode.feature_encoder import FeatureEncoder
from hybrid.data.prepare.preparation import prepare
from hybrid.embedding.placement import place
from hybrid.embedding.trainer.embeddings import Embeddings
from hybrid.embedding.worker.table_shards import TableShards
from hybrid.engine.hybrid_model import MicroBatch
from hybrid.engine.model_builder import Blueprint, table_specs
from hybrid.inference.raw_rows import SourceRows
from hybrid.inference.trained_module import prediction_columns
from hybrid.inference.trained_run import TrainedRun
from hybrid.primitives.step_timings import StepClock
from hybrid.updates.ticket import Purpose, Ticket
from hybrid.updates.update_rules import UpdateRules
from hybrid.user_code.run_signature import signed_toml
from workers.cli.model_commands import predict

_WORKERS = 2
Shapes = dict[str, tuple[int, int, int]]
COLUMNS = ("clicked", "price", "age", "user", "item", "tags")


def write_clicks(path: Path, num_rows: int = 120, seed: int = 1, item: str = "item") -> Path:
    """Write clicks, which depend on the item, with numbers, missing values and lists of categories.

    Args:
        item: the name of column "item".
    """
    draw = random.Random(seed)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([item if name == "item" else name for name in COLUMNS])
        for _ in range(num_rows):
            price = "" if draw.random() < 0.1 else f"{draw.gauss(3, 2):.2f}"
            tags = "|".join(draw.sample("abcd", draw.randrange(4)))
            user, item = f"u{draw.randrange(20)}", draw.choice(["i1", "i2", "7.0", ""])
            clicked = int(draw.random() < (0.9 if item == "i1" else 0.1))
            writer.writerow([clicked, price, draw.randrange(90), user, item, tags])
    return path


SHOP_COLUMNS = ("time", "price", "age", "user", "item", "tags", "seen")


def write_shop(path: Path, num_rows: int = 150, seed: int = 1) -> Path:
    """Write rows with dates, weighted ids, histories, and four labels; any value may be missing."""
    draw = random.Random(seed)

    def or_missing(text: str) -> str:
        return text if draw.random() < 0.9 else draw.choice(["", "?"])

    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*SHOP_COLUMNS, "clicked", "bought", "spent", "stars", "importance"])
        for _ in range(num_rows):
            day, hour = draw.randrange(1, 29), draw.randrange(24)
            time = draw.choice(
                [f"2024-02-{day:02} {hour:02}:30", f"2024-02-{day:02}", str(1_706_693_400 + hour)]
            )
            tags = "|".join(f"{tag}:{draw.random():.3f}" for tag in draw.sample("abcd", draw.randrange(4)))
            seen = "|".join(f"i{draw.randrange(4)}" for _ in range(draw.randrange(5)))
            row = [time, f"{draw.gauss(3, 2):.2f}", str(draw.randrange(90)), f"u{draw.randrange(20)}"]
            row.append(f"i{draw.randrange(4)}")
            clicked = draw.randrange(2)
            labels = [clicked, draw.randrange(2), f"{draw.random():.2f}", draw.randrange(5), draw.random()]
            writer.writerow([*map(or_missing, row), tags, seen, *labels])
    return path


def shop_config(folder: Path, **sections: Mapping[str, object]) -> RunConfig:
    """Return the configuration of a run on :func:`write_shop`, with four tasks and columns of every kind.

    Some columns have the names of values within programs and ONNX models.
    """
    data: dict[str, object] = {
        "path": write_shop(folder / "shop.csv"),
        "dense": ["price", "days"],
        "sparse": ["age", "cat", "val_0", "sigmoid", "embedding", "tags", "seen", "user", "item"],
        "weight": "importance",
        "group": "user",
    }
    defaults: dict[str, Mapping[str, object]] = {
        "data": data,
        "tasks.click": {"label": "clicked"},
        "tasks.buy": {"label": "bought", "mask": "clicked"},
        "tasks.spent": {"type": "regression"},
        "tasks.stars": {"type": "classes(5)"},
        "columns.price": {"numeric_scaling": "min_max"},
        "columns.days": {"source": ["age"], "numeric_scaling": "standardize(log = true)"},
        "columns.age": {"kind": "buckets(18, 65)"},
        "columns.cat": {"kind": "quantiles(2)", "source": ["age"]},
        "columns.val_0": {"kind": "hour", "source": ["time"]},
        "columns.sigmoid": {"kind": "weekday", "source": ["time"]},
        "columns.embedding": {"kind": "cross", "source": ["user", "item"], "vocabulary": "hash(50)"},
        "columns.tags": {"kind": "weighted", "max_ids": 3, "pooling": "mean"},
        "columns.seen": {"max_ids": 2, "too_many_ids": "keep_last", "pooling": "none"},
        "tables.item": {"features": ["item", "seen"]},
    }
    return clicks_config(folder, **_merged(defaults, sections))


def history_config(folder: Path, **sections: Mapping[str, object]) -> RunConfig:
    """Return the configuration of a run on :func:`write_shop` with sequences of items and weighted ids."""
    sparse = ["user", "item", "seen", "tags"]
    defaults: dict[str, Mapping[str, object]] = {
        "data": {"path": write_shop(folder / "shop.csv"), "dense": ["price"], "sparse": sparse},
        "columns.seen": {"max_ids": 3, "too_many_ids": "keep_last", "pooling": "none"},
        "columns.tags": {"kind": "weighted", "max_ids": 3, "pooling": "none"},
        "tables.item": {"features": ["item", "seen"]},
    }
    return clicks_config(folder, **_merged(defaults, sections))


def predicted_columns(
    run: Path, inputs: Path, module: str | None = None
) -> dict[str, npt.NDArray[np.float64]]:
    """Return the columns that ``hybrid predict`` writes for the rows of a file."""
    output = inputs.with_suffix(".predicted")
    output.unlink(missing_ok=True)
    predict(run, [str(inputs)], output, module=module)
    header, *rows = csv.reader(output.read_text().splitlines())
    assert header[0] == "row"
    return {name: np.array([float(row[i]) for row in rows]) for i, name in enumerate(header) if i}


def engine_columns(run: Path, inputs: Path) -> dict[str, npt.NDArray[np.float64]]:
    """Return the predictions of the training engine for the rows of a file, by column."""
    trained = TrainedRun.read(run, print)
    blueprint, step = trained.blueprint, trained.stored.manifest.step
    placement = place(blueprint.tables, 1)
    shards = TableShards(placement, 0, UpdateRules(1), blueprint.dtype)
    shards.load(trained.stored.folder, step)
    embeddings = Embeddings(blueprint.tables, blueprint.input_spec, placement, {0: shards})
    net, remote_net = trained.nets()
    remote = None if remote_net is None else lambda ticket, hidden_BH: remote_net(hidden_BH)
    model, ticket = blueprint.model(net, remote).eval(), Ticket(0, step, step, purpose=Purpose.PREDICT)
    blocks = SourceRows(trained, [inputs], progress=print).blocks()
    outputs = []
    for batch, *_ in blocks:
        lookup = embeddings.lookup(batch.sparse_features, ticket)
        outputs.append(model(MicroBatch(batch, ticket, lookup, is_last=True), StepClock()).detach())
    shards.close()
    columns = prediction_columns(trained.config.all_tasks, torch.cat(outputs))
    return {name: values.numpy() for name, values in columns.items()}


def largest_difference(
    predictions: Mapping[str, Tensor], expected: Mapping[str, npt.NDArray[np.float64]]
) -> float:
    """Return the largest difference of predictions from the columns of :func:`predicted_columns`."""
    columns: dict[str, npt.NDArray[np.float64]] = {}
    for name, values in predictions.items():
        numbers = np.asarray(values.detach(), np.float64)
        if numbers.ndim == 1:
            columns[name] = numbers
        else:
            columns |= {f"{name}.{index}": column for index, column in enumerate(numbers.T)}
    assert list(columns) == list(expected)
    return max(float(np.abs(columns[name] - expected[name]).max()) for name in columns)


def texts_of(inputs: Path) -> dict[str, list[str]]:
    """Return the columns of a CSV file, as texts."""
    header, *rows = csv.reader(inputs.read_text().splitlines())
    return {name: [row[i] for row in rows] for i, name in enumerate(header)}


def clicks_config(folder: Path, **sections: Mapping[str, object]) -> RunConfig:
    """Return the configuration of a run on :func:`write_clicks` in ``folder``."""
    data: dict[str, object] = {
        "format": "csv",
        "path": write_clicks(folder / "clicks.csv"),
        "label": "clicked",
        "dense": ["price", "age"],
        "sparse": ["user", "item", "tags"],
        "multi_hot_separator": "|",
        "split": "random(0.4)",
        "cache_folder": folder / "prepared",
    }
    defaults: dict[str, Mapping[str, object]] = {
        "data": data,
        "embedding": {"dim": 4, "placement": "row"},
        "train": {"batch_size": 32},
    }
    merged = _merged(defaults, sections)
    return load_config(
        None, [f"{name}.{key}={value}" for name in merged for key, value in merged[name].items()]
    )


def _merged(
    defaults: Mapping[str, Mapping[str, object]], sections: Mapping[str, Mapping[str, object]]
) -> dict[str, Mapping[str, object]]:
    """Return sections of a configuration; keys of [data] that are not given have their defaults."""
    return {**defaults, **sections, "data": {**defaults["data"], **sections.get("data", {})}}


def _write_tables(partial: Path, blueprint: Blueprint) -> tuple[Files, Shapes]:
    """Write tables away from their initial rows; return their files and their shapes."""
    placement, files = place(blueprint.tables, _WORKERS), Files()
    for worker in range(_WORKERS):
        shards = TableShards(placement, worker, UpdateRules(1), blueprint.dtype)
        shards.initialize(3)
        for group in shards.groups:
            group.weight_RD.mul_(4.0)
            for state in group.optimizer.state.values():  # a function of the row
                state.copy_(group.weight_RD.abs() if state.dim() == 2 else group.weight_RD.abs().sum(1))
        shards.begin_save(is_copied=False)
        files |= shards.write(partial)
        shards.close()
    return files, placement.shapes


def write_trained(
    folder: Path,
    config: RunConfig,
    write_tables: Callable[[Path, Blueprint], tuple[Files, Shapes]] = _write_tables,
) -> Path:
    """Write a run folder with a checkpoint of an untrained model, away from its initial parameters."""
    prepared = prepare(config, Path(config.data.cache_folder))
    spec = FeatureEncoder.load(prepared).input_spec
    blueprint = Blueprint(config, spec, table_specs(config, spec))
    partial = checkpoint_folders.begin(checkpoint_folders.step_folder(folder, 1))
    files = Files()
    texts, vocabularies = dataset_manifest.checkpoint_contents(config, prepared)
    for name, text in texts.items():
        files |= write_text(partial, name, text)
    for name, source in vocabularies.items():
        files |= checkpoint_folders.write_vocabulary(partial, name, source)
    files |= write_tensors(partial, DENSE_FILE, pack_dense(_moved(blueprint.dense_net()), {}))
    if (remote_net := blueprint.remote_net()) is not None:
        files |= write_tensors(partial, REMOTE_FILE, pack_dense(_moved(remote_net), {}))
    of_tables, shapes = write_tables(partial, blueprint)
    checkpoint_folders.commit(partial, Manifest(1, 0, shapes, files | of_tables))
    (folder / CONFIG_FILE).write_text(signed_toml(config))
    return folder


def _moved(net: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a net plus noise."""
    draw = torch.Generator().manual_seed(5)
    state: dict[str, Tensor] = net.state_dict()
    return {
        name: each + (0.1 * torch.randn(each.shape, generator=draw)).to(each.dtype)
        for name, each in state.items()
    }
