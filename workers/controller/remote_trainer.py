"""The trainer: a dense net or its part of one, a share of the data, and a stub of every worker's tables."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid.batch import Batch, by_task, split_outputs
from hybrid.checkpoint.checkpoint_files import DENSE_FILE, Files
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.checkpoint.dense_state import load_state, pack_dense, unpack_dense
from hybrid.checkpoint.tensor_file import write_tensors
from hybrid.config import TaskSection
from hybrid.config.loading import with_own
from hybrid.data.batches.batch_loader import BatchLoader, BatchStream
from hybrid.data.prepare.dataset_location import open_split
from hybrid.dense.custom_net import batch_norm_warning
from hybrid.dense.dense_optimizer import DenseOptimizer
from hybrid.dense.devices import choose_devices
from hybrid.embedding.trainer.batch_ids import BatchIds
from hybrid.embedding.trainer.embeddings import Embeddings
from hybrid.embedding.trainer.lookup import TableSource
from hybrid.engine.ddp import DdpMode, DdpModel
from hybrid.engine.execution_backends import apply_backend
from hybrid.engine.gradient_reduction import SharedMemoryReduce
from hybrid.engine.losses import Objective
from hybrid.engine.step_feed import Feed, StepInput
from hybrid.engine.train_step import predict_step, seed_step, train_step
from hybrid.engine.uneven_batches import align_batches
from hybrid.engine.update_guard import Guard
from hybrid.errors import DataError
from hybrid.metrics import Predictions
from hybrid.primitives.step_timings import Span, StepClock
from hybrid.protocol.ticket import Purpose, Ticket
from hybrid.protocol.update_rules import UpdateMode
from hybrid.storage.remote_path import StoragePath
from hybrid.transport import RemoteHosted
from hybrid.transport.shared_memory.host_aggregation import HostAggregation, can_aggregate, saves_work
from hybrid.transport.shared_memory.shared_block import SharedMemory
from workers.controller.job_messages import Job, Report


class Trainer:
    """Lives on a trainer process; the master creates it there and calls its methods.

    Args:
        index: this trainer's index.
        job: what to train, on what.
        settings: what this role was given of its own.
    """

    def __init__(self, index: int, job: Job, settings: Sequence[str] = ()) -> None:
        blueprint = replace(job.blueprint, config=with_own(job.blueprint.config, settings))
        self._config = config = blueprint.config
        self._spec = spec = blueprint.input_spec
        self._sequences = blueprint.sequences
        self._index = index
        dense = config.dense
        self._devices = devices = choose_devices(dense, index)
        self._device = devices[0]
        self._clock = StepClock()
        assert dist.group.WORLD is not None, "joining the cluster forms the trainers' process group"
        self._group = dist.group.WORLD
        sources = self._sources(job)
        self._embeddings = Embeddings(blueprint.tables, spec, job.placement, sources, self._clock)
        net = blueprint.dense_net().to(self._device)
        self._num_parameters = sum(parameter.numel() for parameter in net.parameters())
        model = blueprint.model(net, job.remote_net)
        self._placement = apply_backend(model, blueprint, devices)
        self._optimizer = DenseOptimizer(blueprint.optimizer(model.net), job.rules.schedule)
        self._model = DdpModel(model, DdpMode(dense.ddp), self._placement, self._clock, self._share_memory())
        decided: list[RemoteHosted[Any]] = [
            *job.remote_tables.values(),
            *([job.remote_net] if job.remote_net else []),
        ]
        self._guard = Guard(job.rules, decided, self._group, self._reducing_device)
        self._objective = Objective(config.all_tasks)
        self._spans_processes = job.rules.mode is UpdateMode.SYNC or job.remote_net is not None
        tables = list(job.remote_tables.values())
        mode, parts = job.rules.mode, job.rules.parts
        self._feed = Feed[Batch](self._embeddings, tables, index, mode, parts, self._clock)
        self._stream: BatchStream | None = None
        self._position = (-1, 0)
        self._held: tuple[str, dict[str, Tensor]] = (DENSE_FILE, {})
        self._weighted: set[int] = set()  # features whose ids have had weights in batches of the caller's own
        self._loaders: dict[str, BatchLoader] = {}
        if job.data_source is not None:
            self._loaders = {split: self._loader(job.data_source, split) for split in ("train", "test")}

    def train(self, epoch: int, first_step: int, num_steps: int, steps_before: int) -> Report:
        """Train on this trainer's share of some steps of an epoch of the prepared data set.

        Args:
            epoch: which pass over the data.
            first_step, num_steps: steps within the epoch.
            steps_before: steps taken since the start of the run.
        """
        if self._stream is None or self._position != (epoch, first_step):
            self._close_stream()
            self._stream = self._loaders["train"].batches(epoch, first_step)
            self._feed.begin(self._stream, steps_before, is_within=first_step > 0)
        self._position = (epoch, first_step + num_steps)
        return self._train(self._feed.take(num_steps), steps_before)

    def train_on(self, make_batches: Callable[[int], Iterable[Batch]], steps_before: int) -> Report:
        """Train on batches of the caller's own, to the end of those of all trainers.

        Trainers may have different numbers of batches, of different sizes; each step takes one of every
        trainer that still has one.

        Args:
            make_batches: gives the batches of a trainer by its index; called on every trainer. Their
                ``global_size`` is not read.
            steps_before: steps taken since the start of the run.

        Raises:
            DataError: a batch is not of the job's features and tasks, a label or weight none of these, or a
                group is split where a loss is of the order within groups.
        """
        self._close_stream()
        spec = self._spec
        empty = Batch.empty(len(spec.dense_features), len(spec.sparse_features))
        batches = make_batches(self._index)
        own = [*self._checked(batches)] if isinstance(batches, Sequence) else self._checked(batches)
        num_tasks, has_ranking = len(self._config.task_specs), self._config.has_ranking_loss
        own_steps = align_batches(own, empty, self._group, self._reducing_device, num_tasks, has_ranking)
        self._feed.begin(own_steps, steps_before)
        report = self._train(self._feed, steps_before)
        self._feed.rejoin()
        names = [feature.name for feature in spec.sparse_features]
        return replace(report, weighted=tuple(names[k] for k in sorted(self._weighted)))

    def _checked(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        spec, tasks = self._spec, self._config.task_specs
        for number, batch in enumerate(batches):
            try:
                batch.check(len(spec.dense_features), len(spec.sparse_features), tasks)
                if self._config.has_ranking_loss:
                    batch.check_groups()
            except DataError as error:
                raise DataError(f"trainer {self._index}, batch {number}: {error}") from error
            if batch.sparse_features.weights_L is not None:
                self._weighted |= BatchIds(batch.sparse_features).weighted
            yield batch

    def _train(self, inputs: Iterable[StepInput[Batch]], steps_before: int) -> Report:
        self._model.module.train()
        report = _ReportBuilder(list(self._config.all_tasks.values()))
        for step, (batch, micro_batches) in enumerate(inputs, steps_before):
            seed_step(self._config.run.seed, self._index, step, self._devices)
            result = train_step(
                self._model,
                micro_batches,
                self._objective,
                self._optimizer,
                self._guard,
                step,
                self._clock,
                self._spans_processes,
            )
            report.add(result.outputs, batch, result.loss, result.is_skipped)
            self._clock.end_step()
        return report.build(self._clock)

    def evaluate(self, first_step: int, num_steps: int, steps_before: int) -> Predictions:
        """Predict this trainer's share of some steps of the test data; at least one."""
        module = self._model.module.eval()
        parts = []
        clock = StepClock()
        ticket = Ticket(self._index, steps_before, steps_before, purpose=Purpose.PREDICT)
        with self._loaders["test"].batches(0, first_step) as stream:
            for batch in itertools.islice(stream, num_steps):
                outputs_BO = predict_step(module, self._embeddings, batch, ticket, clock)
                parts.append(Predictions.of(batch, outputs_BO, self._sequences))
        return Predictions.concatenate(parts)

    def num_parameters(self) -> int:
        """Return the number of parameters of the local dense net."""
        return self._num_parameters

    def settle(self) -> None:
        """See :meth:`Feed.settle`."""
        self._feed.flush()

    def begin_save(self, name: str | None) -> None:
        """Hold a copy of the dense net and its optimizer for :meth:`write`.

        Trainers that hold a net together are called at once.

        Args:
            name: of the file to write; None only gives others the part of the net that they do not have.
        """
        whole = self._placement.full_state(self._model.net, self._optimizer.optimizer)
        if name is not None:
            self._held = name, pack_dense(*whole)

    def write(self, folder: StoragePath) -> Files:
        """Write what it holds into a checkpoint folder, and let go of it."""
        (name, held), self._held = self._held, (DENSE_FILE, {})
        return write_tensors(folder, name, held)

    def load(self, folder: StoragePath, name: str) -> None:
        """Take the dense net and its optimizer from a file of a checkpoint.

        Raises:
            CheckpointError: it is of another net.
        """
        stored = unpack_dense(Checkpoint.open(folder).tensors(name))
        net, state = self._placement.local_state(self._model.net, *stored)
        load_state(self._model.net, net, folder)
        self._optimizer.load(state, folder)

    def batch_norm_warning(self) -> str | None:
        """See :func:`hybrid.dense.custom_net.batch_norm_warning`."""
        return batch_norm_warning(self._model.net, self._config)

    def record(self, steps: range) -> None:
        """See :meth:`StepClock.record`."""
        self._clock.record(steps)

    def take_spans(self) -> list[Span]:
        """See :meth:`StepClock.take_spans`."""
        return self._clock.take_spans()

    def close(self) -> None:
        """End the background reading."""
        self._close_stream()
        for loader in self._loaders.values():
            loader.dataset.close()

    def _close_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _share_memory(self) -> SharedMemoryReduce | None:
        """The all-reduce of trainers that share memory; None where the process group has to do it."""
        if dist.get_backend(self._group) != "gloo":
            return None
        timeout_seconds = self._config.cluster.timeout_seconds
        return SharedMemoryReduce.join(self._placement.group, self._index, self._device, timeout_seconds)

    def _sources(self, job: Job) -> Mapping[int, TableSource]:
        """Who answers for each worker's tables: it, or the trainers of this host together."""
        config, tables = self._config, list(job.remote_tables.values())
        if not can_aggregate(config) or dist.get_backend(self._group) != "gloo":
            return job.remote_tables
        timeout_seconds = config.cluster.timeout_seconds
        memory = SharedMemory.join(self._group, self._index, True, timeout_seconds)
        if memory is None or not saves_work(len(memory.members), len(tables)):
            return job.remote_tables
        return HostAggregation(memory, tables).sources()

    @property
    def _reducing_device(self) -> torch.device:
        """Where the trainers' process group wants its tensors."""
        return self._device if dist.get_backend(self._group) == "nccl" else torch.device("cpu")

    def _loader(self, source: str, split: str) -> BatchLoader:
        config = self._config
        is_training = split == "train"
        return BatchLoader(
            open_split(source, split, config.data),
            batch_size=config.train.batch_size,
            trainer_index=self._index,
            num_trainers=config.cluster.trainers,
            seed=config.run.seed,
            shuffle=is_training and config.data.is_shuffled,
            lanes=config.data.shuffle_lanes,
            by_group=is_training and config.has_ranking_loss,
        )


