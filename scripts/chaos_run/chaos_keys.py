"""The script of ``scripts/chaos --script keys``: twenty million keys in a table of at most five million rows.

Every step reads keys that no step has read before, and keys of the steps before it.
"""

import sys
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import hybrid
from hybrid.primitives.key_hashes import splitmix64

STEPS = 400
NEW, OLD = 50_000, 10_000  # keys of a step
RECENT_STEPS = 200


class Steps:
    """One batch for each step. Its keys and labels are functions of the number of the step."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for step in range(STEPS):
            random = splitmix64(np.arange(OLD, dtype=np.uint64) + np.uint64(step * OLD))
            age = (random % np.uint64(RECENT_STEPS * NEW)).astype(np.int64)
            new = np.arange(step * NEW, (step + 1) * NEW)
            keys = np.concatenate([new, np.maximum(0, step * NEW - 1 - age)])
            labels = (splitmix64(keys.astype(np.uint64)) >> np.uint64(63)).astype(np.float32)
            yield {"key": torch.from_numpy(keys), "label": torch.from_numpy(labels)}


cluster = hybrid.connect()
growth = hybrid.Growth(max_rows=5_000_000, half_life=40)
optimizer = hybrid.Adagrad(lr=0.1)
table = hybrid.Embedding(None, 4, ids="key", growing=growth, optimizer=optimizer)
model = cluster.distribute(nn.Sequential(table, nn.Linear(4, 1)))
dense_optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
cluster.resume(sys.argv[1], dense_optimizer, every_steps=40)
cluster.print("prepared the loop")
for _ in cluster.epochs(1):
    for batch in cluster.batches(Steps()):
        dense_optimizer.zero_grad()
        logits = model(batch["key"]).squeeze(1)
        cluster.backward(binary_cross_entropy_with_logits(logits, batch["label"], reduction="none"))
        dense_optimizer.step()
        cluster.print(f"step {cluster.step}")
