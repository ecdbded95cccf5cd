"""Models of ``hybrid.models`` without another test on a cluster, in one module with shared tables.

Run as ``model_script.py OUTPUT [CONFIG]``; leaves in OUTPUT what came of it.
"""

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import hybrid
from hybrid.custom_loop.cluster import Cluster
from hybrid.models.din import DIN
from hybrid.models.esmm import ESMM, entire_space_loss
from hybrid.models.final_mlp import FinalMLP
from hybrid.models.layers import pad_histories
from hybrid.models.mmoe import MMoE
from hybrid.models.ple import PLE
from hybrid.models.self_attention import SelfAttention, next_item_loss
from hybrid.models.two_towers import TwoTowers, in_batch_softmax

NUM_USERS, NUM_ITEMS, DIM, LONGEST = 20, 30, 4, 3
SIZES = (9, 6, 1, 7)  # of the batches: of one of them, two trainers of three have nothing


class Net(nn.Module):
    """All models on the vectors of users, items and histories, with and without padding."""

    def __init__(self) -> None:
        super().__init__()
        self.user = hybrid.Embedding(NUM_USERS, DIM, ids="user", optimizer=hybrid.Adagrad(lr=0.1, eps=1e-4))
        columns = ["item", "history", "seen"]
        self.item = hybrid.Embedding(NUM_ITEMS, DIM, ids=columns, optimizer=hybrid.SGD(lr=0.1), padding_idx=0)
        self.din, self.esmm = DIN(DIM, DIM), ESMM(2 * DIM)
        self.mmoe, self.ple = MMoE(2 * DIM, (1, 1)), PLE(2 * DIM, (1, 1))
        self.final, self.towers = FinalMLP(2 * DIM, (DIM, DIM)), TwoTowers(DIM, DIM)
        self.attention = SelfAttention(DIM, LONGEST)

    def forward(self, batch: dict[str, Any], cluster: Cluster) -> Tensor:
        """Return the sum of the losses of all models, by sample."""
        user, item, history = self.user(batch["user"]), self.item(batch["item"]), self.item(batch["history"])
        both, labels, is_item = torch.cat([user, item], dim=1), batch["labels"], batch["history"] > 0
        seen = pad_histories(self.item(batch["seen"]), batch["seen"].offsets)
        logits = [self.din(item, *seen, user), self.final(both, user, item)]
        logits += [*self.mmoe(both).unbind(1), *self.ple(both).unbind(1)]
        label_of = [labels[:, 0], labels[:, 1]] * 3
        losses = [
            binary_cross_entropy_with_logits(logit, label, reduction="none")
            for logit, label in zip(logits, label_of, strict=True)
        ]
        click, conversion = self.esmm(both)
        losses.append(entire_space_loss(click, conversion, labels[:, 0], labels.prod(dim=1)))
        users, items = self.towers(user, item)
        ids, log_q = batch["item"], batch["log_q"]
        losses.append(in_batch_softmax(users, items, ids, log_q, gather=cluster.gather))
        wanted = self.attention(history, is_item)
        losses.append(next_item_loss(wanted, history.roll(1, 1), item.unsqueeze(1), is_item)[0])
        return torch.stack(losses).sum(dim=0)


def batches() -> Iterator[dict[str, Any]]:
    draw = torch.Generator().manual_seed(7)
    for size in SIZES:
        lengths = torch.randint(4, (size,), generator=draw).tolist()
        yield {
            "user": torch.randint(NUM_USERS, (size,), generator=draw),
            "item": torch.randint(1, NUM_ITEMS, (size,), generator=draw),
            "history": torch.randint(NUM_ITEMS, (size, LONGEST), generator=draw),
            "seen": hybrid.Jagged.of(
                [torch.randint(1, NUM_ITEMS, (n,), generator=draw).tolist() for n in lengths]
            ),
            "labels": torch.randint(2, (size, 2), generator=draw).double(),
            "log_q": -torch.rand(size, generator=draw).double(),
        }


def main(output: str, config: str | None = None) -> None:
    cluster = hybrid.connect(config)
    model = cluster.distribute(Net().double())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-4)
    losses = []
    for batch in cluster.batches(batches()):
        optimizer.zero_grad()
        loss = model(batch, cluster)
        cluster.backward(loss)
        optimizer.step()
        losses.append(cluster.gather(loss.detach()))
    with torch.no_grad():
        tables = {"user": model.user(torch.arange(NUM_USERS)), "item": model.item(torch.arange(NUM_ITEMS))}
    if cluster.rank == 0:
        net = {name: each.detach() for name, each in model.module.named_parameters()}
        torch.save({"losses": torch.cat(losses), "tables": tables, "net": net}, output)


if __name__ == "__main__":
    main(*sys.argv[1:])
