"""Running one role in this process, whoever started it."""

from __future__ import annotations

import socket

from hybrid.config import RunConfig
from hybrid.topology import Role, RoleKind
from hybrid.trust.secret import Secret
from workers.roles import master, trainer, worker
from workers.task import Task


def run_role(
    role: Role,
    config: RunConfig,
    task: Task,
    secret: Secret,
    listener: socket.socket | None = None,
) -> None:
    """Run ``role`` from start to end.

    Args:
        task: what the master does; the other roles do as it says.
        secret: the cluster's.
        listener: see :func:`workers.roles.master.run`.
    """
    if role.kind is RoleKind.TRAINER:
        trainer.run(config, role.index, secret)
    elif role.kind is RoleKind.WORKER:
        worker.run(config, role.index, secret)
    else:
        master.run(config, task, secret, listener)
