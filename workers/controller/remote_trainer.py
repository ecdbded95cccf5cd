"""The trainer of a job: a dense net or a part of it, a slice of the data, and stubs of all tables."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid.batch import Batch, by_task, split_outputs
from hybrid.checkpoint.checkpoint_folders import DENSE_FILE, Files
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.checkpoint.tensor_file import load_state, pack_dense, unpack_dense, write_tensors
from hybrid.config import RunConfig
from hybrid.config.data_sections import TRAIN
from hybrid.config.loading import apply_settings
from hybrid.data.batches import BatchLoader, BatchStream
from hybrid.data.dataset.prepared_dataset import PreparedDataset
from hybrid.data.encode.feature_encoder import FeatureEncoder
from hybrid.data.prepare.preparation import open_split
from hybrid.data.stream.stream_cursor import Reader, open_reader
from hybrid.data.stream.units import LanePosition, StreamUnit
from hybrid.data.values.invalid_rows import InvalidRowReport
from hybrid.dense.dense_optimizer import DenseOptimizer
from hybrid.dense.devices import choose_devices, describe_device
from hybrid.dense.sync_batch_norm import synchronize_batch_norms
from hybrid.dense.tensor_parallel import full_tensor, local_shard
from hybrid.embedding.placement import Placement
from hybrid.embedding.trainer.embeddings import Embeddings
from hybrid.engine.execution_backends import apply_backend
from hybrid.engine.hybrid_model import MicroBatch, evaluating
from hybrid.engine.losses import Objective
from hybrid.engine.model_builder import Blueprint
from hybrid.engine.retrieval import ItemRanking, RetrievalLoss
from hybrid.engine.step_engine import StepEngine
from hybrid.engine.uneven_batches import align_batches
from hybrid.metrics import Predictions
from hybrid.primitives.step_timings import Span, StepClock
from hybrid.storage.remote_path import StoragePath
from hybrid.transport import RemoteNet, RemoteTables
from hybrid.updates.ticket import Purpose, Ticket
from hybrid.updates.update_rules import UpdateRules


@dataclass(frozen=True, slots=True)
class TrainerReport:
    """A trainer's losses, predictions, labels and times of the steps of one call."""

    losses: list[float]  # one value per step; the sum over the trainers is the loss of the step
    # outputs, labels: of this trainer's samples, for the first task. Labels are NaN for samples of weight 0,
    # and for all samples of a retrieval task.
    outputs: Tensor
    labels: Tensor
    phase_seconds: dict[str, float]  # time by phase
    skipped_steps: int  # number of steps without an update
    event_time: float = -math.inf  # the largest event time in the rows that all trainers read in these steps


def make_loader(config: RunConfig, dataset: PreparedDataset, trainer: int, is_training: bool) -> BatchLoader:
    """Return the loader of a trainer's slices. Only training shuffles rows and keeps groups complete."""
    return BatchLoader(
        dataset,
        batch_size=config.train.batch_size,
        trainer_index=trainer,
        num_trainers=config.cluster.trainers,
        seed=config.run.seed,
        shuffle=is_training and config.data.is_shuffled,
        lanes=config.data.shuffle_lanes,
        by_group=is_training and config.has_ranking_loss,
    )


