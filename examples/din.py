"""DIN on synthetic histories: items of the candidate's category raise the click rate.

Run it by ``python examples/din.py``, or on a cluster by
``hybrid run examples/din.py --trainers 2 --workers 2``.
"""

import known_models
import torch
from loop_and_score import arguments, auc, scores, train
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import hybrid
from hybrid.models.din import DIN

DIM = 8


class Net(nn.Module):
    """One table of items and one of categories, both for the candidate and for the history."""

    def __init__(self) -> None:
        super().__init__()
        items = 1 + known_models.CATEGORIES * known_models.ITEMS_OF_CATEGORY
        categories = 1 + known_models.CATEGORIES
        columns = ["candidate", "history"]
        self.item = hybrid.Embedding(items, DIM, ids=columns, padding_idx=0, init_scale=0.3)
        columns = ["candidate_category", "history_category"]
        self.category = hybrid.Embedding(categories, DIM, ids=columns, padding_idx=0, init_scale=0.3)
        self.din = DIN(2 * DIM)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        candidate, history = (
            torch.cat([self.item(batch[name]), self.category(batch[f"{name}_category"])], dim=-1)
            for name in ("candidate", "history")
        )
        logits: Tensor = self.din(candidate, history, (batch["history"] > 0).to(history.device))
        return logits


def loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return binary_cross_entropy_with_logits(logits, batch["label"].to(logits), reduction="none")


def main() -> None:
    options = arguments()
    cluster = hybrid.connect()
    model = cluster.distribute(Net())
    train(cluster, model, loss, known_models.interests("train", options.samples), options.epochs)
    test = known_models.interests("test", options.test_samples)
    (logits,) = scores(cluster, lambda batch: (model(batch),), test)
    best = auc(test["logit"], test["label"])
    cluster.print(f"test AUC {auc(logits, test['label']):.4f} (best possible {best:.4f})")


if __name__ == "__main__":
    main()
