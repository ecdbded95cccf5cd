"""Train on clicks that each trainer generates, more of them on trainer 0 than on trainer 1.

Run it on a cluster by ``hybrid run train_items:main --set data.multi_hot_separator="|"``, in this folder.

Labels are between 0 and 1. With sections [tasks.NAME], ``labels`` has one column per task; ``weights`` has
the same shape, with the weight of each sample for each task. With a ranking loss, batches have ``groups``. If
ids have weights, set ``weighted=True`` in their ``FeatureSpec``.
"""

from collections.abc import Iterator
from pathlib import Path

import torch

from hybrid.batch import Batch, SparseFeatures
from hybrid.config import RunConfig
from hybrid.input_spec import FeatureSpec, InputSpec
from hybrid.topology import Topology
from workers.controller.session import Session

SPEC = InputSpec(("price",), (FeatureSpec("item", 50), FeatureSpec("tags", 8, multi_hot=True)))


def batches(trainer: int) -> Iterator[Batch]:
    """Yield the batches of one trainer."""
    draw = torch.Generator().manual_seed(trainer)
    size = 64 // (1 + trainer)
    for _ in range(300 // (1 + trainer)):
        items = torch.randint(50, (size,), generator=draw)
        counts = torch.randint(3, (size,), generator=draw)
        tags = [torch.randint(8, (int(n),), generator=draw).tolist() for n in counts]
        sparse = SparseFeatures.from_bags([[[item] for item in items.tolist()], tags])
        labels = (items < 10).float()
        yield Batch(
            torch.rand(size, 1, generator=draw), sparse, labels, global_size=0
        )  # the engine sums the sizes


def main(topology: Topology, config: RunConfig) -> None:
    session = Session(topology, config, SPEC, total_steps=300)
    reports = session.train_on(batches, steps_before=0)  # one report of each trainer
    losses = [sum(parts) for parts in zip(*(report.losses for report in reports), strict=True)]
    print(f"{len(losses)} steps, loss {losses[0]:.3f} to {losses[-1]:.3f}")
    session.save(Path("model"), step=len(losses), epoch=1)
    session.close()
