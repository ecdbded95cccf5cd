"""The training script that the examples on click logs share.

It trains on the built-in click log, or on the data of ``--config FILE``. On a cluster, give the file to the
command: ``hybrid run SCRIPT --config FILE``. Each categorical column must have one value per sample.
"""

from argparse import ArgumentParser
from collections.abc import Callable, Mapping

import torch
from loop_and_score import auc, scores, train
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import hybrid

DIM = 16


class Net(nn.Module):
    """A table per categorical column, and a net over the vectors and the numeric columns.

    Args:
        rows: number of rows per column.
        width: width of the embedding vectors.
        net: called with the numeric columns and the concatenated vectors.
    """

    def __init__(self, rows: Mapping[str, int], width: int, net: nn.Module) -> None:
        super().__init__()
        self.tables = nn.ModuleDict({name: hybrid.Embedding(n, width, ids=name) for name, n in rows.items()})
        self.net = net

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        vectors = torch.cat([table(batch[name]) for name, table in self.tables.items()], dim=1)
        logits: Tensor = self.net(batch["dense"].to(vectors), vectors)
        return logits


def loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return binary_cross_entropy_with_logits(logits, batch["label"].to(logits), reduction="none")


def main(build: Callable[[int, int], nn.Module], width: int = DIM) -> None:
    """Train and test a model.

    Args:
        build: makes the net for a number of numeric columns and a number of vectors of ``width``.
    """
    parser = ArgumentParser()
    parser.add_argument("--config", help="configuration of the data (default: the built-in click log)")
    parser.add_argument("--epochs", type=int, default=1, help="passes over the data (default: 1)")
    options = parser.parse_args()
    cluster = hybrid.connect(options.config)
    data, test = cluster.prepare()
    model = cluster.distribute(Net(data.num_rows, width, build(len(data.dense_columns), len(data.num_rows))))
    train(cluster, model, loss, data, options.epochs, size=None)
    logits, labels = scores(cluster, lambda batch: (model(batch), batch["label"]), test)
    best = test.dataset.report.labels[0].best_auc
    suffix = "" if best is None else f" (best possible {best:.4f})"
    cluster.print(f"test AUC {auc(logits, labels):.4f}{suffix}")
