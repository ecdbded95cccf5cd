"""The net of custom_loop_script.py and its training in plain torch."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from comparison.cases import custom_loop_script
from comparison.cases.custom_loop_script import DIM, NUM_ITEMS, NUM_PAIRS, NUM_TAGS, NUM_USERS, SCALE
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, embedding, embedding_bag

from hybrid.config import RunConfig
from hybrid.embedding.initial_rows import fill_random_rows, random_rows
from hybrid.embedding.table_spec import OptimizerSpec, Pooling, TableSpec
from hybrid.primitives.key_hashes import next_random

SEED = RunConfig().run.seed


def of_groups(scores: Tensor, labels: Tensor, groups: Tensor, weights: Tensor) -> Tensor:
    """Return the listwise plus the pairwise loss, computed group by group."""
    total, over = scores.sum() * 0, 0.0
    for group in groups.unique():
        s, y, w = (each[groups == group] for each in (scores, labels, weights))
        if len(y.unique()) > 1:
            listwise = -(w * y * s.log_softmax(0)).sum() / (w * y).sum()
            front, back = y == 1, y == 0
            pairs = w[front].unsqueeze(1) * w[back]
            pairwise = -(pairs * (s[front].unsqueeze(1) - s[back]).sigmoid().log()).sum() / pairs.sum()
            total, over = total + w.mean() * (listwise + pairwise), over + w.mean().item()
    return total / (over or 1.0)


class Plain:
    """The module of the script with functions of torch."""

    def __init__(self, options: set[str]) -> None:
        self.options = options
        torch.manual_seed(SEED)
        self.mlp = nn.Sequential(nn.Linear(4 * DIM + 3 + 2 + 1, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        sizes = {
            "user": (NUM_USERS, DIM),
            "item": (NUM_ITEMS, DIM),
            "tags": (NUM_TAGS, 3),
            "seen": (NUM_ITEMS, DIM),
        }
        if "computed" in options:
            sizes["pair"] = (NUM_PAIRS, 2)
        self.tables = {name: self._table(name, *size) for name, size in sizes.items()}
        t = self.tables
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Adam(self.mlp.parameters(), lr=0.01, eps=1e-4),
            torch.optim.Adagrad([t["user"]], lr=0.1, eps=1e-4),
            torch.optim.SGD([t["item"]], lr=0.3),
            torch.optim.AdamW([t["tags"]], lr=0.05, eps=1e-3, weight_decay=0.3),
            torch.optim.Adagrad([t["seen"]], lr=0.1, eps=1e-4)
            if "growing" in options
            else torch.optim.AdamW([t["seen"]], lr=0.05, eps=1e-3, weight_decay=0.3),
            *([torch.optim.SGD([t["pair"]], lr=0.3)] if "pair" in t else []),
        ]

    def _table(self, name: str, rows: int, dim: int) -> nn.Parameter:
        is_growing = "growing" in self.options and name in ("user", "item", "seen")
        scale = SCALE if is_growing else rows**-0.5
        spec = TableSpec(name, rows, dim, Pooling.SUM, (), OptimizerSpec("sgd", 0.0), scale)
        if is_growing:
            keys = next_random(np.arange(rows, dtype=np.uint64))
            return nn.Parameter(random_rows(keys, spec, SEED).double())
        weight = torch.empty(rows, dim, dtype=torch.float64)
        fill_random_rows(weight, spec, SEED)
        return nn.Parameter(weight)

    def logits(self, batch: Mapping[str, Any], step: int, rows: Mapping[str, Tensor]) -> Tensor:
        users, items, size = batch["user"], batch["item"], len(batch["user"])
        padded = torch.cat([torch.zeros(1, DIM), rows["item"][1:]])
        user, item = embedding(users, rows["user"]), embedding(items, padded)
        history = embedding(batch["history"], padded)
        attention = torch.softmax((history @ item.unsqueeze(2)).squeeze(2), dim=1)
        parts = [user, item, (attention.unsqueeze(2) * history).sum(1), batch["price"].unsqueeze(1)]
        kind = step % 3 if "condition" in self.options else 1
        if kind:
            values, offsets = batch["tags"]
            tags = embedding_bag(values, rows["tags"], offsets, mode="mean", include_last_offset=True)
            parts.append(tags * (kind == 1))
        else:
            parts.append(torch.zeros(size, 3))
        weights = batch["seen_weights"]
        if "trained weights" in self.options:
            weights = weights * self.mlp.get_parameter("0.bias")[:3]
        parts.append(embedding_bag(batch["seen"], rows["seen"], mode="sum", per_sample_weights=weights))
        pairs = (users * 7 + items) % NUM_PAIRS
        parts.append(embedding(pairs, rows["pair"]) if "pair" in rows else torch.zeros(size, 2))
        logits: Tensor = self.mlp(torch.cat(parts, dim=1))
        return logits.squeeze(1)

    def train(self) -> dict[str, Any]:
        losses = []
        for step, batch in enumerate(custom_loop_script.batches(self.options)):
            rows = {name: table.detach().clone().requires_grad_() for name, table in self.tables.items()}
            logits = self.logits(batch, step, rows)
            if "twice" in self.options:
                logits = logits + self.logits({**batch, "price": -batch["price"]}, step, rows)
            values = binary_cross_entropy_with_logits(logits, batch["label"], reduction="none")
            weights = batch["weight"] if "weights" in self.options else torch.ones_like(values)
            loss = (values * weights).sum() / weights.sum()
            if "ranked" in self.options:
                loss = loss + of_groups(logits, batch["label"], batch["group"], weights)
            loss.backward()
            for name, table in self.tables.items():
                table.grad = rows[name].grad
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(values.mean().item())
        with torch.no_grad():
            tables = {name: table.detach().clone() for name, table in self.tables.items()}
            scored = () if "unscored" in self.options else custom_loop_script.batches(self.options)
            scores = [self.logits(batch, 1, tables) for batch in scored]
        tables["item"][0] = 0.0  # the padding's
        return {"losses": losses, "scores": scores, "tables": tables, "mlp": self.mlp.state_dict()}


def check(found: dict[str, Any], options: tuple[str, ...] = ()) -> None:
    expected = Plain(set(options)).train()
    torch.testing.assert_close(found["losses"], expected["losses"], rtol=1e-12, atol=1e-12)
    for name in ("scores", "mlp", "tables"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-11, atol=1e-12, msg=name)
