"""The same training in one process of plain torch: dense gradients, whole batches, no RPC."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid.batch import Batch
from hybrid.config import EmbeddingSection, RunConfig
from hybrid.data.loader import BatchLoader
from hybrid.data.storage import PreparedDataset
from hybrid.dense.nets import build_dense_net, build_remote_net


class Reference:
    """Trains ``torch.nn.Embedding``-like matrices and a dense net on the global batches of a job.

    Args:
        tables: initial rows of the table of each sparse feature, in feature order.
    """

    def __init__(self, config: RunConfig, data_folder: Path, tables: dict[str, Tensor]) -> None:
        dataset = PreparedDataset.open(data_folder, "train")
        self.tables = {name: rows.clone().requires_grad_() for name, rows in tables.items()}
        widths = [rows.shape[1] for rows in tables.values()]
        self.net = build_dense_net(config, dataset.input_spec, widths)
        self.remote_net = torch.nn.Sequential()
        if config.dense.remote_mlp:
            self.remote_net = build_remote_net(config, dataset.input_spec, widths)
        dense = [*self.net.parameters(), *self.remote_net.parameters()]
        self.optimizers = [
            self._row_optimizer(config.embedding),
            getattr(torch.optim, config.dense.optimizer)(dense, lr=config.dense.learning_rate),
        ]
        self.loader = BatchLoader(
            dataset, batch_size=config.train.batch_size, seed=config.run.seed, shuffle=config.data.shuffle
        )

    def train(self, num_steps: int) -> list[float]:
        """The loss of each of the first ``num_steps`` steps."""
        losses = []
        with self.loader.batches(0) as batches:
            for batch, _ in zip(batches, range(num_steps), strict=False):
                loss = F.binary_cross_entropy_with_logits(self._logits(batch), batch.labels)
                for optimizer in self.optimizers:
                    optimizer.zero_grad()
                loss.backward()
                for optimizer in self.optimizers:
                    optimizer.step()
                losses.append(loss.item())
        return losses

    def _row_optimizer(self, section: EmbeddingSection) -> torch.optim.Optimizer:
        rows, rate = self.tables.values(), section.learning_rate
        if section.optimizer == "sgd":
            return torch.optim.SGD(rows, lr=rate)
        assert section.optimizer == "adagrad"
        return torch.optim.Adagrad(rows, lr=rate, eps=section.eps)

    def _logits(self, batch: Batch) -> Tensor:
        ids_KB = batch.sparse_features.ids_L.view(len(self.tables), -1)
        pooled = [F.embedding(ids, rows) for ids, rows in zip(ids_KB, self.tables.values(), strict=True)]
        bottom = self.net.bottom(batch.dense_features)
        hidden = self.remote_net(self.net.interaction(bottom, torch.cat(pooled, dim=1)))
        logits: Tensor = self.net.head(hidden).view(-1)
        return logits
