"""Train recommenders whose embedding tables are larger than one machine's memory.

Worker processes hold the tables. Trainer processes hold replicas of the rest of the model. A step of all
trainers together equals the step of a single process with the whole batch.

A custom training loop needs these names::

    import torch
    import hybrid

    cluster = hybrid.connect()  # this process, or a trainer of a cluster
    model = cluster.distribute(Net())  # Net has tables, as hybrid.Embedding(500, 16, ids="user")
    optimizer = torch.optim.Adam(model.parameters())  # without tables
    for batch in cluster.batches(loader):  # the slice of this trainer
        optimizer.zero_grad()
        cluster.backward(loss(model(batch), batch["label"]))  # per sample
        optimizer.step()

Run it with ``python script.py`` in one process, or with ``hybrid run script.py --trainers 2 --workers 2`` on
a cluster. ``hybrid.load`` opens a trained model for inference. ``hybrid.follow`` opens the model of a run
that is still training. ``python -m hybrid`` is the command line.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hybrid.custom_loop.cluster import Cluster, connect
    from hybrid.custom_loop.drawn_negatives import Negatives
    from hybrid.custom_loop.embedding_modules import (
        SGD,
        Adagrad,
        Adam,
        AdamW,
        Embedding,
        EmbeddingBag,
        Ftrl,
        Jagged,
        Momentum,
        RowwiseAdagrad,
    )
    from hybrid.embedding.table_spec import Growth
    from hybrid.engine.ranking_losses import listwise_loss, pairwise_loss
    from hybrid.inference.followed_run import follow
    from hybrid.inference.trained_module import load
    from hybrid.metrics import ProgressiveMetrics

__version__ = "0.1.0"

__all__ = [  # a literal, which the documentation reads without importing this module
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Cluster",
    "Embedding",
    "EmbeddingBag",
    "Ftrl",
    "Growth",
    "Jagged",
    "Momentum",
    "Negatives",
    "ProgressiveMetrics",
    "RowwiseAdagrad",
    "connect",
    "follow",
    "listwise_loss",
    "load",
    "pairwise_loss",
]

# A name is imported on its first use: its module imports torch, which takes seconds.
_MODULES = {
    **dict.fromkeys(("Cluster", "connect"), "hybrid.custom_loop.cluster"),
    **dict.fromkeys(("listwise_loss", "pairwise_loss"), "hybrid.engine.ranking_losses"),
    "Growth": "hybrid.embedding.table_spec",
    "Negatives": "hybrid.custom_loop.drawn_negatives",
    "follow": "hybrid.inference.followed_run",
    "load": "hybrid.inference.trained_module",
    "ProgressiveMetrics": "hybrid.metrics",
}

if not TYPE_CHECKING:  # else type checkers would accept any attribute

    def __getattr__(name):
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(_MODULES.get(name, "hybrid.custom_loop.embedding_modules")), name)
        globals()[name] = value
        return value

    def __dir__():
        return sorted({*globals(), *__all__})
