"""A checkpoint of one execution backend, loaded into another; runs in the master's process."""

from functools import partial
from pathlib import Path

from benchmark.batch_session import BatchSession
from comparison.cases.matrix import Case

from hybrid.batch import Batch
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from workers.jobs.comparison import Snapshot, snapshot
from workers.rendezvous.bootstrap import JoinedCluster

STEPS = 3


def reloaded(cluster: JoinedCluster, saved: Case, loaded: Case, folder: Path) -> tuple[Snapshot, Snapshot]:
    """Return the tensors of ``saved`` at its checkpoint, and those of ``loaded`` after loading it."""
    names = [name for name, _ in saved.nets()[0].named_parameters()]
    session = BatchSession(cluster.topology, saved.config, saved.input_spec, STEPS)
    session.train_on(partial(_first_batches, saved), 0)
    before = snapshot(session, names)
    session.save(folder / "checkpoint", STEPS, 0)
    session.close()

    session = BatchSession(cluster.topology, loaded.config, loaded.input_spec, STEPS)
    session.load(Checkpoint.open(folder / "checkpoint"))
    after = snapshot(session, names)
    session.close()
    return before, after


def _first_batches(case: Case, trainer: int) -> list[Batch]:
    return case.batches(trainer)[:STEPS]
