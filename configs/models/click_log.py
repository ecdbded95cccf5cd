"""What the examples on click logs share: the built-in one, or that of a configuration.

``--config FILE`` names one in one process; ``hybrid run SCRIPT --config FILE`` does on a cluster, which has
``--set`` as well. Each categorical column has one value a sample.
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
    """A table for each categorical column, and a net over their vectors and the numbers.

    Args:
        rows: of each table, by column.
        width: of each table.
    """

    def __init__(self, rows: Mapping[str, int], width: int, net: nn.Module) -> None:
        super().__init__()
        self.tables = nn.ModuleDict({name: hybrid.Embedding(n, width) for name, n in rows.items()})
        self.net = net

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        vectors = torch.cat([table(batch[name]) for name, table in self.tables.items()], dim=1)
        return self.net(batch["dense"].to(vectors), vectors)


def loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return binary_cross_entropy_with_logits(logits, batch["label"].to(logits), reduction="none")


def main(build: Callable[[int, int], nn.Module], width: int = DIM) -> None:
    """Train what ``build`` makes for so many numeric columns and so many vectors of ``width``."""
    parser = ArgumentParser()
    parser.add_argument("--config", help="of the data, in one process (the built-in click log)")
    parser.add_argument("--epochs", type=int, default=1, help="passes over them (1)")
    options = parser.parse_args()
    cluster = hybrid.connect(options.config)
    data, test = cluster.prepare()
    model = cluster.distribute(Net(data.num_rows, width, build(len(data.dense_columns), len(data.num_rows))))
    train(cluster, model, loss, data, options.epochs, size=None)
    logits, labels = scores(cluster, lambda batch: (model(batch), batch["label"]), test)
    best = test.dataset.report.labels[0].best_auc
    said = "" if best is None else f" (best possible {best:.4f})"
    cluster.print(f"test AUC {auc(logits, labels):.4f}{said}")
