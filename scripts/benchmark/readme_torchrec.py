"""The README's example in TorchRec, to count lines by: the same tables, the same net, the same loop.

In the environment of ``scripts/benchmark/environment``::

    .venv-bench/bin/torchrun --nproc-per-node 2 scripts/benchmark/readme_torchrec.py
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.model_parallel import get_default_sharders
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

USERS, ITEMS, TAGS = 500, 200, 10


class Net(nn.Module):
    """As in the README, with the collections that TorchRec shards."""

    def __init__(self) -> None:
        super().__init__()
        meta = torch.device("meta")
        self.vectors = EmbeddingCollection(
            device=meta,
            tables=[
                EmbeddingConfig(name="user", num_embeddings=USERS, embedding_dim=16, feature_names=["user"]),
                EmbeddingConfig(
                    name="item", num_embeddings=ITEMS, embedding_dim=16, feature_names=["item", "seen"]
                ),
            ],
        )
        self.bags = EmbeddingBagCollection(
            device=meta,
            tables=[
                EmbeddingBagConfig(
                    name="tags",
                    num_embeddings=TAGS,
                    embedding_dim=16,
                    feature_names=["tags"],
                    pooling=PoolingType.MEAN,
                )
            ],
        )
        self.mlp = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, ids: KeyedJaggedTensor, bags: KeyedJaggedTensor) -> Tensor:
        vectors = self.vectors(ids)
        user, item = vectors["user"].values(), vectors["item"].values()
        seen = vectors["seen"].values().view(-1, 5, 16).mean(dim=1)
        tags = self.bags(bags).values()
        logits: Tensor = self.mlp(torch.cat([user, item * user, seen * item, tags], dim=1))
        return logits.view(-1)


def clicks(num_samples: int, seed: int) -> dict[str, Tensor]:
    """As in the README."""
    draw = torch.Generator().manual_seed(seed)
    user = torch.randint(USERS, (num_samples,), generator=draw)
    item = torch.randint(ITEMS, (num_samples,), generator=draw)
    likes = torch.sin(user * 0.37) * torch.cos(item * 0.11) * 3
    return {
        "user": user,
        "item": item,
        "seen": (item.unsqueeze(1) + torch.randint(20, (num_samples, 5), generator=draw)) % ITEMS,
        "tags": torch.stack([item % TAGS, item // TAGS % TAGS], dim=1),
        "label": torch.bernoulli(likes.sigmoid(), generator=draw),
    }


def jagged(batch: dict[str, Tensor], names: list[str]) -> KeyedJaggedTensor:
    """The bags of some features, one after another."""
    values = [batch[name].reshape(len(batch["label"]), -1) for name in names]
    lengths = torch.cat([torch.full((len(each),), each.size(1), dtype=torch.int32) for each in values])
    return KeyedJaggedTensor.from_lengths_sync(
        names, torch.cat([each.reshape(-1) for each in values]), lengths
    )


def shares(
    data: dict[str, Tensor], size: int
) -> Iterator[tuple[KeyedJaggedTensor, KeyedJaggedTensor, Tensor]]:
    """This rank's part of each batch; of one that does not divide, the rest is left out."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    part = size // ranks
    for start in range(0, len(data["label"]) // size * size, size):
        own = {name: each[start + rank * part : start + (rank + 1) * part] for name, each in data.items()}
        yield jagged(own, ["user", "item", "seen"]), jagged(own, ["tags"]), own["label"]


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = Net()
    for collection in (net.vectors, net.bags):
        apply_optimizer_in_backward(torch.optim.Adagrad, collection.parameters(), {"lr": 0.04})
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=dist.get_world_size(), compute_device="cpu")
    )
    plan = planner.collective_plan(net, get_default_sharders(), dist.GroupMember.WORLD)
    model = DistributedModelParallel(net, device=torch.device("cpu"), plan=plan)
    dense = [parameter for name, parameter in model.named_parameters() if ".mlp." in f".{name}"]
    optimizer = torch.optim.Adam(dense, lr=2e-3)
    test = clicks(20_000, seed=1)
    for epoch in range(2):
        for ids, bags, labels in shares(clicks(50_000, seed=0), size=512):
            optimizer.zero_grad()
            binary_cross_entropy_with_logits(model(ids, bags), labels).backward()
            optimizer.step()
        with torch.no_grad():
            sums = torch.zeros(2)
            for ids, bags, labels in shares(test, size=4096):
                losses = binary_cross_entropy_with_logits(model(ids, bags), labels, reduction="none")
                sums += torch.tensor([losses.sum(), len(losses)])
            dist.all_reduce(sums)
            if dist.get_rank() == 0:
                print(f"epoch {epoch + 1}: test loss {sums[0] / sums[1]:.4f}", flush=True)


if __name__ == "__main__":
    main()
