"""The trainer: a process that hosts a ``Trainer``, which the master creates and calls."""

from __future__ import annotations

import torch

from hybrid.config import RunConfig
from hybrid.topology import Role, RoleKind
from hybrid.trust.secret import Secret
from workers.joining.bootstrap import await_stop, join


def run(config: RunConfig, index: int, secret: Secret) -> None:
    """The trainer process: join the cluster, then do as the master says until it says stop."""
    torch.set_num_threads(config.cluster.threads)
    with join(Role(RoleKind.TRAINER, index), config, secret) as cluster:
        await_stop(cluster)
