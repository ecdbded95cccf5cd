"""Hybrid-parallel training: data-parallel dense nets, embedding tables on remote workers.

This package knows tensors and tables, and nothing of processes: that is ``workers``. Begin with ``training``,
a trainer's step, and follow it down; docs/design.md has the rooms, and the way of one id through them.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# What a script of the user's imports; their modules import torch, which takes seconds.
_PUBLIC = {
    "Embedding": "hybrid.custom_loop.embedding_modules",
    "EmbeddingBag": "hybrid.custom_loop.embedding_modules",
    "Jagged": "hybrid.custom_loop.jagged",
    "connect": "hybrid.custom_loop.cluster",
    "listwise_loss": "hybrid.engine.ranking_losses",
    "load": "hybrid.inference.trained_module",
    "pairwise_loss": "hybrid.engine.ranking_losses",
    **dict.fromkeys(
        ("SGD", "Momentum", "Adagrad", "RowwiseAdagrad", "Adam", "AdamW", "Ftrl"),
        "hybrid.custom_loop.table_optimizers",
    ),
}


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
