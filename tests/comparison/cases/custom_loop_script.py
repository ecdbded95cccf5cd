"""A script with a custom loop that trains tables of every kind.

Run as ``custom_loop_script.py OUTPUT [OPTION ...]``; it writes its results to OUTPUT.
"""

import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import hybrid

SCRIPT = __file__
HALF = 4  # of the steps
NUM_USERS, NUM_ITEMS, NUM_TAGS, NUM_PAIRS, DIM = 40, 60, 12, 50, 5
SCALE = 0.2  # of the initial rows of growing tables


class Net(nn.Module):
    """Calls tables with columns of ids, a padded history, weighted bags, plain bags, and computed ids."""

    is_first = True  # whether this is trainer 0

    def __init__(self, options: set[str]) -> None:
        super().__init__()
        self.options = options
        growing: dict[str, Any] = {"growing": True, "init_scale": SCALE} if "growing" in options else {}
        num_users, num_items = (None, None) if growing else (NUM_USERS, NUM_ITEMS)
        adagrad, sgd = hybrid.Adagrad(lr=0.1, eps=1e-4), hybrid.SGD(lr=0.3)
        self.user = hybrid.Embedding(num_users, DIM, ids="user", optimizer=adagrad, **growing)
        columns = ["item", "history"]
        self.item = hybrid.Embedding(num_items, DIM, ids=columns, optimizer=sgd, padding_idx=0, **growing)
        pooled_by = "trainers" if "pooled" in options else "workers"
        all_rows = hybrid.AdamW(lr=0.05, eps=1e-3, weight_decay=0.3, all_rows=True)
        self.tags = hybrid.EmbeddingBag(
            NUM_TAGS, 3, ids="tags", mode="mean", optimizer=all_rows, pooled_by=pooled_by
        )
        options_of_seen: dict[str, Any] = {"ids": "seen", "weights": "seen_weights", **growing}
        options_of_seen["optimizer"] = adagrad if growing else all_rows
        self.seen = hybrid.EmbeddingBag(num_items, DIM, mode="sum", pooled_by=pooled_by, **options_of_seen)
        if "computed" in options:
            self.pair = hybrid.Embedding(NUM_PAIRS, 2, optimizer=hybrid.SGD(lr=0.3))
        self.mlp = nn.Sequential(nn.Linear(4 * DIM + 3 + 2 + 1, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, batch: dict[str, Any], step: int) -> Tensor:
        user, item = self.user(batch["user"]), self.item(batch["item"])
        history = self.item(batch["history"])
        attention = torch.softmax((history @ item.unsqueeze(2)).squeeze(2), dim=1)
        parts = [user, item, (attention.unsqueeze(2) * history).sum(1), batch["price"].unsqueeze(1)]
        kind = step % 3 if "condition" in self.options else 1
        if kind == 1 or (kind == 2 and self.is_first):  # a gradient of zeros is a step, no gradient is none
            tags = self.tags(batch["tags"])
            parts.append(tags * (kind == 1))
        else:
            parts.append(user.new_zeros(len(user), 3))
        weights = batch["seen_weights"]
        if "trained weights" in self.options:
            weights = weights * self.mlp.get_parameter("0.bias")[:3]
        # Within append, torch.compile would compile the rest of the function anew in each call.
        seen = self.seen(batch["seen"], per_sample_weights=weights)
        parts.append(seen)
        if "computed" in self.options:
            pair = self.pair((batch["user"] * 7 + batch["item"]) % NUM_PAIRS)
            parts.append(pair)
        else:
            parts.append(user.new_zeros(len(user), 2))
        logits: Tensor = self.mlp(torch.cat(parts, dim=1))
        return logits.squeeze(1)


def batches(options: Iterable[str] = ()) -> Iterator[dict[str, Any]]:
    """Yield eight batches of different sizes; the last has one sample.

    For a compiled module yield four, since torch.compile compiles for batches of one sample anew.
    """
    draw = torch.Generator().manual_seed(5)
    is_compiled = any(option.startswith("compile") for option in options)
    for size in (16, 16, 7, 16, *(() if is_compiled else (9, 16, 12, 1))):
        lengths = torch.randint(4, (size,), generator=draw)
        tags = [torch.randint(NUM_TAGS, (int(n),), generator=draw).tolist() for n in lengths]
        longest = int(torch.randint(2, 5, (1,), generator=draw))
        yield {
            "user": torch.randint(NUM_USERS, (size,), generator=draw),
            "item": torch.randint(1, NUM_ITEMS, (size,), generator=draw),
            "history": torch.randint(NUM_ITEMS, (size, longest), generator=draw),
            "tags": hybrid.Jagged.of(tags),
            "seen": torch.randint(NUM_ITEMS, (size, 3), generator=draw),
            "seen_weights": torch.rand(size, 3, generator=draw).double(),
            "price": torch.rand(size, generator=draw).double(),
            "label": torch.randint(2, (size,), generator=draw).double(),
            "weight": torch.rand(size, generator=draw).double(),
            "group": torch.randint(4, (size,), generator=draw).sort().values,
        }


def main(output: str, options: set[str], config: str | None) -> None:
    cluster = hybrid.connect(config)
    net = Net(options).double()
    net.is_first = cluster.rank == 0
    if "compile" in options:
        net.compile(backend="aot_eager", dynamic=True)
    model: Any = cluster.distribute(net)
    if "compile outside" in options:
        model = torch.compile(model, backend="aot_eager", dynamic=True)
    first, *others = model.parameters()
    optimizers = [torch.optim.Adam(each, lr=0.01, eps=1e-4) for each in ([first], others)]
    named = dict(option.split("=") for option in options if "=" in option)
    if "load" in named:
        cluster.load(named["load"], *optimizers)
    if "resume" in named:
        cluster.resume(named["resume"], *optimizers, every_steps=HALF - 1)
    losses, parts = [], []  # parts: losses of the step's micro-batches
    start = cluster.step if "load" in named else 0
    data = islice(batches(options), start, HALF if "save" in named or "half" in options else None)
    for batch in cluster.batches(data, whole="group" if "ranked" in options else None):
        step = cluster.step
        assert len(batch["user"])
        logits = model(batch, step)
        if "twice" in options:
            logits = logits + model({**batch, "price": -batch["price"]}, step)
        loss = binary_cross_entropy_with_logits(logits, batch["label"], reduction="none")
        weights, more = batch["weight"] if "weights" in options else None, []
        if "ranked" in options:
            for ranking_loss in (hybrid.listwise_loss, hybrid.pairwise_loss):
                more.append(ranking_loss(logits, batch["label"], batch["group"], weights))
        cluster.backward(loss, weights, more)
        for optimizer in optimizers:
            optimizer.step()
        parts.append(cluster.gather(loss.detach()))
        assert cluster.mean(loss) == pytest.approx(parts[-1].mean().item(), nan_ok=True)
        if cluster.step > step:
            losses.append(torch.cat(parts).mean().item())
            parts = []
    if "save" in named:
        cluster.save(named["save"], *optimizers)
    with torch.no_grad():
        scored = iter(()) if "unscored" in options else batches(options)
        scores = [cluster.gather(model(batch, 1)) for batch in cluster.batches(scored)]
        sizes = {"user": NUM_USERS, "item": NUM_ITEMS, "tags": NUM_TAGS, "seen": NUM_ITEMS, "pair": NUM_PAIRS}
        tables = {
            name: table(torch.arange(sizes[name]).view(-1, *([1] if name in ("tags", "seen") else []))).cpu()
            for name, table in model.module.named_children()
            if name != "mlp"
        }
    if cluster.rank == 0:
        mlp = {name: value.cpu() for name, value in model.mlp.state_dict().items()}
        torch.save({"losses": losses, "scores": scores, "tables": tables, "mlp": mlp}, output)


if __name__ == "__main__":
    output, *rest = sys.argv[1:]
    config = next((each for each in rest if each.endswith(".toml")), None)
    main(output, {each for each in rest if each != config}, config)