class _ReportBuilder:
    """Collects what the steps of one call give.

    Args:
        tasks: of the run; outputs and labels are kept of the first.
    """

    def __init__(self, tasks: Sequence[TaskSection]) -> None:
        self._tasks = tasks
        self._losses: list[float] = []
        self._outputs: list[Tensor] = []
        self._labels: list[Tensor] = []
        self._skipped_steps = 0

    def add(self, outputs_BO: Tensor, batch: Batch, loss: float, is_skipped: bool) -> None:
        labels_B = by_task(batch.labels, len(self._tasks))[:, 0]
        if batch.weights is not None:
            counts_B = by_task(batch.weights, len(self._tasks))[:, 0] > 0
            labels_B = labels_B.where(counts_B, torch.nan)
        self._losses.append(loss)
        self._outputs.append(split_outputs(outputs_BO, [each.num_outputs for each in self._tasks])[0])
        self._labels.append(labels_B)
        self._skipped_steps += is_skipped

    def build(self, clock: StepClock) -> Report:
        # Nothing at all where no trainer was given a batch.
        outputs_N, labels_N = (torch.cat(t) if t else torch.empty(0) for t in (self._outputs, self._labels))
        return Report(self._losses, outputs_N, labels_N, clock.take(), self._skipped_steps)
