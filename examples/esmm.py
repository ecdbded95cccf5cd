"""ESMM on synthetic impressions, clicks and conversions.

Run it by ``python examples/esmm.py``, or on a cluster by
``hybrid run examples/esmm.py --trainers 2 --workers 2``.

Training sees the conversion label of clicked impressions only. The test set has it for every impression.
"""

import known_models
import torch
from loop_and_score import arguments, auc, scores, train
from torch import Tensor, nn

import hybrid
from hybrid.models.esmm import ESMM, both_log_probabilities, entire_space_loss

DIM = 8


class Net(nn.Module):
    """Both towers read the user vector, the item vector and their product."""

    def __init__(self) -> None:
        super().__init__()
        self.user = hybrid.Embedding(
            known_models.NUM_USERS, DIM, ids="user", init_scale=0.2, optimizer=hybrid.Adagrad(lr=0.3)
        )
        self.item = hybrid.Embedding(
            known_models.NUM_ITEMS, DIM, ids="item", init_scale=0.2, optimizer=hybrid.Adagrad(lr=0.3)
        )
        self.esmm = ESMM(3 * DIM)

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        user, item = self.user(batch["user"]), self.item(batch["item"])
        logits: tuple[Tensor, Tensor] = self.esmm(torch.cat([user, item, user * item], dim=1))
        return logits


def impressions(split: str, num_samples: int) -> dict[str, Tensor]:
    data = known_models.two_labels(split, num_samples)
    click, would_convert = data.pop("labels").unbind(dim=1)
    return data | {"click": click, "conversion": click * would_convert, "would_convert": would_convert}


def loss(logits: tuple[Tensor, Tensor], batch: dict[str, Tensor]) -> Tensor:
    click, conversion = (batch[name].to(logits[0]) for name in ("click", "conversion"))
    return entire_space_loss(*logits, click, conversion)


def main() -> None:
    options = arguments()
    cluster = hybrid.connect()
    model = cluster.distribute(Net())
    train(cluster, model, loss, impressions("train", options.samples), options.epochs)
    test = impressions("test", options.test_samples)
    click, conversion = scores(cluster, model, test)
    best_click, best_conversion = test["logits"].unbind(dim=1)
    for name, logits, best in (
        ("click", click, best_click),
        ("would_convert", conversion, best_conversion),
        (
            "conversion",
            both_log_probabilities(click, conversion)[0],
            both_log_probabilities(best_click, best_conversion)[0],
        ),
    ):
        values = auc(logits, test[name]), auc(best, test[name])
        cluster.print("{}: test AUC {:.4f} (best possible {:.4f})".format(name.replace("_", " "), *values))


if __name__ == "__main__":
    main()
