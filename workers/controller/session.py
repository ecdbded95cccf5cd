"""The objects of a job on other roles, as the master uses them; stream_session.py is for streams."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Protocol, TypeVar, TypeVarTuple

from torch import Tensor

from hybrid import transport
from hybrid.checkpoint.checkpoint_folders import Files, Manifest, dense_file
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.config import RunConfig
from hybrid.config.data_sections import TEST, TRAIN
from hybrid.config.loading import CONFIG_FILE, key_values, load_config
from hybrid.config.validation import recorded_steps
from hybrid.data.batches import check_ranking_losses
from hybrid.data.dataset import dataset_manifest
from hybrid.data.dataset.dataset_manifest import DataManifest
from hybrid.data.dataset.prepared_dataset import PreparedDataset
from hybrid.data.encode import feature_encoder
from hybrid.data.encode.feature_encoder import FeatureEncoder
from hybrid.data.prepare.preparation import open_split
from hybrid.data.stream.units import StreamUnit
from hybrid.dense.hosted_net import HostedNet
from hybrid.embedding.worker.table_shards import TableShards
from hybrid.engine.initial_model import InitialModel, other_net_error
from hybrid.engine.model_builder import Blueprint, host_remote_net, place_configured_tables, table_specs
from hybrid.errors import CheckpointError, ClusterError, ConfigError
from hybrid.input_spec import InputSpec
from hybrid.metrics import Metrics, Predictions, check_custom_metrics
from hybrid.primitives.step_timings import Span
from hybrid.storage.remote_path import StoragePath
from hybrid.topology import Role, Topology
from hybrid.updates.barrier import UpdateBarrier
from hybrid.updates.hosted_module import HostedModule
from hybrid.updates.update_rules import Schedule, UpdateRules
from workers.controller.deployment import BULK_TIMEOUT_SECONDS, HeldCheckpoint, deploy_tables, memory_shortage
from workers.controller.remote_trainer import Trainer, TrainerReport
from workers.run_folder.step_profile import Profile

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")
_EVAL_STEPS_PER_CALL = 20
_MAX_FRACTION_FOR_COPIES = 0.8  # of a host's free memory, for a second copy of its tables


class JobObject(Protocol):
    """The methods that all objects of a job have: trainers, the tables of workers, a remote net."""

    def record(self, steps: range) -> None: ...

    def take_spans(self) -> list[Span]: ...

    def write(self, folder: StoragePath) -> Files: ...

    def close(self) -> None: ...


class Session:
    """The objects of a running job: tables, trainers, and perhaps a remote net (``dense.remote_mlp``).

    Args:
        input_spec: the features of a batch.
        total_steps: number of steps of the run; learning rates may depend on it.
        ids_per_sample: mean number of ids of multi-hot features, for the placement of tables.
        data_folder: the folder of the prepared data set; None for a stream.
        encoder: the encoder of a stream; None if numbers and ids stay unchanged.
        encoder_folder: a folder with a copy of ``encoder``, which workers need to read an initial model.
        is_new: whether to read the initial model; False if a checkpoint will be loaded.
        warn: called with each warning about the dense net or the initial model.

    Raises:
        HybridError: a worker's host has no memory for its tables.
        ConfigError: the initial model cannot be used.

    Attributes:
        encoder: the current encoder, which checkpoints of a stream contain.
        initial: the initial model; None if it is not read.
        hosted: stubs of the objects on workers: tables, and the remote net if there is one.
        recorded: the steps in which every role records its operations, from section [profile].
        meanwhile: called repeatedly while the session waits for roles.
        trainer_class: the class of the objects on trainers.
    """

    trainer_class: type[Trainer] = Trainer

    def __init__(
        self,
        topology: Topology,
        config: RunConfig,
        input_spec: InputSpec,
        total_steps: int,
        *,
        ids_per_sample: Mapping[str, float] = MappingProxyType({}),
        data_folder: StoragePath | None = None,
        encoder: FeatureEncoder | None = None,
        encoder_folder: StoragePath | None = None,
        is_new: bool = True,
        warn: Callable[[str], object] = print,
    ) -> None:
        self.meanwhile: Callable[[], object] = lambda: None
        self.config = config
        self._data_folder = data_folder
        self.encoder = encoder or FeatureEncoder.identity(input_spec)
        self._total_steps = total_steps
        self.recorded = recorded_steps(config.profile, 0, total_steps)  # an error must precede the work
        source = None if data_folder is None else str(data_folder.absolute())
        values_of = source if encoder_folder is None else str(encoder_folder)
        self.initial = InitialModel(config, input_spec, values_of, warn) if is_new else None
        tables = table_specs(config, input_spec) if self.initial is None else self.initial.tables
        self.placement = place_configured_tables(config, tables, ids_per_sample)
        self.blueprint = Blueprint(config, input_spec, tables)
        self._schedule = Schedule.of(config.schedule, total_steps)
        rules = UpdateRules.of(config, self._schedule, config.cluster.trainers)
        tables_by_worker, matches = deploy_tables(topology, config, self.placement, rules)
        self._table_holders = [*tables_by_worker.values()]
        self.hosted: list[transport.RemoteHosted[HostedModule]] = [*tables_by_worker.values()]
        remote_net: transport.RemoteNet | None = None
        if config.dense.remote_mlp:
            role = topology.workers[0]
            module = transport.create_module(role, host_remote_net, self.blueprint, rules)
            remote_net = transport.RemoteNet(role, module)
            self.hosted.append(remote_net)
        shared = self.blueprint, self.placement, rules, tables_by_worker, remote_net, source
        bulk = BULK_TIMEOUT_SECONDS
        created = [
            transport.create(role, self.trainer_class, role.index, *shared, timeout_seconds=bulk)
            for role in topology.trainers
        ]
        self.trainers: list[transport.Remote[Trainer]] = transport.gather(created)
        self._objects: list[transport.Remote[JobObject]] = [*self.trainers, *self.hosted]
        self._net_size, warning = self.trainers[0].call(Trainer.describe).wait()
        if warning is not None:
            warn(warning)
        if self.initial is not None:
            self.initial.notes += self.initial.describe_matches(matches)
            self._load_initial_nets(self.initial, remote_net)
        self._start_recording()

    def describe_model(self) -> tuple[str, str]:
        """Return a line about the dense net and a line about the tables: sizes and learning rates."""
        dense = self.config.dense
        tables = self.blueprint.tables
        remote = " and a remote net on worker 0" if dense.remote_mlp else ""
        growing = [table for table in tables if table.growth is not None]
        count = f"{len(tables) - len(growing)} embedding table(s)"
        count += f" and {len(growing)} growing" if growing else ""
        rows = f"{sum(table.expected_rows for table in tables):,} rows"
        if growing and all(table.expected_rows for table in growing):
            rows = f"at most {rows}"
        num_bytes = sum(shard.num_bytes for shard in self.placement.shards)
        optimizers = {
            f"{t.optimizer.name} with learning rate {t.optimizer.learning_rate:g}": None for t in tables
        }
        return (
            f"dense net {dense.net}: {self._net_size}{remote}, {dense.optimizer_call[0]} "
            f"with learning rate {dense.learning_rate:g}",
            f"{count}: {rows}, {num_bytes / 2**20:,.1f} MiB with optimizer state, {', '.join(optimizers)}",
        )

    def table_metrics(self) -> dict[str, float]:
        """Return numbers about each growing table, by names such as ``user.rows``.

        ``unknown_fraction``, ``admitted`` and ``evicted`` are counted since the last call. ``collisions`` is
        the expected number of pairs of values with the same key.
        """
        growing = {table.name: table.growth for table in self.blueprint.tables if table.growth is not None}
        totals = {name: Counter[str]() for name in growing}
        calls = [holder.call(TableShards.take_counts) for holder in self._table_holders if growing]
        for of_worker in transport.gather(calls, self._meanwhile):
            for name, counts in of_worker.items():
                totals[name].update(counts)
        metrics: dict[str, float] = {}
        for name, counts in totals.items():
            rows = counts["rows"]
            numbers = {
                **{key: float(counts[key]) for key in ("rows", "pending", "admitted", "evicted")},
                "unknown_fraction": counts["unknown"] / max(1, counts["lookups"]),
                "collisions": rows * (rows - 1) / 2**65,
            }
            if max_rows := growing[name].max_rows:
                numbers["free_rows"] = float(max_rows - rows)
            metrics |= {f"{name}.{key}": value for key, value in numbers.items()}
        return metrics

    def learning_rates(self, step: int) -> dict[str, float]:
        """Return the learning rates that step number ``step`` (from 1) used, by configuration key."""
        factor = self._schedule.factor(step - 1)
        values = ((f"{section}.{name}", value) for section, name, _, value in key_values(self.config))
        return {key: value * factor for key, value in values if key.endswith(".learning_rate")}

    def take_profile(self) -> Profile:
        """Return the profile of the steps recorded since the last call; ConfigError if there are no steps."""
        self._flush()
        spans: dict[Role, list[Span]] = defaultdict(list)
        responses = transport.gather([each.call(JobObject.take_spans) for each in self._objects])
        for each, response in zip(self._objects, responses, strict=True):
            spans[each.role] += response
        profile = Profile(spans)
        if not profile.steps:
            rule = "none of these steps has been taken"
            raise ConfigError("profile.steps", rule, self.config.profile.steps)
        return profile

    def _start_recording(self) -> None:
        if self.recorded:
            transport.gather([each.call(JobObject.record, self.recorded) for each in self._objects])

    def save(self, folder: StoragePath, step: int) -> StoragePath:
        """Write a checkpoint of the current step, and return its folder. Training waits meanwhile."""
        self.begin_save(folder, Manifest(step, 0, {}), in_background=False).write()
        return folder

    def begin_save(
        self,
        folder: StoragePath,
        manifest: Manifest,
        reports: Mapping[str, Tensor] = MappingProxyType({}),
        in_background: bool = True,
    ) -> HeldCheckpoint:
        """Make every role prepare a checkpoint of the current step; the result has a method ``write``.

        The caller must call ``write`` before it begins the next checkpoint. Training must wait until
        ``write`` returns, unless ``is_copied`` of the result is true.

        Args:
            manifest: a manifest to which this method adds tables and progress, and ``write`` adds files.
            reports: further tensors to store, from :meth:`RunProgress.pack`.
            in_background: whether workers copy their tensors, unless their hosts lack the memory for copies.
        """
        progress = {**manifest.progress, **self._own_progress()}
        manifest = replace(manifest, tables=self.placement.shapes, progress=progress)
        holders = [holder.role for holder in self._table_holders]
        is_copied = in_background and not memory_shortage(self.placement, holders, _MAX_FRACTION_FOR_COPIES)
        start = self._hold(is_copied)
        if self.config.checkpoint.delta_call.name != "none":
            transport.gather([each.call(TableShards.track_changes) for each in self._table_holders])
        texts, vocabularies = dataset_manifest.checkpoint_contents(self.config, self._data_folder)
        if self._data_folder is None:
            texts[feature_encoder.FILE_NAME] = self.encoder.to_json()
        return HeldCheckpoint(folder, manifest, texts, reports, start, is_copied, vocabularies)

    def _own_progress(self) -> dict[str, Any]:
        return {}

    def begin_delta(self, folder: StoragePath, manifest: Manifest) -> HeldCheckpoint:
        """Make every role copy its nets, and the rows that changed since the last delta or checkpoint.

        In a stream, the delta contains the encoder, too. ``manifest`` is as for :meth:`begin_save`.
        """
        manifest = replace(manifest, tables=self.placement.shapes)
        texts = {} if self._data_folder else {feature_encoder.FILE_NAME: self.encoder.to_json()}
        return HeldCheckpoint(folder, manifest, texts, {}, self._hold(True, is_delta=True), True)

    def _hold(
        self, is_copied: bool, is_delta: bool = False
    ) -> Callable[[StoragePath], Sequence[transport.Pending[Files]]]:
        """Make every role prepare files, as copies if ``is_copied``; return a function to write the files."""
        self._flush()
        bulk, saving = BULK_TIMEOUT_SECONDS, self.config.saving_trainers
        hold = HostedModule.begin_save
        calls = [each.call(hold, is_copied, is_delta, timeout_seconds=bulk) for each in self.hosted]
        for index, trainer in enumerate(self.trainers):
            name = dense_file(index) if index in saving else None
            calls.append(trainer.call(Trainer.begin_save, name, is_delta, timeout_seconds=bulk))
        transport.gather(calls, self._meanwhile)
        writers: list[transport.Remote[JobObject]] = [*self.hosted, *(self.trainers[i] for i in saving)]
        return lambda partial: [w.call(JobObject.write, partial, timeout_seconds=bulk) for w in writers]

    def load(self, stored: Checkpoint) -> None:
        """Load a checkpoint, to continue training; RemoteError if the checkpoint has another model."""
        self.restore(stored)
        self.recorded = recorded_steps(self.config.profile, stored.manifest.step, self._total_steps)
        self._start_recording()

    def restore(self, stored: Checkpoint) -> None:
        """Load a checkpoint, to evaluate its model; RemoteError if the checkpoint has another model."""
        path = stored.folder.absolute()  # other roles have other working directories
        step, bulk = stored.manifest.step, BULK_TIMEOUT_SECONDS
        calls = [each.call(HostedModule.load, path, step, timeout_seconds=bulk) for each in self.hosted]
        transport.gather([*calls, *self._load_nets(stored, has_state=True)])

    def _load_initial_nets(self, initial: InitialModel, remote_net: transport.RemoteNet | None) -> None:
        if (stored := initial.dense) is None:
            return
        calls = self._load_nets(stored, initial.has_dense_state)
        if remote_net is not None:
            source = stored.folder.absolute(), 0, initial.has_dense_state
            calls.append(remote_net.call(HostedNet.load, *source))
        try:
            transport.gather(calls)
        except transport.RemoteError as error:
            if error.failure.kind == CheckpointError.__name__:
                raise other_net_error(self.config.train.initial, str(error)) from error
            raise

    def _load_nets(self, stored: Checkpoint, has_state: bool) -> list[transport.Pending[None]]:
        dense, calls = load_config(stored.files_folder / CONFIG_FILE, is_stored=True).dense, []
        path, bulk = stored.folder.absolute(), BULK_TIMEOUT_SECONDS
        for index, trainer in enumerate(self.trainers):
            name = dense_file(index - index % self.config.dense.trainers_per_net)
            if dense.ddp != self.config.dense.ddp or name not in stored.manifest.files:
                name = dense_file(0)
            calls.append(trainer.call(Trainer.load, path, name, has_state, timeout_seconds=bulk))
        return calls

    def close(self) -> None:
        """End the background threads of the other roles."""
        transport.gather([each.call(JobObject.close) for each in self._objects])

    def _flush(self) -> None:
        """Wait until the workers have received, but perhaps not applied, the gradients of all steps."""
        transport.gather([trainer.call(Trainer.flush) for trainer in self.trainers], self._meanwhile)

    def _meanwhile(self) -> None:
        self.meanwhile()  # the attribute may change during a wait

    def _on_trainers(
        self, timeout_seconds: float, method: Callable[[Any, *Arguments], Result], *args: *Arguments
    ) -> list[Result]:
        calls = [t.call(method, *args, timeout_seconds=timeout_seconds) for t in self.trainers]
        try:
            return transport.gather(calls, self._meanwhile)
        except ClusterError as error:
            # Trainers that wait for the failed trainer stop waiting.
            for each in self.hosted:
                each.call_barrier(UpdateBarrier.fail, f"the run has failed: {error}")
            raise


class DatasetSession(Session):
    """A session that trains and evaluates on a prepared data set; the base class of ``StreamSession``.

    Creation raises ConfigError or DataError if a held-out split is empty, or a metric or a ranking loss does
    not fit the data.

    Attributes:
        ended_unit: the unit of a stream that has just ended, until the caller sets ``ended_unit`` to "".
        is_delta_due: whether the event time of the last step of a stream makes a delta due.
        steps_per_epoch, total_steps: number of steps of an epoch, and of the run.
        reports: by split, the numbers of rows, invalid rows, labels and unknown values.
        best_auc: the best reachable AUC of the first task on the test samples; None if it is unknown, or
            if metrics are weighted.
        limit: the key that ends the run: train.epochs, train.max_steps, or for a stream data.stream.
    """

    ended_unit = ""
    is_delta_due = False

    def __init__(
        self,
        topology: Topology,
        config: RunConfig,
        data_folder: StoragePath,
        *,
        is_new: bool = True,
        warn: Callable[[str], object] = print,
    ) -> None:
        check_custom_metrics(config.all_tasks)
        datasets = {split: open_split(data_folder, split, config.data) for split in config.data.splits}
        train = datasets[TRAIN]
        for held in config.data.holdouts:
            if not datasets[held.split].num_samples:
                rule = f"leaves no {held.split} rows; raise its fraction, or set {held.key} = none"
                raise ConfigError(held.key, rule, getattr(config.data, held.key.partition(".")[2]))
        check_ranking_losses(config.all_tasks, train, config.train.batch_size)
        self.best_auc = None if config.data.weighted_metrics else datasets[TEST].report.labels[0].best_auc
        self.reports = {split: dataset.report for split, dataset in datasets.items()}
        self.steps_per_epoch = math.ceil(train.num_samples / config.train.batch_size)
        ends = {"train.epochs": self.steps_per_epoch * config.train.epochs}
        if config.train.max_steps:
            ends["train.max_steps"] = config.train.max_steps
        self.limit = min(ends, key=lambda key: ends[key])
        self.total_steps = ends[self.limit]
        super().__init__(
            topology,
            config,
            train.input_spec,
            self.total_steps,
            ids_per_sample=train.ids_per_sample,
            data_folder=data_folder,
            is_new=is_new,
            warn=warn,
        )

    def train(self, steps_before: int, num_steps: int) -> list[TrainerReport]:
        """Take ``num_steps`` steps of an epoch, after ``steps_before`` steps of the run; return reports.

        A session of a stream takes fewer steps if no further rows exist, the unit ends, or a delta is due.
        """
        epoch, first_step = divmod(steps_before, self.steps_per_epoch)
        timeout = self._timeout_seconds(num_steps)
        return self._on_trainers(timeout, Trainer.train, epoch, first_step, num_steps, steps_before)

    @property
    def unit(self) -> StreamUnit | None:
        """The unit of the stream that trainers read; None between two units, and for prepared data."""
        return None

    def is_ready(self, step: int) -> bool:
        """Return whether the rows of step ``step + 1`` exist; a session of a stream may wait for them."""
        return True

    def open_split(self, split: str) -> PreparedDataset:
        """Return a split of the prepared data set."""
        assert self._data_folder is not None
        return open_split(self._data_folder, split, self.config.data)

    def has_rows(self, split: str) -> bool:
        return self.reports[split].num_rows > 0

    def evaluate(self, steps_before: int, split: str = TEST) -> Metrics:
        """Return metrics over all samples of a split, with the model after ``steps_before`` steps."""
        return self.metrics([each for some in self.evaluation(steps_before, split) for each in some])

    def metrics(self, predictions: Sequence[Predictions]) -> Metrics:
        is_weighted = self.config.data.weighted_metrics
        return Predictions.concatenate(predictions).metrics(self.config.all_tasks, is_weighted=is_weighted)

    def evaluation(self, steps_before: int, split: str) -> Iterator[list[Predictions]]:
        """Yield the predictions of all trainers for a split, for several steps at a time."""
        num_steps = math.ceil(self.reports[split].num_rows / self.config.train.batch_size)
        for first in range(0, num_steps, _EVAL_STEPS_PER_CALL):
            count = min(_EVAL_STEPS_PER_CALL, num_steps - first)
            timeout = self._timeout_seconds(count)
            yield self._on_trainers(timeout, Trainer.evaluate, split, first, count, steps_before)

    def load(self, stored: Checkpoint) -> None:
        """Load a checkpoint; DataError if it is of another data set, RemoteError if it has another model."""
        rule = "continue with that version, or start a new run"
        trained_on = DataManifest.read(stored.files_folder / dataset_manifest.COPY_NAME, rule)
        assert self._data_folder is not None
        current = DataManifest.read(self._data_folder / dataset_manifest.FILE_NAME)
        trained_on.check_same(current, "resume with the same files, or start a new run")
        super().load(stored)

    def _timeout_seconds(self, num_steps: int) -> float:
        return (1 + num_steps) * self.config.cluster.timeout_seconds
