"""Running one role in this process, whoever started it."""

from __future__ import annotations

import socket
from pathlib import Path

from hybrid.checkpoint import Checkpoint
from hybrid.config import RunConfig
from hybrid.topology import Role, RoleKind
from workers import master, trainer, worker


def run_role(
    role: Role,
    config: RunConfig,
    folder: Path,
    *,
    listener: socket.socket | None = None,
    resume: Path | None = None,
    started_at: float | None = None,
) -> None:
    """Run ``role`` from start to end; the arguments beyond ``config`` are the master's.

    Args:
        folder: of the run.
        resume: run folder to go on from.
        listener, started_at: see :func:`workers.master.run`.
    """
    if role.kind is RoleKind.TRAINER:
        trainer.run(config, role.index)
    elif role.kind is RoleKind.WORKER:
        worker.run(config, role.index)
    else:
        stored = Checkpoint.open(resume) if resume is not None else None
        master.run(config, folder, listener=listener, resume=stored, started_at=started_at)
