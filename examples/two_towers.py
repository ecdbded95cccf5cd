"""Two towers on synthetic choices of users among all items, with in-batch negatives.

Run it by ``python examples/two_towers.py``, or on a cluster by
``hybrid run examples/two_towers.py --trainers 2 --workers 2``.
``--uncorrected`` drops the popularity correction, to show its effect.
"""

from argparse import ArgumentParser

import known_models
import torch
from loop_and_score import arguments, scores, train
from torch import Tensor, nn

import hybrid
from hybrid.models.two_towers import TwoTowers, in_batch_softmax, log_popularity

DIM, CUT = 16, 10


class Net(nn.Module):
    """A table and a tower for users, and the same for items."""

    def __init__(self) -> None:
        super().__init__()
        self.user = hybrid.Embedding(
            known_models.NUM_USERS, DIM, ids="user", optimizer=hybrid.Adagrad(lr=0.1)
        )
        self.item = hybrid.Embedding(
            known_models.NUM_ITEMS, DIM, ids="item", optimizer=hybrid.Adagrad(lr=0.1)
        )
        self.towers = TwoTowers(DIM, DIM)

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        vectors: tuple[Tensor, Tensor] = self.towers(self.user(batch["user"]), self.item(batch["item"]))
        return vectors


def recall(scores_BI: Tensor, item_B: Tensor) -> Tensor:
    """Return 1 for each sample whose item is among the ``CUT`` best scores."""
    return (scores_BI.topk(CUT, dim=1).indices == item_B.unsqueeze(1)).any(dim=1).float()


def main() -> None:
    parser = ArgumentParser()
    parser.add_argument("--uncorrected", action="store_true", help="drop the popularity correction")
    parser.add_argument("--double", action="store_true", help="compute in float64")
    options = arguments(parser)
    cluster = hybrid.connect()
    model = cluster.distribute(Net().double() if options.double else Net())
    data = known_models.choices("train", options.samples)
    log_q_I = log_popularity(data["item"], known_models.NUM_ITEMS)
    log_q_B = torch.zeros(options.samples) if options.uncorrected else log_q_I[data["item"]]

    def loss(vectors: tuple[Tensor, Tensor], batch: dict[str, Tensor]) -> Tensor:
        return in_batch_softmax(*vectors, batch["item"], batch["log_q"], gather=cluster.gather)

    train(cluster, model, loss, data | {"log_q": log_q_B}, options.epochs)
    test = known_models.choices("test", options.test_samples)
    with torch.no_grad():
        items_ID = model.towers.item(model.item(torch.arange(known_models.NUM_ITEMS)))

    def score(batch: dict[str, Tensor]) -> tuple[Tensor]:
        users_BD, _ = model(batch)
        return (recall(users_BD @ items_ID.mT, batch["item"]),)

    (recall_N,) = scores(cluster, score, test)
    best_N = recall(known_models.choice_logits()[test["user"]], test["item"])
    cluster.print(f"test recall@{CUT} {recall_N.mean():.4f} (best possible {best_N.mean():.4f})")


if __name__ == "__main__":
    main()
