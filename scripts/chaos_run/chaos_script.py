"""The script of ``scripts/chaos --script``: a custom loop that resumes from the folder in its argument."""

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import hybrid


class ChaosNet(nn.Module):
    """A table for each sparse column, the first of which grows, and a net with dropout."""

    def __init__(self, num_rows: dict[str, int], num_dense: int) -> None:
        super().__init__()
        adam = hybrid.Adam(lr=0.01)
        tables = {
            name: hybrid.Embedding(rows, 8, ids=name, optimizer=adam) for name, rows in num_rows.items()
        }
        growth = hybrid.Growth(admit_after=2, max_rows=8192, half_life=30)
        name = next(iter(tables))
        tables[name] = hybrid.Embedding(None, 8, ids=name, growing=growth, optimizer=adam)
        self.tables = nn.ModuleDict(tables)
        hidden = nn.Linear(8 * len(tables) + num_dense, 16)
        self.mlp = nn.Sequential(hidden, nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))

    def forward(self, batch: dict[str, Any]) -> Tensor:
        """Return one logit per sample."""
        vectors = [table(batch[name]) for name, table in self.tables.items()]
        outputs: Tensor = self.mlp(torch.cat([batch["dense"], *vectors], 1)).squeeze(1)
        return outputs


cluster = hybrid.connect()
train, test = cluster.prepare()
model = cluster.distribute(ChaosNet(train.num_rows, len(train.dense_columns)))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
cluster.resume(sys.argv[1], optimizer, scheduler, every_steps=20)
cluster.print("prepared the loop")  # what scripts/chaos waits for, as for the lines of steps
for _ in cluster.epochs(2):
    for batch in cluster.batches(train):
        optimizer.zero_grad()
        losses = binary_cross_entropy_with_logits(model(batch), batch["label"], reduction="none")
        cluster.backward(losses)
        optimizer.step()
        scheduler.step()
        cluster.print(f"step {cluster.step}")
    cluster.evaluate(test, 512)
