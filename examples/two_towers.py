"""Two towers on synthetic choices of users among all items, with in-batch or drawn negatives.

Run it by ``python examples/two_towers.py``, or on a cluster by
``hybrid run examples/two_towers.py --trainers 2 --workers 2``.
``--drawn 64`` draws 64 negatives in each step, by popularity, or with ``--uniform`` uniformly.
``--uncorrected`` drops the correction of their frequencies, to show its effect.
"""

from argparse import ArgumentParser

import known_models
import torch
from known_models import NUM_ITEMS, NUM_USERS
from loop_and_score import arguments, train
from torch import Tensor, nn

import hybrid
from hybrid.models import two_towers

DIM, CUT = 16, 10


class Net(nn.Module):
    """A table and a tower for users, and the same for items."""

    def __init__(self, negative: list[str]) -> None:
        super().__init__()
        adagrad = hybrid.Adagrad(lr=0.1)
        self.user = hybrid.Embedding(NUM_USERS, DIM, ids="user", optimizer=adagrad)
        self.item = hybrid.Embedding(NUM_ITEMS, DIM, ids=["item", *negative], optimizer=adagrad)
        self.towers = two_towers.TwoTowers(DIM, DIM)

    def forward(self, batch: dict[str, Tensor]) -> list[Tensor]:
        items = [self.towers.item(self.item(batch[name])) for name in self.item.ids]
        return [self.towers.user(self.user(batch["user"])), *items]


def main() -> None:
    parser = ArgumentParser()
    parser.add_argument("--drawn", type=int, default=0, help="negatives per step (default: in-batch)")
    parser.add_argument("--uniform", action="store_true", help="with --drawn: uniformly, not by popularity")
    parser.add_argument("--uncorrected", action="store_true", help="drop the correction")
    parser.add_argument("--double", action="store_true", help="compute in float64")
    options = arguments(parser)
    cluster = hybrid.connect()
    net = Net(["negative"] if options.drawn else [])
    model = cluster.distribute(net.double() if options.double else net)
    data = known_models.choices("train", options.samples)
    popularity_I = two_towers.log_popularity(data["item"], NUM_ITEMS)
    log_q_I = torch.zeros(NUM_ITEMS) if options.drawn and options.uniform else popularity_I
    drawn = {"negative": hybrid.Negatives(options.drawn, log_q_I)} if options.drawn else None
    factor = 0 if options.uncorrected else 1

    def loss(vectors: list[Tensor], batch: dict[str, Tensor]) -> Tensor:
        log_q_B = factor * batch["log_q"]
        if drawn is None:
            users_BD, items_BD = vectors
            return two_towers.in_batch_softmax(users_BD, items_BD, log_q_B, gather=cluster.gather)
        users_BD, items_BD, negatives_ND = vectors
        log_q_N = factor * batch["negative.log_q"]
        return two_towers.sampled_softmax(users_BD, items_BD, log_q_B, negatives_ND, log_q_N)

    train(cluster, model, loss, data | {"log_q": log_q_I[data["item"]]}, options.epochs, negatives=drawn)
    test = known_models.choices("test", options.test_samples)
    user, item = model.towers.user, model.towers.item
    with torch.no_grad():
        batches = cluster.batches(test, 4096)
        pairs = [(user(model.user(batch["user"])), batch["item"]) for batch in batches]
        users_BD, item_B = map(torch.cat, zip(*pairs, strict=True))
        top_BK = two_towers.top_items(users_BD, lambda ids: item(model.item(ids)), NUM_ITEMS, CUT)
    recall = cluster.mean(two_towers.recall_and_ndcg(top_BK, item_B)[0])
    best_BK = known_models.choice_logits()[test["user"]].topk(CUT).indices
    best = two_towers.recall_and_ndcg(best_BK, test["item"])[0].mean()
    cluster.print(f"test recall@{CUT} {recall:.4f} (best possible {best:.4f})")


if __name__ == "__main__":
    main()
