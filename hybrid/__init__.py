"""Hybrid-parallel training: data-parallel dense nets, embedding tables on remote workers.

This package knows tensors and tables, and nothing of processes: that is ``workers``. Begin with ``training``,
a trainer's step, and follow it down; docs/design.md has the rooms, and the way of one id through them.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# What a script of the user's imports; their modules import torch, which takes seconds.
_PUBLIC = {
    "Embedding": "hybrid.own_loop.modules",
    "EmbeddingBag": "hybrid.own_loop.modules",
    "Jagged": "hybrid.own_loop.jagged",
    "connect": "hybrid.own_loop.cluster",
    "listwise_loss": "hybrid.training.ranking_losses",
    "load": "hybrid.serving.module",
    "pairwise_loss": "hybrid.training.ranking_losses",
    **dict.fromkeys(
        ("SGD", "Momentum", "Adagrad", "RowwiseAdagrad", "Adam", "AdamW", "Ftrl"),
        "hybrid.own_loop.optimizers",
    ),
}


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
