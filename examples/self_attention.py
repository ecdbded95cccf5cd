"""Self-attention on synthetic sequences in which the order of items matters: SASRec, or HSTU by ``--hstu``.

Run it by ``python examples/self_attention.py``, or on a cluster by
``hybrid run examples/self_attention.py --trainers 2 --workers 2``.
"""

from argparse import ArgumentParser

import known_models
import torch
from loop_and_score import arguments, auc, scores, train
from torch import Tensor, nn

import hybrid
from hybrid.models.hstu import HSTU
from hybrid.models.self_attention import SelfAttention, last_queries, next_item_loss

DIM = 32


class Net(nn.Module):
    """One table of items, for the history and for the next item."""

    def __init__(self, attention: type[SelfAttention | HSTU]) -> None:
        super().__init__()
        self.item = hybrid.Embedding(
            1 + known_models.NUM_ITEMS,
            DIM,
            ids=["history", "next", "other"],
            padding_idx=0,
            init_scale=0.3,
            optimizer=hybrid.Adagrad(lr=0.1),
        )
        self.attention = attention(DIM, known_models.LONGEST_HISTORY)

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the arguments of ``next_item_loss``."""
        queries, is_item = self.queries(batch)
        return queries, self.item(batch["next"]), self.item(batch["other"]), is_item

    def queries(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        history = self.item(batch["history"])
        is_item = (batch["history"] > 0).to(history.device)
        return self.attention(history, is_item), is_item

    def scores(self, batch: dict[str, Tensor]) -> tuple[Tensor]:
        """Return the score of each candidate for the next item."""
        query = last_queries(*self.queries(batch)).unsqueeze(2)
        return ((self.item(batch["candidates"]) @ query).squeeze(2),)


def main() -> None:
    parser = ArgumentParser()
    parser.add_argument("--hstu", action="store_true", help="HSTU in place of SASRec")
    options = arguments(parser, samples=50_000, epochs=4)
    cluster = hybrid.connect()
    model = cluster.distribute(Net(HSTU if options.hstu else SelfAttention))
    data = known_models.sequences("train", options.samples)
    train(cluster, model, lambda outputs, batch: next_item_loss(*outputs), data, options.epochs)
    test = known_models.sequences("test", options.test_samples)
    (logits,) = scores(cluster, model.scores, test)
    labels = torch.tensor([1.0, 0.0]).expand_as(logits)
    best = auc(test["logits"], labels)
    cluster.print(f"next item against another: test AUC {auc(logits, labels):.4f} (best possible {best:.4f})")


if __name__ == "__main__":
    main()
