"""Train recommenders whose embedding tables are larger than one machine's memory.

Worker processes hold the tables. Trainer processes hold replicas of the rest of the model. One step of all
trainers computes what one step of a single process computes on the whole batch.

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
a cluster. ``hybrid.load`` opens a trained model for inference, and ``hybrid.follow`` the model of a run that
trains. ``python -m hybrid`` is the command line.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hybrid.custom_loop.cluster import Cluster as Cluster, connect as connect
    from hybrid.custom_loop.drawn_negatives import Negatives as Negatives
    from hybrid.custom_loop.embedding_modules import (
        SGD as SGD,
        Adagrad as Adagrad,
        Adam as Adam,
        AdamW as AdamW,
        Embedding as Embedding,
        EmbeddingBag as EmbeddingBag,
        Ftrl as Ftrl,
        Jagged as Jagged,
        Momentum as Momentum,
        RowwiseAdagrad as RowwiseAdagrad,
    )
    from hybrid.embedding.table_spec import Growth as Growth
    from hybrid.engine.ranking_losses import listwise_loss as listwise_loss, pairwise_loss as pairwise_loss
    from hybrid.inference.followed_run import follow as follow
    from hybrid.inference.trained_module import load as load
    from hybrid.metrics import ProgressiveMetrics as ProgressiveMetrics

__version__ = "0.1.0"

# A name is imported on its first use: its module imports torch, which takes seconds.
_OPTIMIZERS = "SGD", "Adagrad", "Adam", "AdamW", "Ftrl", "Momentum", "RowwiseAdagrad"
_TABLES = "Embedding", "EmbeddingBag", "Jagged"
_MODULES = {
    **dict.fromkeys(("Cluster", "connect"), "hybrid.custom_loop.cluster"),
    **dict.fromkeys((*_OPTIMIZERS, *_TABLES), "hybrid.custom_loop.embedding_modules"),
    **dict.fromkeys(("listwise_loss", "pairwise_loss"), "hybrid.engine.ranking_losses"),
    "Growth": "hybrid.embedding.table_spec",
    "Negatives": "hybrid.custom_loop.drawn_negatives",
    "follow": "hybrid.inference.followed_run",
    "load": "hybrid.inference.trained_module",
    "ProgressiveMetrics": "hybrid.metrics",
}
__all__ = list(_MODULES)

if not TYPE_CHECKING:  # else type checkers would accept any attribute

    def __getattr__(name):
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(_MODULES[name]), name)
        globals()[name] = value
        return value

    def __dir__():
        return sorted({*globals(), *__all__})
