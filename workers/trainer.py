"""The trainer: a replica of the dense net, a share of the data, and a stub of every worker's tables."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybrid.checkpoint import DENSE_FILE, Checkpoint, load_state, pack_dense, unpack_dense, write_tensors
from hybrid.clock import StepClock
from hybrid.config import RunConfig
from hybrid.data.loader import BatchLoader, BatchStream
from hybrid.data.storage import PreparedDataset
from hybrid.dense.ddp import DdpMode, parallelise
from hybrid.dense.device import choose_device
from hybrid.dense.nets import build_dense_net
from hybrid.dense.optimizer import DenseOptimizer, make_optimizer
from hybrid.embedding.lookup import Embeddings
from hybrid.embedding.placement import Placement
from hybrid.embedding.spec import TableSpec
from hybrid.model import HybridModel
from hybrid.step import ContextOptimizer, predict_step, train_step
from hybrid.topology import Role, RoleKind
from hybrid.wire import RemoteNet, RemoteTables
from workers.bootstrap import await_stop, join


@dataclass(frozen=True, slots=True)
class Job:
    """What the master tells every trainer.

    Attributes:
        data_folder: the prepared data set.
        tables, placement: the tables, and where their rows are.
        hosts: a stub for every worker that holds rows.
    remote_net: the remote dense net, or None.
    """

    config: RunConfig
    data_folder: Path
    tables: tuple[TableSpec, ...]
    placement: Placement
    hosts: dict[int, RemoteTables]
    remote_net: RemoteNet | None


@dataclass(frozen=True, slots=True)
class Report:
    """What a trainer has seen since the last report.

    Attributes:
        losses: this trainer's part of the loss, one value a step.
        logits, labels: of all samples of these steps.
        phase_seconds: where the time went.
    """

    losses: list[float]
    logits: Tensor
    labels: Tensor
    phase_seconds: dict[str, float]


class Trainer:
    """Lives on a trainer process; the master creates it there and calls its methods.

    Args:
        index: this trainer's index.
        job: what to train, on what.
    """

    def __init__(self, index: int, job: Job) -> None:
        config = job.config
        self._config = config
        train = PreparedDataset.open(job.data_folder, "train")
        test = PreparedDataset.open(job.data_folder, "test")
        self._train_loader = _loader(config, train, index, shuffle=config.data.shuffle)
        self._test_loader = _loader(config, test, index, shuffle=False)
        self._stream: BatchStream | None = None
        self._position = (-1, 0)
        embeddings = Embeddings(job.tables, train.input_spec, job.placement, job.hosts, index)
        dense = config.dense
        device = choose_device(dense.device, index)
        self._net = build_dense_net(config, train.input_spec, embeddings.widths).to(device)
        self._optimizer = make_optimizer(self._net.parameters(), dense.optimizer, dense.learning_rate)
        self._optimizers: list[ContextOptimizer] = [DenseOptimizer(self._optimizer)]
        if job.remote_net is not None:
            remote = job.remote_net.optimizer(make_optimizer, dense.optimizer, dense.learning_rate)
            self._optimizers.append(remote)
        # DDP wraps stages in place; this names them as they are without it.
        self._stages = nn.ModuleDict(dict(self._net.named_children()))
        model = HybridModel(embeddings, self._net, job.remote_net)
        assert dist.group.WORLD is not None, "joining the cluster forms the trainers' process group"
        self._model = parallelise(model, DdpMode(dense.ddp), dist.group.WORLD)
        self._clock = StepClock()

    def train(self, epoch: int, first_step: int, num_steps: int, steps_before: int) -> Report:
        """Train on this trainer's share of some steps of an epoch.

        Args:
            epoch: which pass over the data.
            first_step, num_steps: steps within the epoch.
            steps_before: steps taken since the start of the run.
        """
        self._model.train()
        stream = self._seek(epoch, first_step)
        report = _ReportBuilder()
        for step in range(steps_before, steps_before + num_steps):
            with self._clock.phase("data"):
                batch = next(stream)
            result = train_step(self._model, batch, self._optimizers, step, self._clock)
            report.add(result.logits, batch.labels, result.loss)
        self._position = (epoch, first_step + num_steps)
        return report.build(self._clock)

    def evaluate(self, first_step: int, num_steps: int, steps_before: int) -> Report:
        """Predict this trainer's share of some steps of the test data."""
        self._model.eval()
        report = _ReportBuilder()
        clock = StepClock()
        with self._test_loader.batches(0, first_step) as stream:
            for batch in itertools.islice(stream, num_steps):
                report.add(predict_step(self._model, batch, steps_before, clock), batch.labels)
        return report.build(clock)

    def save(self, folder: Path) -> None:
        """Write the dense net and its optimizer into a checkpoint folder."""
        packed = pack_dense(self._stages.state_dict(), self._optimizer.state_dict())
        write_tensors(folder, DENSE_FILE, packed)

    def load(self, folder: Path) -> None:
        """Take the dense net and its optimizer from a checkpoint.

        Raises:
            CheckpointError: it is of another net.
        """
        net, state = unpack_dense(Checkpoint.open(folder).tensors(DENSE_FILE))
        load_state(self._stages, net, folder)
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})

    def close(self) -> None:
        """End the background reading."""
        if self._stream is not None:
            self._stream.close()

    def _seek(self, epoch: int, step: int) -> BatchStream:
        """Batches from ``step`` of ``epoch`` on, which is mostly where the reader is already."""
        if self._stream is None or self._position != (epoch, step):
            self.close()
            self._stream = self._train_loader.batches(epoch, step)
        return self._stream


class _ReportBuilder:
    """Collects what the steps of one call give."""

    def __init__(self) -> None:
        self._losses: list[float] = []
        self._logits: list[Tensor] = []
        self._labels: list[Tensor] = []

    def add(self, logits_B: Tensor, labels_B: Tensor, loss: float = 0.0) -> None:
        self._losses.append(loss)
        self._logits.append(logits_B)
        self._labels.append(labels_B)

    def build(self, clock: StepClock) -> Report:
        return Report(self._losses, torch.cat(self._logits), torch.cat(self._labels), clock.take())


def _loader(config: RunConfig, dataset: PreparedDataset, index: int, shuffle: bool) -> BatchLoader:
    return BatchLoader(
        dataset,
        batch_size=config.train.batch_size,
        trainer_index=index,
        num_trainers=config.cluster.trainers,
        seed=config.run.seed,
        shuffle=shuffle,
        prefetch_batches=config.data.prefetch_batches,
    )


def run(config: RunConfig, index: int) -> None:
    """The trainer process: join the cluster, then do as the master says until it says stop."""
    torch.set_num_threads(config.cluster.threads)
    with join(Role(RoleKind.TRAINER, index), config) as cluster:
        await_stop(cluster)
