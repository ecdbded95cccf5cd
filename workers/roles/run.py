"""Running one role in this process, whoever started it."""

import socket

import torch

from hybrid.config import RunConfig
from hybrid.topology import MASTER, Role
from hybrid.trust.secret import Secret
from workers.joining.bootstrap import await_stop, join
from workers.roles import master
from workers.task import Task


def run_role(
    role: Role, config: RunConfig, task: Task, secret: Secret, listener: socket.socket | None = None
) -> None:
    """Run ``role`` from start to end.

    Args:
        task: what the master does; the other roles do as it says.
        listener: see :func:`workers.roles.master.run`.
    """
    if role == MASTER:
        master.run(config, task, secret, listener)
    else:
        serve(role, config, secret)


def serve(role: Role, config: RunConfig, secret: Secret) -> None:
    """Be a trainer or a worker: host what the master creates here, until it says stop."""
    torch.set_num_threads(config.cluster.threads)
    with join(role, config, secret) as cluster:
        await_stop(cluster)
