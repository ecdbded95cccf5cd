"""The worker: a process that hosts what the master creates on it, tables and remote dense nets."""

from __future__ import annotations

import torch

from hybrid.config import RunConfig
from hybrid.topology import Role, RoleKind
from hybrid.trust.secret import Secret
from workers.joining.bootstrap import await_stop, join


def run(config: RunConfig, index: int, secret: Secret) -> None:
    """The worker process: join the cluster, then serve lookups and updates until the master says stop."""
    torch.set_num_threads(config.cluster.threads)
    with join(Role(RoleKind.WORKER, index), config, secret) as cluster:
        await_stop(cluster)