class Trainer:
    """The object of a job in a trainer process. The master creates it and calls its methods.

    In all methods, ``steps_before`` is the number of steps that the run took before the call.

    Args:
        placement: the worker of each row.
        remote_tables: a stub for every worker that holds rows.
        data_source: location of the prepared data, for :func:`open_split`; None for a stream.
        settings: this role's values of the configuration keys that may differ between hosts.
    """

    def __init__(
        self,
        index: int,
        blueprint: Blueprint,
        placement: Placement,
        rules: UpdateRules,
        remote_tables: dict[int, RemoteTables],
        remote_net: RemoteNet | None,
        data_source: str | None,
        settings: Sequence[str] = (),
    ) -> None:
        blueprint = replace(blueprint, config=apply_settings(blueprint.config, settings))
        self._config = config = blueprint.config
        self._spec = spec = blueprint.input_spec
        self._sequences = blueprint.sequences
        self._index = index
        devices = choose_devices(config.dense, index)
        self._device = devices[0]
        self._clock = StepClock()
        assert dist.group.WORLD is not None, "joining the cluster forms the trainers' process group"
        self._group = dist.group.WORLD
        self._embeddings = Embeddings(
            blueprint.tables, spec, placement, remote_tables, self._clock, self._device
        )
        net = blueprint.dense_net().to(devices[0])
        self._warning = synchronize_batch_norms(net, config, self._group)
        self._num_parameters = sum(parameter.numel() for parameter in net.parameters())
        model = blueprint.model(net, remote_net)
        self._net_placement = apply_backend(model, blueprint, devices)
        self._optimizer = DenseOptimizer(blueprint.optimizer(model.net), rules.schedule)
        self._engine = StepEngine[Batch](
            config,
            self._group,
            rules,
            self._embeddings,
            remote_tables,
            remote_net,
            model,
            self._net_placement,
            devices,
            self._clock,
        )
        self._stream: BatchStream | None = None
        self._reader: Reader | None = None
        self._position = (-1, 0)  # the epoch and the step in it that the stream of a data set reaches next
        self._held: tuple[str, dict[str, Tensor]] = (DENSE_FILE, {})
        self._loaders: dict[str, BatchLoader] = {}
        if data_source is not None:
            for split in config.data.splits:
                dataset = open_split(data_source, split, config.data)
                self._loaders[split] = make_loader(config, dataset, index, is_training=split == TRAIN)
        self._ranking, self._items_ID = None, torch.empty(0)
        self._loss: Callable[[Tensor, Batch], Tensor]
        if config.retrieval is None:
            self._loss = Objective(config.all_tasks)
        else:
            self._ranking = ItemRanking(config, spec)
            counts_I = self._loaders[TRAIN].dataset.count_ids(self._ranking.feature)
            self._loss = RetrievalLoss(config.retrieval, self._ranking.feature, counts_I, self._group)

    def train(self, epoch: int, first_step: int, num_steps: int, steps_before: int) -> TrainerReport:
        """Take ``num_steps`` steps on this trainer's slices of the prepared data set, within one epoch.

        ``epoch`` is the number of earlier epochs, ``first_step`` the number of earlier steps of this epoch.
        """
        if self._stream is None or self._position != (epoch, first_step):
            self.close()
            loader = self._loaders[TRAIN]
            self._stream = loader.batches(epoch, first_step * loader.batch_size)
            self._engine.begin(self._stream, steps_before)
        self._position = (epoch, first_step + num_steps)
        return self._train(num_steps)

    def open_unit(self, unit: StreamUnit, encoder: FeatureEncoder, steps_before: int) -> None:
        """Begin to read this trainer's lanes of a stream unit, from the positions in ``unit``."""
        self.close()
        config = self._config
        self._reader = open_reader(config, encoder, unit, self._index, config.cluster.trainers)
        self._stream = self._reader.batches()
        self._begin_aligned(self._stream, steps_before)

    def train_on_unit(self, num_steps: int, steps_before: int, until: float = math.inf) -> TrainerReport:
        """Take ``num_steps`` steps of the opened unit, or fewer if the unit ends.

        The call also ends after the first step that reaches the event time ``until``.
        """
        if self._config.data.is_topic:  # read only the steps of this call: later rows may not exist yet
            assert self._stream is not None
            self._begin_aligned(itertools.islice(self._stream, num_steps), steps_before, until)
        return self._train(num_steps, until)

    def _begin_aligned(self, batches: Iterable[Batch], steps_before: int, until: float = math.inf) -> None:
        empty, num_tasks = Batch.empty(*self._spec.sizes), len(self._config.all_tasks)
        aligned = align_batches(batches, empty, self._group, num_tasks, until)
        self._engine.begin(aligned, steps_before)

    def lane_positions(self, step: int) -> dict[int, LanePosition]:
        """Return the positions in this trainer's lanes after ``step`` steps; {} for a Kafka topic."""
        assert self._reader is not None
        return self._reader.positions(step)

    def invalid_rows(self) -> InvalidRowReport:
        """Return the invalid rows that this trainer found in the unit; DataError if files have too many."""
        assert self._reader is not None
        return self._reader.invalid_rows()

    def _train(self, num_steps: int, until: float = math.inf) -> TrainerReport:
        model = self._engine.model
        model.module.train()
        tasks = [*self._config.all_tasks.values()]
        losses: list[float] = []
        outputs: list[Tensor] = []
        labels: list[Tensor] = []
        skipped_steps, event_time = 0, -math.inf
        for batch, micro_batches in self._engine.steps(num_steps):
            step, losses_M, outputs_M = self._engine.step, [], []
            for each in micro_batches:
                with self._engine.recording(each) as micro:
                    outputs_BO = model.module(micro, self._clock)
                    with self._clock.phase("dense"), self._clock.span("loss"):
                        loss = self._loss(outputs_BO, micro.batch)
                    losses_M.append(self._engine.backward(loss))
                outputs_M.append(outputs_BO.detach().cpu())
            with self._clock.phase("update"):
                scale = self._engine.decide()
                if scale is not None:
                    with self._clock.span("optimizer"):
                        self._optimizer.step(step, model.gradients, scale)
            labels_B = by_task(batch.labels, len(tasks))[:, 0]
            if self._ranking is not None:  # ranks are not known while training
                labels_B = torch.full_like(labels_B, torch.nan)
                outputs_M = [outputs_BO[:, 0] for outputs_BO in outputs_M]
            elif batch.weights is not None:
                labels_B = labels_B.where(by_task(batch.weights, len(tasks))[:, 0] > 0, torch.nan)
            losses.append(sum(losses_M))
            outputs.append(split_outputs(torch.cat(outputs_M), [task.num_outputs for task in tasks])[0])
            labels.append(labels_B)
            skipped_steps += scale is None
            event_time = max(event_time, batch.event_time)
            if event_time >= until:
                self._clock.end_step()
                break
        # Both lists are empty if no trainer has a batch.
        outputs_N, labels_N = (torch.cat(each) if each else torch.empty(0) for each in (outputs, labels))
        return TrainerReport(losses, outputs_N, labels_N, self._clock.take(), skipped_steps, event_time)

    def evaluate(self, split: str, first_step: int, num_steps: int, steps_before: int) -> Predictions:
        """Return this trainer's predictions for one or more steps of a split, from ``first_step`` on.

        In a retrieval task, the call with ``first_step`` 0 also computes the item vectors for later calls.
        """
        module = self._engine.model.module
        parts, loader = [], self._loaders[split]
        clock = StepClock()
        ticket = Ticket(self._index, steps_before, steps_before, purpose=Purpose.PREDICT)
        with loader.batches(0, first_step * loader.batch_size) as stream, evaluating(module):

            def outputs_of(batch: Batch) -> Tensor:
                lookup = self._embeddings.lookup(batch.sparse_features, ticket)
                outputs_BO: Tensor = module(MicroBatch(batch, ticket, lookup, is_last=True), clock).cpu()
                return outputs_BO

            if self._ranking is not None and first_step == 0:
                self._items_ID = self._ranking.item_vectors(outputs_of)
            for batch in itertools.islice(stream, num_steps):
                outputs_BO = outputs_of(batch)
                if self._ranking is not None:
                    outputs_BO = self._ranking.ranks(outputs_BO, batch, self._items_ID)
                parts.append(Predictions.of(batch, outputs_BO, self._sequences))
        return Predictions.concatenate(parts)

    def describe(self) -> tuple[str, str | None]:
        """Return a description of the dense net, and a warning about batch normalization or None.

        The description has the number of parameters of the whole net, and the GPU if there is one.
        """
        gpu = describe_device(self._device, self._config)
        return f"{self._num_parameters:,} parameters{gpu}", self._warning

    def flush(self) -> None:
        """Wait until the workers have received the gradients of all completed steps."""
        self._engine.flush()

    def begin_save(self, name: str | None, is_delta: bool = False) -> None:
        """Copy the dense net and its optimizer in memory; :meth:`write` writes the copy.

        If one net is split over several trainers, call this method on all of them at the same time.

        Args:
            name: name of the file to write; None if another trainer writes the net.
            is_delta: whether to copy the net without its optimizer.
        """
        net, state = self._engine.model.net, self._optimizer.optimizer.state_dict()["state"]
        full = self._net_placement.convert(net, net.state_dict(), state, full_tensor)
        if name is not None:
            self._held = name, pack_dense(full[0], {} if is_delta else full[1])

    def write(self, folder: StoragePath) -> Files:
        """Write the copy of :meth:`begin_save` into a checkpoint folder, and release its memory."""
        name, held = self._held
        self._held = DENSE_FILE, {}
        return write_tensors(folder, name, held)

    def load(self, folder: StoragePath, name: str, has_state: bool = True) -> None:
        """Load the dense net from file ``name`` of a checkpoint; CheckpointError if the file has another net.

        If ``has_state``, load the optimizer's state, else reset it. Also end the background reading of data.
        """
        self.close()
        net, state = unpack_dense(Checkpoint.open(folder).tensors(name))
        of_placement = self._net_placement.convert(
            self._engine.model.net, net, state if has_state else {}, local_shard
        )
        load_state(self._engine.model.net, of_placement[0], folder)
        self._optimizer.load(of_placement[1], folder)

    def record(self, steps: range) -> None:
        self._clock.record(steps)

    def take_spans(self) -> list[Span]:
        return self._clock.take_spans()

    def close(self) -> None:
        """End the background reading of data."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
