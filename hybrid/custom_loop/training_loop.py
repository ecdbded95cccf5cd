"""The steps of one trainer, driven by the loop of a script.

::

    next batch        send the lookups of the calls that earlier passes made
    model(batch)      a call of a table takes its vectors; other ids are looked up now
    cluster.backward  the weighted mean over all trainers; gradients are sent to the tables
    optimizer.step    a pre-hook of torch lets all trainers decide on the step first
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import reduce
from itertools import islice
from operator import add
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hybrid.checkpoint.checkpoint_folders import BEST, Best
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.custom_loop.backend import Backend
from hybrid.custom_loop.embedding_modules import TableCall, TableModule
from hybrid.custom_loop.local_batches import (
    GROUP,
    LocalBatch,
    PreparedData,
    global_batches,
    local_batches,
    tensors_of,
)
from hybrid.custom_loop.loop_state import LoopCheckpoints, Position, Stateful, load_progress, pack_state
from hybrid.custom_loop.loop_warnings import LoopWarnings
from hybrid.custom_loop.trainer_group import TrainerGroup
from hybrid.dense.devices import choose_devices
from hybrid.dense.net_builder import batch_norm_warning
from hybrid.embedding.trainer.embeddings import ModuleTables, TableRequest
from hybrid.embedding.trainer.lookup import Lookup
from hybrid.engine.ddp import DensePlacement
from hybrid.engine.hybrid_model import MicroBatch, to_device
from hybrid.engine.losses import weighted_summand
from hybrid.engine.step_engine import StepEngine, seed_step
from hybrid.errors import CheckpointError, ConfigError, DataError
from hybrid.metrics import Metrics, Predictions
from hybrid.primitives.step_timings import StepClock
from hybrid.protocol.ticket import Purpose, Ticket
from hybrid.protocol.update_rules import UpdateMode
from hybrid.server.barrier import UpdateBarrier
from hybrid.storage.remote_path import StoragePath

_ROWS_PER_LOOKUP = 1 << 16
# Seeds the random numbers that all trainers draw alike; no trainer has this rank.
_ALL_TRAINERS = 1 << 32
# More lookups than a step has: the number is not known before its last micro-batch.
_UNKNOWN = 1 << 30


@dataclass
class ForwardPass:
    """A forward pass that is running.

    Attributes:
        micro: the micro-batch in training; None otherwise.
        batch: the batch of the pass; None for a call without a batch.
        ticket: ticket of its lookups.
        prefetched: the lookup that was sent before the pass; None after its vectors are used.
        vectors: calls and their vectors, by key.
        lookups: lookups whose vectors were used.
        zeros: the zero output of each of ``lookups``; see :meth:`ModuleTables.lookup`.
        is_backward_done: whether ``cluster.backward`` was called.
    """

    micro: MicroBatch[LocalBatch] | None
    batch: LocalBatch | None
    ticket: Ticket
    prefetched: Lookup | None = None
    vectors: dict[object, tuple[TableCall, Tensor]] = field(default_factory=dict)
    lookups: list[Lookup] = field(default_factory=list)
    zeros: list[Tensor] = field(default_factory=list)
    is_backward_done: bool = False


class TrainingLoop:
    """The steps of one trainer.

    Args:
        backend: holds the tables and knows the other trainers.
        net: the script's module; its tables are bound to this loop.

    Attributes:
        model: the module under DDP, and its gradients.
        trainers: all trainers.
        device: device of the module.
        is_saving: whether a checkpoint is reading the state dict of the module.
    """

    def __init__(self, backend: Backend, net: nn.Module) -> None:
        self._backend = backend
        self._config = config = backend.config
        devices = choose_devices(config.dense, backend.trainer)
        self.device = devices[0]
        clock = StepClock()
        self._warnings = LoopWarnings(backend)
        modules = {name: module for name, module in net.named_modules() if isinstance(module, TableModule)}
        if not modules:
            raise DataError(
                f"{type(net).__name__} has no hybrid.Embedding or hybrid.EmbeddingBag, so it needs no cluster"
            )
        bytes_per_value = 8 if config.train.dtype == "float64" else 4
        specs = [module.spec(name, bytes_per_value) for name, module in modules.items()]
        for spec in specs:
            if spec.optimizer.all_rows and config.train.update == "async":
                rule = f"must be sync or lookahead, since each step updates all rows of table {spec.name}"
                raise ConfigError("train.update", rule, "async")
        placed = backend.place_tables(specs)
        self._barriers = list(placed.workers.values())
        self._widths = {spec.dim for spec in specs}
        self._shapes = placed.placement.shapes
        self._rules = placed.rules
        self._tables = ModuleTables(specs, placed.placement, placed.workers, clock)
        self._modules = list(modules.values())
        for name, module in modules.items():
            module.bind(name, self)
        net.to(self.device)
        is_alone = backend.is_single_process
        if not is_alone and (message := batch_norm_warning(net, config)):
            self._warnings.warn(message)
        self._engine = StepEngine[LocalBatch](
            config,
            backend.trainer,
            backend.group,
            placed.rules,
            self._tables,
            placed.workers,
            None,
            net,
            DensePlacement(backend.group),
            devices,
            clock,
            is_single_process=is_alone,
        )
        self.model = self._engine.model
        self.trainers = TrainerGroup(backend.group, self._engine.device)
        # The running pass of each kind.
        self._training: ForwardPass | None = None
        self._evaluation: ForwardPass | None = None
        self._num_lookups = 0  # with gradients, in the micro-batches of the step so far
        # Factor of the step's gradients, once decided; None to skip the step.
        self._scale: float | None = None
        self._stepped_optimizers: set[int] = set()  # ids of the optimizers that have taken the step
        self._optimizers: weakref.WeakKeyDictionary[torch.optim.Optimizer, None]  # in the order of first use
        self._optimizers = weakref.WeakKeyDictionary()
        self._run: LoopCheckpoints | None = None
        self._position = Position()
        self._is_in_pass = False
        self._sent_step = -1  # the last step with gradients on their way to the tables
        self.is_saving = False
        self._is_in_backward = False
        loop = weakref.ref(self)  # hooks of parameters and optimizers must not keep it alive

        def after_gradient(_: Tensor) -> None:
            if (found := loop()) is not None:
                found._require_cluster_backward()

        def before_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
            if (found := loop()) is not None:
                found.before_optimizer_step(optimizer)

        for parameter in net.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(after_gradient)
        weakref.finalize(self, register_optimizer_step_pre_hook(before_step).remove)

    @property
    def step(self) -> int:
        """Number of steps taken."""
        return self._engine.step

    def epochs(self, count: int) -> Iterator[int]:
        """See :meth:`Cluster.epochs`."""
        resumed = self._run.resumed if self._run is not None else Position()
        for epoch in range(resumed.epoch, count):
            if self._has_ended:
                break
            self._end_pass()
            first = self._position.pass_index
            if epoch == resumed.epoch:
                first = max(first, resumed.first_pass)
            self._position = Position(epoch, first, first)
            if epoch > resumed.epoch:
                self._save_if_due()
            yield epoch
        if not self._has_ended:  # else a longer run can continue in the pass
            self._end_pass()
            self._position = self._position._replace(epoch=count, first_pass=self._position.pass_index)
        self._save_if_due(is_last=True)

    def batches(self, data: Any, size: int | None, whole: str | None) -> Iterator[Any]:
        """Yield this trainer's slice of each batch, for training, or for evaluation under ``no_grad``."""
        if torch.is_grad_enabled():
            with closing(self._training_batches(data, size, whole)) as batches:
                yield from batches
            return
        outer = self._evaluation
        try:
            for batch in self._local_batches(data, size, whole, self._position.pass_index, 0):
                ticket = self._evaluation_ticket()
                prefetched = self._tables.lookup(batch.sparse_features, ticket) if batch.calls else None
                self._evaluation = ForwardPass(None, batch, ticket, prefetched)
                yield batch.values
        finally:
            self._evaluation = outer

    def _local_batches(
        self, data: Any, size: int | None, whole: str | None, index: int, first: int
    ) -> Iterator[LocalBatch]:
        """Yield the slices of pass number ``index``, from batch ``first`` on."""
        trainer, num_trainers = self._backend.trainer, self._backend.group.size()
        if isinstance(data, PreparedData):
            split = trainer, num_trainers, size, self._modules, whole
            return data.local_batches(*split, epoch=index, first_step=first)
        batches = islice(self._seeded(global_batches(data, size, whole), index), first, None)
        checked = self.trainers.check_batches(batches)
        return local_batches(checked, trainer, num_trainers, self._modules, whole)

    def _seeded(self, batches: Iterator[Any], index: int) -> Iterator[Any]:
        """Yield batches whose random numbers depend on their position only, and are alike on all trainers."""
        for number in itertools.count():
            seed_step(self._config.run.seed, _ALL_TRAINERS + index, number, ())
            if (batch := next(batches, None)) is None:
                return
            yield batch

    def _training_batches(self, data: Any, size: int | None, whole: str | None) -> Generator[Any, None, None]:
        self._flush()
        self._end_pass()
        resumed = self._run.resumed if self._run is not None else Position()
        index = self._position.pass_index
        if index < resumed.pass_index:  # its steps precede the checkpoint
            self._position = self._position._replace(pass_index=index + 1)
            return
        first = resumed.steps if index == resumed.pass_index else 0
        current: ForwardPass | None = None
        self._position, self._is_in_pass = self._position._replace(steps=first), True
        self._engine.begin(self._local_batches(data, size, whole, index, first), self.step)
        max_steps = self._config.train.max_steps
        remaining = max(0, max_steps - self.step) if max_steps else None
        try:
            for step_input in self._engine.steps(remaining, self._save_if_due):
                step, self._num_lookups = self.step, 0
                for micro in step_input.micro_batches:
                    self._stepped_optimizers.clear()
                    purpose = Purpose.TRAIN if self._rules.mode is UpdateMode.SYNC else Purpose.PREFETCH
                    ticket = micro.ticket._replace(purpose=purpose)
                    with self._engine.recording(micro):
                        lookup: Any = micro.start()
                        self._training = current = ForwardPass(micro, micro.batch, ticket, lookup)
                        yield micro.batch.values
                    is_over = self.step == step + 1 if micro.is_last else current.is_backward_done
                    if not is_over:
                        missing = "optimizer.step()" if current.is_backward_done else "cluster.backward(...)"
                        raise RuntimeError(
                            f"{missing} was not called for the batch of step {step}; each batch takes one "
                            "step. To evaluate, iterate under torch.no_grad()"
                        )
                self._position = self._position._replace(steps=self._position.steps + 1)
            if not self._has_ended:
                self._end_pass()
            elif self._backend.snapshot is not None:
                self.save(self._backend.snapshot, [*self._optimizers])
                self._backend.snapshot = None
        finally:
            if self._training is current:  # an interrupted loop may end after the next one has begun
                self._training = None

    @property
    def _has_ended(self) -> bool:
        """Whether ``train.max_steps`` are taken."""
        max_steps = self._config.train.max_steps
        return bool(max_steps) and self.step >= max_steps

    def _flush(self) -> None:
        """Wait until the workers have all gradients.

        Raises:
            RuntimeError: the loop was left within a step.
        """
        if self._sent_step == self.step:
            raise RuntimeError(
                f"the loop was left after cluster.backward(...) of step {self.step}, which has updated the "
                "tables only: distribute a new module"
            )
        self._engine.feed.flush(self.step)

    def _end_pass(self) -> None:
        """Move on to the next pass, if one has begun, whether it came to its end or was left."""
        if self._is_in_pass:
            self._position = self._position._replace(pass_index=self._position.pass_index + 1, steps=0)
            self._is_in_pass = False

    def _save_if_due(self, *, is_last: bool = False) -> None:
        if self._run is not None:
            self._run.write_if_due(self.step, self._position, is_last=is_last)

    def _evaluation_ticket(self) -> Ticket:
        return Ticket(self._backend.trainer, self.step, self.step, purpose=Purpose.PREDICT)

    def vectors(self, call: TableCall) -> Tensor:
        """Return the vectors of a call of a table, (ids or bags, D), on the device."""
        current = self._training if torch.is_grad_enabled() else self._evaluation
        if current is None:
            if torch.is_grad_enabled():
                raise RuntimeError(
                    "a module with tables trains on the batches of cluster.batches(...); call it on other "
                    "tensors under torch.no_grad()"
                )
            current = ForwardPass(None, None, self._evaluation_ticket())
        self._use_prefetched(current)
        if call.key not in current.vectors:
            part = current.ticket.part
            if current is self._training:  # prefetched lookups are the first parts of the step
                extra = self._num_lookups + len(current.lookups) - part - 1
                part = self._rules.parts + extra
            lookup = self._tables.lookup([call.module.request(call)], current.ticket._replace(part=part))
            (vectors,) = self._outputs(current, lookup)
            current.vectors[call.key] = call, vectors
            if current is self._training and call.ids.numel():
                self._warnings.warn(
                    f"table {call.module.name} is called with ids that are not looked up before the module "
                    "runs. Each such call waits for a separate request. For speed, put the ids into the "
                    'batch and name their column, as in hybrid.Embedding(..., ids="user")'
                )
        return to_device(current.vectors[call.key][1], self.device)

    def _use_prefetched(self, current: ForwardPass) -> None:
        """Wait for the prefetched lookup of a pass, unless its vectors are already used."""
        if current.prefetched is not None:
            assert current.batch is not None
            vectors = self._outputs(current, current.prefetched)
            for call, vectors_of_call in zip(current.batch.calls, vectors, strict=True):
                current.vectors[call.key] = call, vectors_of_call
            current.prefetched = None

    def _outputs(self, current: ForwardPass, lookup: Lookup) -> Sequence[Tensor]:
        """Wait for the vectors of a lookup of a pass."""
        *vectors, zero = lookup.outputs()
        current.lookups.append(lookup)
        current.zeros.append(zero)
        if zero.grad_fn is not None:
            zero.grad_fn.register_prehook(self._require_cluster_backward)
        return vectors

    def rows(self, module: TableModule) -> Tensor:
        """Return all rows of a table, (rows, D), as they are now."""
        ticket = self._evaluation_ticket()
        blocks = torch.arange(module.num_embeddings).split(_ROWS_PER_LOOKUP)
        requests = ([TableRequest(module.name, ids)] for ids in blocks)
        return torch.cat([self._tables.lookup(request, ticket).outputs()[0] for request in requests])

    def backward(self, terms: Sequence[tuple[Tensor, Tensor | None]]) -> None:
        """Compute the gradients of the sum of weighted means over all trainers' samples.

        Args:
            terms: values and weights of each mean; see :meth:`Cluster.backward`.
        """
        current = self._training
        if current is None or current.batch is None or current.micro is None:
            raise RuntimeError("cluster.backward(...) takes the loss of a batch of cluster.batches(...)")
        if current.is_backward_done:
            raise RuntimeError(f"cluster.backward(...) is called again for the batch of step {self.step}")
        if self._rules.parts > 1 and any(weights is not None for _, weights in terms):
            rule = "must be 1 for a loss with weights, whose sum is known only after the last micro-batch"
            raise ConfigError("train.micro_batches", rule, self._rules.parts)
        local_loss = self._local_loss(terms, current.batch)
        parameters = list(self.model.net.parameters())
        if self.step == 0:
            tensors = tensors_of(current.batch.values)
            shapes = [each.shape for each in parameters] + [each.shape[1:] for each in tensors]
            self._warnings.check_pairs(local_loss, current.batch.size, self._widths.union(*shapes))
        # The workers wait for the gradients of every lookup, even if the module called no table.
        self._use_prefetched(current)
        loss = local_loss + torch.stack(current.zeros).sum().to(local_loss)
        self._num_lookups += len(current.lookups)
        self._announce_lookups(current.micro)
        for parameter in parameters:
            parameter.grad = None
        self._sent_step = self.step
        self._is_in_backward = True
        try:
            self._engine.backward(loss)
        finally:
            self._is_in_backward = False
        current.is_backward_done = True
        if not current.micro.is_last:
            return
        for trainable, gradient in self.model.gradients.items():
            trainable.grad = gradient
        self._warnings.note_gradients(self.model.gradients.values())
        if not any(parameter.requires_grad for parameter in parameters):
            self._scale = self._engine.decide()  # no optimizer calls the hook

    def _announce_lookups(self, micro: MicroBatch[LocalBatch]) -> None:
        """Send the number of the step's lookups to the workers, unless it is that of its micro-batches."""
        if self._num_lookups == micro.ticket.part + 1:
            return
        parts = self._num_lookups if micro.is_last else _UNKNOWN
        arguments = (self._backend.trainer, self.step, parts)
        for call in [each.call_barrier(UpdateBarrier.expect, *arguments) for each in self._barriers]:
            call.wait()

    def _require_cluster_backward(self, *_: object) -> None:
        """Raise if ``cluster.backward`` did not start the running backward pass."""
        if not self._is_in_backward:
            raise RuntimeError(
                "loss.backward() does not train a distributed module: call cluster.backward(loss) with one "
                'loss value per sample (reduction="none"). It takes the mean over the batch of all trainers, '
                "and sends the gradients of the tables to the workers"
            )

    def _local_loss(self, terms: Sequence[tuple[Tensor, Tensor | None]], batch: LocalBatch) -> Tensor:
        """Return this trainer's summand of the sum of means over the global batch.

        Raises:
            DataError: there is not one value, or weight, per sample; or a weight is negative or not finite.
        """
        summands = []
        for values, weights in terms:
            values_B = values.reshape(-1)
            if values.dim() == 0 or len(values_B) != batch.size:
                raise DataError(
                    f"cluster.backward takes one loss value per sample, ({batch.size},), not "
                    f'{list(values.shape)}: use reduction="none". For a loss over pairs of samples, use '
                    "cluster.gather(vectors)"
                )
            if weights is not None:
                weights_B = weights.reshape(-1).to(values_B)
                if len(weights_B) != batch.size or not (weights_B.isfinite() & (weights_B >= 0)).all():
                    raise DataError("cluster.backward takes one weight per sample, finite and not negative")
                total = self.trainers.sum(weights_B.sum().double()).item()
                summands.append(weighted_summand(values_B, weights_B, total))
            elif batch.size:
                # A mean, not a sum over a size: with one trainer it has the bits of torch's mean.
                summands.append(values_B.mean() * (batch.size / batch.global_size))
            else:
                summands.append(values_B.sum())
        return reduce(add, summands)

    def before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Scale or drop the gradients that an optimizer of the module's parameters is about to use.

        Raises:
            RuntimeError: the optimizer has no gradients of a new batch.
        """
        module_ids = {id(parameter) for parameter in self.model.net.parameters()}
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if not any(id(parameter) in module_ids for parameter in parameters):
            return
        current = self._training
        is_ready = current is not None and current.is_backward_done
        if current is None or not is_ready or id(optimizer) in self._stepped_optimizers:
            raise RuntimeError("optimizer.step() comes after cluster.backward(...), once for each batch")
        assert current.micro is not None
        if not current.micro.is_last:
            self._scale = None
        elif not self._stepped_optimizers:
            self._warnings.check_gradients(p.grad for p in self.model.gradients)
            self._scale = self._engine.decide()
        self._warnings.check_learning_rate(optimizer)
        self._stepped_optimizers.add(id(optimizer))
        self._optimizers[optimizer] = None
        for parameter in parameters:
            if self._scale is None:
                parameter.grad = None
            elif self._scale != 1.0 and parameter.grad is not None:
                parameter.grad = parameter.grad * self._scale

    def evaluate(self, data: Any, size: int | None) -> Metrics:
        """See :meth:`Cluster.evaluate`."""
        net, tasks, parts = self.model.net, self._config.all_tasks, []
        modes = [(module, module.training) for module in net.modules()]
        net.eval()
        try:
            with torch.no_grad():
                for batch in self.batches(data, size, None):
                    if missing := [name for name in tasks if name not in batch]:
                        raise DataError(f"evaluate: the batch has no column {missing[0]!r} with labels")
                    labels_BT = torch.stack([batch[name] for name in tasks], 1).float()
                    ones_B = torch.ones_like(labels_BT[:, 0])
                    weights = [batch.get(f"{name}.weights", ones_B).float() for name in tasks]
                    groups = [batch[GROUP]] if GROUP in batch else []
                    parts.append([net(batch), labels_BT, torch.stack(weights, 1), *groups])
        finally:
            for module, is_training in modes:
                module.training = is_training
        if not parts:
            raise DataError("evaluate: the data have no batch")
        outputs, *rest = (self.trainers.gather(torch.cat(each)) for each in zip(*parts, strict=True))
        rows = torch.arange(len(outputs))  # no samples are known to have equal features
        outputs = outputs[:, 0] if outputs.shape[1:] == (1,) else outputs
        predictions = Predictions(outputs, rest[0], rows, *rest[1:])
        metrics = predictions.metrics(tasks, is_weighted=self._config.data.weighted_metrics)
        if self._run is not None:
            self._run.note(metrics, self.step)
        return metrics

    def resume(self, root: StoragePath, objects: Sequence[Stateful], every_steps: int) -> None:
        """See :meth:`Cluster.resume`."""
        if self._run is not None or self._is_in_pass or self._position != Position():
            raise RuntimeError("cluster.resume(...) is called once, before the first step")
        if self._backend.snapshot is not None:
            return  # hybrid compare runs the first steps of the script

        def save(folder: StoragePath, best: Best | None, position: Position) -> None:
            self.save(folder, objects, best, position)

        self._backend.resume(root)
        self._run = run = LoopCheckpoints(self._backend, self.trainers, root, every_steps, save)
        if (stored := run.find()) is not None:
            run.resume(stored, self.load(stored, objects))

    def save(
        self,
        folder: StoragePath,
        objects: Sequence[Stateful],
        best: Best | None = None,
        position: Position | None = None,
    ) -> None:
        """See :meth:`Cluster.save`."""
        self._flush()
        self.is_saving = True
        try:
            dense, progress = pack_state(self.model.net, objects, position or self._position)
        finally:
            self.is_saving = False
        self._backend.save(folder, self.step, dense, {**progress, BEST: best})

    def load(self, stored: Checkpoint, objects: Sequence[Stateful]) -> Position:
        """Load a checkpoint, and return its position; see :meth:`Cluster.load`."""
        if stored.manifest.tables.keys() != self._shapes.keys():
            raise CheckpointError(
                f"{stored.folder}: the checkpoint is of another model, with the tables "
                f"{', '.join(sorted(stored.manifest.tables))}, not {', '.join(sorted(self._shapes))}"
            )
        self._flush()
        position = load_progress(self.model.net, objects, stored)
        self._backend.load(stored)
        self._engine.begin(iter(()), stored.manifest.step)
        self._sent_step = -1
        return position
