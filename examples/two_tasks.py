"""The training script that the examples with two tasks share.

The labels are synthetic, or income and marital status of UCI's census data "adult"
(``--census adult.data adult.test``, plain or gzip).
"""

import csv
import gzip
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import known_models
import torch
from loop_and_score import arguments, auc, scores, train
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import hybrid

DIM = 8
TASKS = ("first label", "second label"), ("income", "never married")
# Columns of the census. "Relationship" is left out: it reveals the marital status.
NUMBERS, CATEGORIES, STATUS, INCOME = (0, 2, 4, 10, 11, 12), (1, 3, 6, 8, 9, 13), 5, 14


class Net(nn.Module):
    """Two logits from the vectors of all id columns, their product, and the numeric columns.

    Args:
        rows: number of rows per id column.
        num_numbers: number of numeric columns.
        build: makes the two-task model for an input width.
    """

    def __init__(self, rows: list[int], num_numbers: int, build: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            hybrid.Embedding(n, DIM, ids=f"id{k}", init_scale=0.2, optimizer=hybrid.Adam(lr=0.01))
            for k, n in enumerate(rows)
        )
        self.tasks = build(DIM * (len(rows) + 1) + num_numbers)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        vectors = [table(batch[f"id{k}"]) for k, table in enumerate(self.tables)]
        product = vectors[0] * vectors[1]
        numbers = batch["numbers"].to(product)
        logits: Tensor = self.tasks(torch.cat([*vectors, product, numbers], dim=1))
        return logits


def loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """The sum of both tasks' log losses."""
    return binary_cross_entropy_with_logits(logits, batch["labels"].to(logits), reduction="none").sum(dim=1)


def synthetic(split: str, num_samples: int) -> dict[str, Tensor]:
    """Return synthetic samples with two labels."""
    data = known_models.two_labels(split, num_samples)
    return {
        "id0": data["user"],
        "id1": data["item"],
        "numbers": torch.zeros(num_samples, 0),
        "labels": data["labels"],
        "logits": data["logits"],
    }


def census(train_file: Path, test_file: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], list[int]]:
    """Return the samples of both files, and the number of rows per id column."""
    vocabularies: list[dict[str, int]] = [{} for _ in CATEGORIES]  # id 0: not in the training file
    for line in _lines(train_file):
        for vocabulary, column in zip(vocabularies, CATEGORIES, strict=True):
            vocabulary.setdefault(line[column], 1 + len(vocabulary))
    splits: list[dict[str, Tensor]] = []
    for file in (train_file, test_file):
        lines = list(_lines(file))
        columns = list(zip(vocabularies, CATEGORIES, strict=True))
        ids = [[vocabulary.get(line[column], 0) for vocabulary, column in columns] for line in lines]
        labels = [[line[INCOME].startswith(">50K"), line[STATUS] == "Never-married"] for line in lines]
        numbers = torch.tensor([[float(line[column]) for column in NUMBERS] for line in lines]).log1p()
        splits.append({f"id{k}": column for k, column in enumerate(torch.tensor(ids).unbind(1))})
        splits[-1] |= {"numbers": numbers, "labels": torch.tensor(labels).float()}
    mean, deviation = splits[0]["numbers"].mean(dim=0), splits[0]["numbers"].std(dim=0)
    for split in splits:
        split["numbers"] = (split["numbers"] - mean) / deviation
    return splits[0], splits[1], [1 + len(vocabulary) for vocabulary in vocabularies]


def _lines(file: Path) -> Iterator[list[str]]:
    opened: Any = gzip.open if file.suffix == ".gz" else open
    with opened(file, "rt") as text:
        yield from (line for line in csv.reader(text, skipinitialspace=True) if len(line) == 1 + INCOME)


def main(build: Callable[[int], nn.Module]) -> None:
    parser = ArgumentParser()
    parser.add_argument(
        "--census",
        type=Path,
        nargs=2,
        metavar=("TRAIN", "TEST"),
        help="the two files of UCI's data set adult",
    )
    options = arguments(parser)
    if options.census:
        data, test, rows = census(*options.census)
    else:
        data, test = synthetic("train", options.samples), synthetic("test", options.test_samples)
        rows = [known_models.NUM_USERS, known_models.NUM_ITEMS]
    cluster = hybrid.connect()
    model = cluster.distribute(Net(rows, data["numbers"].shape[1], build))
    train(cluster, model, loss, data, options.epochs)
    (logits,) = scores(cluster, lambda batch: (model(batch),), test)
    for k, task in enumerate(TASKS[bool(options.census)]):
        message = f"test AUC {auc(logits[:, k], test['labels'][:, k]):.4f}"
        if "logits" in test:
            message += f" (best possible {auc(test['logits'][:, k], test['labels'][:, k]):.4f})"
        cluster.print(f"{task}: {message}")
