"""What the examples of two tasks share: two labels of a hidden model, or of a census: income, marital status.

The census is UCI's "adult": ``--census adult.data adult.test``, plain or gzip.
"""

import csv
import gzip
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from loop_and_score import arguments, auc, scores, train
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import hybrid
from hybrid.data.prepare import planted

DIM = 8
TASKS = ("first label", "second label"), ("income", "never married")
# Of a line of the census. Left out are the labels, and the relationship, which tells of a husband or a wife.
NUMBERS, WORDS, STATUS, INCOME = (0, 2, 4, 10, 11, 12), (1, 3, 6, 8, 9, 13), 5, 14


class Net(nn.Module):
    """Two logits, by ``build``, from the vectors of all columns of ids, and their products, and the numbers.

    Args:
        rows: of each column's table.
        num_numbers: how many numeric columns there are.
        build: makes the model of two tasks over inputs of a width.
    """

    def __init__(self, rows: list[int], num_numbers: int, build: Callable[[int], nn.Module]) -> None:
        super().__init__()
        make = hybrid.Embedding
        self.tables = nn.ModuleList(
            make(n, DIM, init_scale=0.2, optimizer=hybrid.Adam(lr=0.01)) for n in rows
        )
        self.tasks = build(DIM * (len(rows) + 1) + num_numbers)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        vectors = [table(batch["ids"][:, k]) for k, table in enumerate(self.tables)]
        product = vectors[0] * vectors[1]
        return self.tasks(torch.cat([*vectors, product, batch["numbers"].to(product)], dim=1))


def loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """The sum of both tasks' log losses."""
    return binary_cross_entropy_with_logits(logits, batch["labels"].to(logits), reduction="none").sum(dim=1)


def hidden(split: str, num_samples: int) -> dict[str, Tensor]:
    """Samples of the hidden model."""
    data = planted.two_labels(split, num_samples)
    ids = torch.stack([data["user"], data["item"]], dim=1)
    return {
        "ids": ids,
        "numbers": torch.zeros(num_samples, 0),
        "labels": data["labels"],
        "logits": data["logits"],
    }


def census(train_file: Path, test_file: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], list[int]]:
    """Both files as samples, and how many rows the table of each column of words needs."""
    words: list[dict[str, int]] = [{} for _ in WORDS]  # an id for each; 0 is one that training has not seen
    for line in _lines(train_file):
        for of_column, place in zip(words, WORDS, strict=True):
            of_column.setdefault(line[place], 1 + len(of_column))
    found: list[dict[str, Tensor]] = []
    for file in (train_file, test_file):
        lines = list(_lines(file))
        ids = [[w.get(line[place], 0) for w, place in zip(words, WORDS, strict=True)] for line in lines]
        labels = [[line[INCOME].startswith(">50K"), line[STATUS] == "Never-married"] for line in lines]
        numbers = torch.tensor([[float(line[place]) for place in NUMBERS] for line in lines]).log1p()
        found.append({"ids": torch.tensor(ids), "numbers": numbers, "labels": torch.tensor(labels).float()})
    mean, deviation = found[0]["numbers"].mean(dim=0), found[0]["numbers"].std(dim=0)
    for split in found:
        split["numbers"] = (split["numbers"] - mean) / deviation
    return found[0], found[1], [1 + len(of_column) for of_column in words]


def _lines(file: Path) -> Iterator[list[str]]:
    opened: Any = gzip.open if file.suffix == ".gz" else open
    with opened(file, "rt") as text:
        yield from (line for line in csv.reader(text, skipinitialspace=True) if len(line) == 1 + INCOME)


def main(build: Callable[[int], nn.Module]) -> None:
    parser = ArgumentParser()
    parser.add_argument(
        "--census", type=Path, nargs=2, metavar=("TRAIN", "TEST"), help="files of UCI's adult data"
    )
    options = arguments(parser)
    if options.census:
        data, test, rows = census(*options.census)
    else:
        data, test = hidden("train", options.samples), hidden("test", options.test_samples)
        rows = [planted.NUM_USERS, planted.NUM_ITEMS]
    cluster = hybrid.connect()
    model = cluster.distribute(Net(rows, data["numbers"].shape[1], build))
    train(cluster, model, loss, data, options.epochs)
    (logits,) = scores(cluster, lambda batch: (model(batch),), test)
    for k, task in enumerate(TASKS[bool(options.census)]):
        said = f"test AUC {auc(logits[:, k], test['labels'][:, k]):.4f}"
        if "logits" in test:
            said += f" (best possible {auc(test['logits'][:, k], test['labels'][:, k]):.4f})"
        cluster.print(f"{task}: {said}")
