"""The interface of custom training loops: one script for a cluster and for one process."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hybrid.checkpoint import checkpoint_folders
from hybrid.checkpoint.checkpoint_folders import BEST, CUSTOM_LOOP, MANIFEST_FILE, Best, Manifest
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.config.data_sections import TEST, TRAIN
from hybrid.config.loading import load_config
from hybrid.custom_loop.backend import BACKEND, Backend, SingleProcess
from hybrid.custom_loop.drawn_negatives import Negatives
from hybrid.custom_loop.embedding_modules import TableModule, plain_copy
from hybrid.custom_loop.local_batches import GROUP, PreparedData, Slicing
from hybrid.custom_loop.loop_state import LoopProgress, Stateful, describe_start, load_progress, pack_state
from hybrid.custom_loop.script_log import ScriptLog
from hybrid.custom_loop.step_states import RESUME
from hybrid.custom_loop.stream_data import StreamData
from hybrid.custom_loop.training_loop import TrainingLoop
from hybrid.data.encode.feature_encoder import FILE_NAME, vocabulary_files
from hybrid.data.prepare.preparation import open_split
from hybrid.engine.hybrid_model import evaluating
from hybrid.errors import CheckpointError, ConfigError, DataError, StorageError
from hybrid.metrics import Metrics, Predictions
from hybrid.storage import files as storage
from hybrid.storage.locked_folders import lock_until_exit
from hybrid.storage.private_files import choose_compile_cache
from hybrid.storage.remote_path import StoragePath, parse_path


def connect(config: str | Path | None = None) -> Cluster:
    """Return the cluster of a script that ``hybrid run`` started; otherwise a cluster of this process only.

    This function seeds torch with ``run.seed``, so all trainers, and a single process, build the same module.

    Args:
        config: TOML file for a single process; None for the default configuration. Under ``hybrid run``, the
            configuration of the run applies instead. A warning follows if its section [data] is different.

    Raises:
        ConfigError: the file is missing or invalid.
    """
    choose_compile_cache()
    backend = BACKEND.get(None) or SingleProcess(load_config(None if config is None else Path(config)))
    of_file = None if config is None or backend.trainer > 0 else load_config(Path(config)).data
    if of_file not in (None, backend.config.data):
        backend.warn(f"the cluster has another section [data] than {config}: start it with --config {config}")
    torch.manual_seed(backend.config.run.seed)
    return Cluster(backend)


class Cluster:
    """The trainers and workers of a custom training loop, from :func:`connect`.

    Attributes:
        rank: index of this trainer, from 0. Trainer 0 prints and logs.
        world_size: number of trainers.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._loop: TrainingLoop | None = None
        # The arguments of `resume`.
        self._root: StoragePath | None = None
        self._objects: Sequence[Stateful] = ()
        self._every_steps = 0
        self._data_source = ""  # location of the data of :meth:`prepare`
        self._stream: StreamData | None = None
        self._num_epochs = 0  # argument of :meth:`epochs`
        self._saved_step = 0  # of the newest checkpoint; 0 if there is none
        self._resumed_step = 0
        self._log: ScriptLog | None = None
        # The best evaluation, and the best evaluation that has a checkpoint.
        self._best: Best | None = None
        self._saved_best: Best | None = None
        self.rank = backend.trainer
        self.world_size = backend.group.size()

    def prepare(self, *splits: str) -> tuple[PreparedData, ...]:
        """Return the samples of each of ``splits``, as the configuration's section [data] describes them.

        All trainers call it together. The files are converted to arrays once, under ``hybrid run`` by the
        master. Each trainer reads its slices of the arrays.

        Args:
            splits: "train", "test" or, if ``data.validation`` is set, "validation"; by default train, test.

        Raises:
            ConfigError: there is no such split, a column is missing, or two columns would have one name.
            DataError, StorageError: the data cannot be read. Under ``hybrid run``, the run may end instead.
        """
        config = self._backend.config
        self._data_source = source = self._backend.prepare_data()
        if missing := {*splits} - {*config.data.splits}:
            rule = f"leaves the splits {', '.join(config.data.splits)}; there is no split {min(missing)!r}"
            raise ConfigError("data.validation", rule, config.data.validation)
        is_shuffled = config.data.is_shuffled
        return tuple(
            PreparedData(open_split(source, split, config.data), config, is_shuffled and split == TRAIN)
            for split in splits or (TRAIN, TEST)
        )

    def stream(self) -> StreamData:
        """Return the rows of the stream in ``data.stream`` (files or a topic), for :meth:`batches`.

        All trainers call it together, before :meth:`resume`. The call waits for rows, and fits the encoding
        of columns on a sample of these rows. Keep the last file that was read: a script that resumes needs
        its rows for this call. Batches have ``train.batch_size`` samples, or fewer at the end of a file.

        Raises:
            ConfigError: the configuration has no stream, a column is missing, or two columns have one name.
            DataError, StorageError: there are no rows, or they cannot be read.
            RuntimeError: the script has already called :meth:`resume`.
        """
        if self._root is not None:
            raise RuntimeError("call cluster.stream() before cluster.resume(...)")
        self._stream = self._stream or StreamData(self._backend, self.print)
        return self._stream

    def distribute(self, module: nn.Module) -> Distributed:
        """Place the tables of ``module`` on the workers, wrap the rest in DDP, and return the module to call.

        All trainers call it together. All replicas get the parameters of trainer 0. All trainers must
        step a ``torch.optim`` optimizer of these parameters together. Before the step, ``train.clip_norm``
        scales the gradients of parameters and tables, and ``train.non_finite`` may drop them.

        Raises:
            ConfigError: a key does not apply to custom loops, or to a table of the module.
            DataError: the module has no tables; a value of its state dict is not a real tensor; or the
                pretrained rows are invalid.
            StorageError: a file of pretrained rows cannot be read.
            RuntimeError: the cluster has already distributed a module, or ``module`` has a distributed table.
        """
        if self._loop is not None:
            raise RuntimeError("a module is already distributed: combine both modules into one")
        self._loop = TrainingLoop(self._backend, module)
        return Distributed(self._loop)

    def batches(
        self,
        data: Any,
        size: int | None = None,
        whole: str | None = None,
        *,
        drop_last: bool = False,
        negatives: Mapping[str, Negatives] | None = None,
    ) -> Iterator[Any]:
        """Yield this trainer's slice of each batch of ``data``; all trainers iterate over the same batches.

        Batches are for training, or under ``torch.no_grad()`` for evaluation. In training, a slice is yielded
        as ``train.micro_batches`` micro-batches, and the pass ends at step ``train.max_steps``. Tensors are
        on the device of the module. A trainer with an empty slice gets a copy of a sample of another
        trainer. :meth:`backward`, :meth:`mean`, :meth:`gather` and :meth:`evaluate` leave out such copies.

        Args:
            data: an iterable of dicts, lists or tuples of tensors, such as a DataLoader; a dict with all
                samples; or a result of :meth:`prepare` or :meth:`stream`. Numbers, texts and None in a
                batch are yielded unchanged. A second loop over a stream continues where the first one ended.
            size: number of samples per batch over all trainers. By default, batches of an iterable keep their
                sizes, a dict is one batch, and prepared data have batches of ``train.batch_size`` samples.
            whole: for ranking losses, the column whose value is equal for all samples of a group, such as a
                session; "group" for prepared data. The samples of a group must be adjacent. A group is not
                split between batches or trainers, so a batch has only about ``size`` samples.
            drop_last: whether to leave out a last batch of fewer than ``size`` samples.
            negatives: items to draw in each step, by the name of the column that gets their ids (N,). The
                column ``NAME.log_q`` gets their values of ``log_q``. Batches must be dicts.

        Raises:
            CheckpointError: the checkpoint at the end of a stream cannot be written.
            ConfigError, StorageError: a later file of a stream lacks a column, or cannot be read.
            DataError: a batch or a file is invalid, or trainers have different batches; or the samples of a
                group are not adjacent, or more than ``size``.
            RuntimeError: a stream is evaluated, read in :meth:`epochs`, or followed by other training data;
                or the script did not complete the step of a batch.
            ValueError: ``size`` is below 1, or missing although ``drop_last`` needs it; or ``data`` is a
                stream, and ``size``, ``whole`` or ``drop_last`` is given.
        """
        if isinstance(data, StreamData):
            if size is not None or whole is not None or drop_last:
                raise ValueError("a stream takes no size, whole and drop_last: set train.batch_size")
            if not torch.is_grad_enabled():
                raise RuntimeError("a stream is read once, to train: evaluate each batch before it trains")
            if self._require_loop().history.now.epoch < self._num_epochs:
                raise RuntimeError("a stream is read once: iterate over it without cluster.epochs")
        if size is not None and size < 1:
            raise ValueError(f"size must be at least 1, not {size}")
        if drop_last and size is None and not isinstance(data, PreparedData):
            raise ValueError("drop_last needs a size; a DataLoader has its own drop_last")
        slicing = Slicing(size, whole, drop_last, self.rank, self.world_size)
        return self._batches(self._require_loop(), data, slicing, negatives or {})

    def _batches(
        self, loop: TrainingLoop, data: Any, slicing: Slicing, negatives: Mapping[str, Negatives]
    ) -> Iterator[Any]:
        now = loop.history.now
        if not torch.is_grad_enabled():
            slices = loop.slices(data, slicing, negatives, now.pass_index, 0)
            yield from loop.evaluation_batches(slices)
            return
        loop.flush()
        if isinstance(data, StreamData):
            yield from self._stream_batches(loop, data, slicing, negatives)
        elif loop.history.begin_pass(data):  # else its steps precede the checkpoint
            slices = loop.slices(data, slicing, negatives, now.pass_index, now.samples)
            yield from loop.training_batches(slices, self._write_if_due)
        else:
            return
        if self._backend.snapshot is not None and loop.remaining_steps == 0:
            self.save(self._backend.snapshot, *loop.optimizers)
            raise SystemExit  # hybrid compare needs no further lines of the script

    def _stream_batches(
        self, loop: TrainingLoop, stream: StreamData, slicing: Slicing, negatives: Mapping[str, Negatives]
    ) -> Iterator[Any]:
        loop.history.begin_stream()
        stream.pause(loop.step)  # the script may have left an earlier pass
        before_wait = partial(self._write_if_due, is_waiting=True)
        try:
            while loop.remaining_steps != 0 and stream.open(loop.step, before_wait):
                slices = loop.slices(stream, slicing, negatives, 0, 0)
                yield from loop.training_batches(slices, self._write_if_due)
                if loop.remaining_steps != 0:
                    stream.advance_to(loop.step)
        finally:
            stream.close()
        self._write_if_due(is_last=True)
        if loop.remaining_steps != 0:
            stream.end()

    def backward(
        self, values: Tensor, weights: Tensor | None = None, more: Sequence[tuple[Tensor, Tensor | None]] = ()
    ) -> None:
        """Compute the gradients of the mean loss over the batch of all trainers.

        Gradients of parameters are stored in ``grad``; gradients of tables are sent to the workers. With
        ``train.micro_batches``, call it for each micro-batch; the last call of a step sets ``grad``.

        Args:
            values: loss of each sample of this trainer's slice, (samples,).
            weights: weight of each sample, not negative, for a weighted mean.
            more: other losses, each with its weights or None. The means of all losses are added.

        Raises:
            ConfigError: there are weights, and ``train.micro_batches`` is not 1.
            DataError: the number of values or weights is not the number of samples, or a weight is invalid.
            NonFiniteError: the loss is not finite, and ``train.non_finite`` is "stop".
            RuntimeError: the script has no batch, or has already called this method for it; or the loss does
                not depend on the module. On a cluster, it must depend on each trained parameter.
        """
        self._require_loop().backward([(values, weights), *more])

    def mean(self, values: Tensor) -> float:
        """Return the mean over the values of all trainers; NaN if there are none. All trainers call it.

        Args:
            values: of any shape. If the first dimension has the samples of this trainer's last slice, or of
                all slices that the same loop has yielded, copies of samples (:meth:`batches`) are left out.
        """
        values = self._require_loop().pass_sizes.without_padding(values)
        sums = torch.tensor([values.detach().double().sum().item(), values.numel()], dtype=torch.float64)
        total, count = self._require_loop().trainers.sum(sums).tolist()
        return total / count if count else math.nan

    def gather(self, values: Tensor) -> Tensor:
        """Concatenate the values of all trainers, (samples, ...), on the CPU. All trainers call it.

        Copies of samples are left out, as in :meth:`mean`. A tensor that requires gradients stays on its
        device, for losses that compare samples of all trainers. Every trainer must then use the result in its
        loss: the gradient of the tensor is the sum over all trainers.

        Raises:
            DataError: ``values`` is a scalar.
        """
        loop = self._require_loop()
        return loop.trainers.gather(loop.pass_sizes.without_padding(values))

    def evaluate(self, data: Any, size: int | None = None) -> Metrics:
        """Compute the metrics of configured runs over the samples of ``data``; all trainers call it together.

        The module is called with each batch, in evaluation mode and without gradients. It must return outputs
        (samples,) or (samples, outputs), in the order of the sections [tasks.NAME]. Without such sections,
        there is one task ``label`` with binary labels and logits as outputs. After :meth:`resume`, the
        checkpoint of the best evaluation is kept; ``checkpoint.keep_best`` names the metric. If a restarted
        script repeats an evaluation from before the checkpoint, the recorded result is returned.

        Args:
            data, size: see :meth:`batches`. A batch is a dict with a column of labels for each task. The
                columns ``TASK.weights`` and ``group`` are optional.

        Raises:
            ConfigError: a custom metric fails.
            DataError: there are no samples, or no labels.
        """
        loop = self._require_loop()
        if loop.has_batch or not loop.history.is_recorded:  # a script that resumes does not repeat the call
            return self._evaluate(loop, data, size)
        metrics = loop.history.known_evaluation() or self._evaluate(loop, data, size)
        loop.history.now.evaluations += (dict(metrics),)
        return metrics

    def _evaluate(self, loop: TrainingLoop, data: Any, size: int | None) -> Metrics:
        tasks = self._backend.config.all_tasks
        parts = []
        net, outer = loop.model.net, loop.pass_sizes
        with evaluating(net):
            for batch in self.batches(data, size):
                if missing := [name for name in tasks if name not in batch]:
                    raise DataError(f"evaluate: the batch has no column {missing[0]!r} with labels")
                labels_BT = torch.stack([batch[name] for name in tasks], 1).float()
                ones_B = torch.ones_like(labels_BT[:, 0])
                weights = [batch.get(f"{name}.weights", ones_B).float() for name in tasks]
                groups = [batch[GROUP]] if GROUP in batch else []
                parts.append([net(batch), labels_BT, torch.stack(weights, 1), *groups])
        if not parts:
            raise DataError("evaluate: the data have no batch")
        outputs, *rest = (self.gather(torch.cat(each)) for each in zip(*parts, strict=True))
        loop.pass_sizes = outer
        hashes = torch.arange(len(outputs))  # distinct, so no samples count as equal
        outputs = outputs[:, 0] if outputs.shape[1:] == (1,) else outputs
        predictions = Predictions(outputs, rest[0], hashes, *rest[1:])
        metrics = predictions.metrics(tasks, is_weighted=self._backend.config.data.weighted_metrics)
        if self._root is not None:  # a checkpoint of the best evaluation follows before the next step
            by = self._backend.config.best_by
            self._best = checkpoint_folders.choose_best(self._best, by, metrics, loop.step)
        return metrics

    def resume(self, folder: str | StoragePath, *objects: Stateful, every_steps: int = 1000) -> None:
        """Continue from the newest checkpoint in a run folder, if any, and write further checkpoints.

        Call it before the first step. Checkpoints are written every ``every_steps`` steps, after the best
        evaluation, before a long wait for a stream's rows, and at the end of a stream or of :meth:`epochs`
        (unless ``break`` leaves the loop). A failed write is an error at the end, and a warning elsewhere.
        The last ``checkpoint.keep_last`` checkpoints are kept. :meth:`batches` skips the batches before the
        checkpoint, so restarted and uninterrupted scripts have bit-identical results. ``hybrid run``
        restarts the script if a process dies. ``hybrid compare`` ignores this call.

        Args:
            folder: on storage that all hosts share.
            objects: optimizers of the module, schedulers, and other objects with ``state_dict()``.

        Raises:
            CheckpointError: the checkpoint has another model, data or objects; all checkpoints are damaged;
                or ``folder`` is itself a checkpoint.
            ConfigError: another run uses the folder, or the folder cannot be created.
            DataError: a checkpoint cannot store the state of an object, or a file of the stream has changed.
            RuntimeError: the script has already called :meth:`resume`, or has begun the first step.
            ValueError: ``every_steps`` is below 1.
        """
        if every_steps < 1:
            raise ValueError(f"every_steps must be at least 1, not {every_steps}")
        loop, root = self._require_loop(), parse_path(folder)
        start = describe_start(loop.model.net, objects, self.world_size)
        loop.advance(RESUME)
        if self._backend.snapshot is not None:
            return  # hybrid compare runs the first steps of the script
        if self.rank == 0 and isinstance(root, Path):
            lock_until_exit(root.absolute(), "cluster.resume")
        self._backend.enable_restart(root)
        self._root, self._objects, self._every_steps = root, objects, every_steps
        history = loop.history
        history.is_recorded = True
        history.now.start = start
        step = -1
        if self.rank == 0:
            if storage.exists(root / MANIFEST_FILE):
                rule = "is a checkpoint; resume in another folder, and load this one by cluster.load"
                raise CheckpointError(f"{root}: {rule}")
            if checkpoint_folders.list_checkpoints(root):
                step = Checkpoint.newest_valid(root, self._backend.warn).manifest.step
                checkpoint_folders.remove_after(root, step)
        step = int(loop.trainers.gather(torch.tensor([step]))[0])
        if step < 0:
            return
        stored = Checkpoint.open(checkpoint_folders.step_folder(root, step))
        self._saved_step = self._resumed_step = step
        self._best = self._saved_best = stored.manifest.best
        history.resume(self._load(stored, objects), str(stored.folder))
        if self._stream is not None:
            self._stream.restore(stored)
        self.print(f"resuming from step {step}: {stored.folder}")

    def log(self, values: Mapping[str, float | Tensor]) -> None:
        """Record numbers of the current step in ``metrics.jsonl`` in the folder of :meth:`resume`.

        The loggers that the configuration names (``loggers`` in section [cluster]) also get the numbers. Only
        trainer 0 records its values. A restarted script does not record the values of a step twice.

        Raises:
            RuntimeError: the script has not called :meth:`resume`.
            ValueError: a value has the name of a field of all records, such as ``step``.
            ConfigError: the folder is in an object store, or a logger cannot be loaded.
            OSError: the file cannot be written.
        """
        loop, backend = self._require_loop(), self._backend
        if self.rank > 0 or backend.snapshot is not None:
            return
        if self._root is None:
            raise RuntimeError("call cluster.resume(folder) first: cluster.log writes into this folder")
        if self._log is None:
            if not isinstance(self._root, Path):
                rule = "must be a local folder, since a store cannot append the lines of cluster.log"
                raise ConfigError("cluster.resume", rule, str(self._root))
            self._log = ScriptLog(self._root, backend.config, self._resumed_step, backend.warn)
            if backend.is_single_process:
                weakref.finalize(self, self._log.finish)
            backend.logs.append(self._log)
        with torch.no_grad():
            numbers = {name: float(value) for name, value in values.items()}
        self._log.append(loop.step, numbers, loop.history.is_replaying)

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs from 0 to ``count`` - 1. A resumed script begins with the checkpoint's epoch.

        The loop ends early at ``train.max_steps``. After :meth:`resume`, a checkpoint is written at the end.

        Raises:
            CheckpointError: the last checkpoint cannot be written.
        """
        loop, self._num_epochs = self._require_loop(), count
        first_epoch = loop.history.before.epoch
        if first_epoch >= count > 0:
            done = f"all {count} epoch(s) are done at step {loop.step}"
            rule = "raise their number, or choose another folder to start anew"
            self.print(f"{self._root}: {done}; {rule}")
        for epoch in range(first_epoch, count):
            if loop.remaining_steps == 0:
                break
            loop.history.begin_epoch(epoch)
            if epoch > first_epoch:
                self._write_if_due()
            yield epoch
        if loop.remaining_steps != 0:  # else a longer run can continue in the pass
            loop.history.begin_epoch(count)
        self._write_if_due(is_last=True)

    def _write_if_due(self, *, is_last: bool = False, is_waiting: bool = False) -> None:
        """Write a checkpoint of this step if :meth:`resume` or an argument requires it; remove old ones.

        A failed write causes a warning, or a CheckpointError if ``is_last``.
        """
        step = self.step
        if self._root is None or step == self._saved_step:
            return
        is_best = self._best is not None and self._best.step == step
        if not (is_last or is_waiting or is_best or step % self._every_steps == 0):
            return
        try:
            self._save(checkpoint_folders.step_folder(self._root, step), self._objects, self._best)
        except CheckpointError as error:  # raised on all trainers
            failure = f"no checkpoint of step {step}: {error}"
            if is_last:
                raise CheckpointError(f"{failure}; a restart resumes at step {self._saved_step}") from error
            if self.rank == 0:
                self._backend.warn(f"{failure}; training continues")
            self._best = self._saved_best
            return
        self._saved_step, self._saved_best = step, self._best
        if self.rank == 0:
            keep_last = self._backend.config.checkpoint.keep_last
            try:
                checkpoint_folders.prune(self._root, keep_last, self._best and self._best.step)
            except (CheckpointError, StorageError) as error:
                self._backend.warn(f"an old checkpoint could not be removed: {error}")

    def save(self, folder: str | StoragePath, *objects: Stateful) -> None:
        """Write a checkpoint of tables, module and optimizers. All trainers call it between two steps.

        Args:
            folder: a new folder, on storage that all hosts share.
            objects: optimizers of the module, schedulers, and other objects with ``state_dict()``.

        Raises:
            CheckpointError: the folder exists or cannot be written; no partial checkpoint remains. In a
                resumed script, an existing checkpoint of the same step is kept without an error.
            DataError: the state of an object has a value that a checkpoint cannot store.
            RuntimeError: a step is incomplete: ``optimizer.step()`` has not followed :meth:`backward`.
        """
        self._save(parse_path(folder), objects)

    def _save(self, folder: StoragePath, objects: Sequence[Stateful], best: Best | None = None) -> None:
        loop, manifest_path = self._require_loop(), folder / MANIFEST_FILE
        loop.flush()
        is_resumed = loop.history.before != LoopProgress()
        if is_resumed and storage.exists(manifest_path) and Manifest.read(manifest_path).step == loop.step:
            return  # a role was lost after this save, and the script repeats it
        loop.is_saving = True
        try:
            dense, progress = pack_state(loop.model.net, objects, loop.history.now)
        finally:
            loop.is_saving = False
        progress |= {CUSTOM_LOOP: True, BEST: best}
        if self._stream is not None:
            progress |= self._stream.progress(loop.step)
        manifest = Manifest(loop.step, 0, loop.placed.placement.shapes, progress=progress)
        self._backend.save(loop.placed.module_index, folder, manifest, dense)

    def load(self, folder: str | StoragePath, *objects: Stateful) -> None:
        """Load a checkpoint, written by any number of trainers and workers; all trainers call it.

        Leave a loop over training batches after this call: the next batch of the loop raises RuntimeError.

        Args:
            objects: the same objects as for :meth:`save`, in the same order, or none.

        Raises:
            CheckpointError: the checkpoint has another model, other objects or other data, or is damaged.
            RuntimeError: a step is incomplete: ``optimizer.step()`` has not followed :meth:`backward`.
        """
        stored = Checkpoint.open(parse_path(folder))
        damage = ""
        if self.rank == 0:
            try:
                stored.manifest.verify(stored.files_folder)
            except CheckpointError as error:
                damage = str(error)
        if damage := self._require_loop().trainers.gather_json(damage)[0]:
            raise CheckpointError(damage)
        self._load(stored, objects)
        if self._stream is not None:
            self._stream.scale_as(stored)

    def _load(self, stored: Checkpoint, objects: Sequence[Stateful]) -> LoopProgress:
        loop = self._require_loop()
        tables, shapes = stored.manifest.tables, loop.placed.placement.shapes
        if tables.keys() != shapes.keys():
            raise CheckpointError(
                f"{stored.folder}: the checkpoint is of another model, with the tables "
                f"{', '.join(sorted(tables))}, not {', '.join(sorted(shapes))}"
            )
        if self._data_source and storage.exists(stored.files_folder / FILE_NAME):
            files = map(vocabulary_files, (stored.files_folder, parse_path(self._data_source)))
            if len({tuple(each) for each in files}) > 1:
                rule = "the prepared data have other values, or in another order, than the rows of the tables"
                raise CheckpointError(f"{stored.folder}: {rule}; prepare the data of that script")
        loop.flush()
        if self._stream is not None:
            self._stream.pause(loop.step)
        progress = load_progress(loop.model.net, objects, stored)
        self._backend.load(loop.placed.module_index, stored)
        loop.continue_from(stored.manifest.step)
        return progress

    def plain_module(self) -> nn.Module:
        """Return a copy of the module in which ``nn.Embedding`` and ``nn.EmbeddingBag`` hold all rows.

        The copy is on the CPU. You can save, export or serve it in plain PyTorch, without this package.

        Raises:
            RuntimeError: a table grows. Use :meth:`save` and :func:`hybrid.load` instead.
        """
        loop = self._require_loop()
        for table in loop.model.net.modules():
            if isinstance(table, TableModule) and table.growth is not None:
                rule = "call cluster.save(folder), and hybrid.load(folder, module)"
                raise RuntimeError(f"table {table.name} grows, which plain_module() does not copy: {rule}")
        return plain_copy(loop.model.net, loop.rows)

    @property
    def step(self) -> int:
        """Number of steps taken, including the steps before a loaded checkpoint."""
        return self._require_loop().step

    def print(self, *values: object) -> None:
        """Print on trainer 0 only."""
        if self.rank == 0:
            print(*values, flush=True)

    @property
    def device(self) -> torch.device:
        """Device of the module, and of the tensors of its batches."""
        return self._require_loop().device

    def _require_loop(self) -> TrainingLoop:
        if self._loop is None:
            raise RuntimeError("distribute the module first: model = cluster.distribute(model)")
        return self._loop


class Distributed(nn.Module):
    """The module that :meth:`Cluster.distribute` returns; it has all attributes of the script's module."""

    module: Any  # the script's module

    def __init__(self, loop: TrainingLoop) -> None:
        super().__init__()
        self.module = loop.model.net
        self._loop = loop

    def forward(self, *args: Any, **keywords: Any) -> Any:
        """Call the module. On a cluster, the call passes through DDP if gradients are enabled."""
        inputs = args[0] if len(args) == 1 and not keywords else None
        module = self._loop.module_to_call(inputs) if torch.is_grad_enabled() else self.module
        return module(*args, **keywords)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)
