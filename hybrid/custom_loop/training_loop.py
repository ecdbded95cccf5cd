"""The steps of one trainer, driven by the loop of a script.

::

    next batch        send the lookups of the columns that tables name in ``ids``
    model(batch)      a call of a table takes its vectors; other ids are looked up now
    cluster.backward  the weighted mean over all trainers; gradients are sent to the tables
    optimizer.step    a pre-hook of torch lets all trainers decide on the step first
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count
from operator import length_hint
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from hybrid.checkpoint.checkpoint_folders import BEST, CUSTOM_LOOP, MANIFEST_FILE, Best, Manifest
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.custom_loop.backend import Backend
from hybrid.custom_loop.embedding_modules import Jagged, TableCall, TableModule
from hybrid.custom_loop.local_batches import (
    LocalBatch,
    PassSizes,
    PreparedData,
    global_batches,
    local_batches,
    size_of,
    skip_samples,
    tensors_of,
)
from hybrid.custom_loop.loop_state import (
    EpochRecord,
    LoopCheckpoints,
    Position,
    Stateful,
    load_progress,
    pack_state,
)
from hybrid.custom_loop.loop_warnings import LoopWarnings
from hybrid.custom_loop.trainer_group import TrainerGroup
from hybrid.dense.devices import choose_devices
from hybrid.dense.net_builder import BATCH_NORMS, batch_norm_warning
from hybrid.embedding.bags import Bags
from hybrid.embedding.trainer.embeddings import ModuleTables
from hybrid.embedding.trainer.lookup import Lookup
from hybrid.engine.ddp import DensePlacement
from hybrid.engine.hybrid_model import to_device
from hybrid.engine.losses import weighted_summand
from hybrid.engine.step_engine import StepEngine, seed_step
from hybrid.errors import CheckpointError, ConfigError, DataError
from hybrid.metrics import Metrics
from hybrid.primitives.step_timings import StepClock
from hybrid.protocol.ticket import Purpose, Ticket
from hybrid.protocol.update_rules import UpdateMode
from hybrid.server.barrier import UpdateBarrier
from hybrid.storage import files as storage
from hybrid.storage.remote_path import StoragePath

_ROWS_PER_LOOKUP = 1 << 16
# Seeds the random numbers that all trainers draw alike; no trainer has this rank.
_ALL_TRAINERS = 1 << 32
_MANY_PARTS = 1 << 30  # more parts than a step has, until its last micro-batch is known


_LOOPS = weakref.WeakSet["TrainingLoop"]()


@cache
def _call_before_steps() -> None:
    """Make every optimizer call the loops before its step, from the first loop of the process on.

    Removing the hook of a loop that is garbage could disturb an optimizer that iterates over its hooks.
    """

    def before_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for loop in list(_LOOPS):
            loop.before_optimizer_step(optimizer)

    register_optimizer_step_pre_hook(before_step)


@dataclass
class ForwardPass:
    """A forward pass that is running.

    Attributes:
        batch: the batch of the pass; empty for a call without a batch.
        prefetched: the lookup that was sent before the pass; None after its vectors are used.
        is_last: whether it trains the last micro-batch of a step.
        returned: key of each call whose vectors the module has, and their version when it got them.
        zeros: the zero output of each lookup whose vectors were used; see :meth:`ModuleTables.lookup`.
        is_backward_done: whether ``cluster.backward`` was called.
        optimizers: ids of the optimizers that have taken the step since.
    """

    ticket: Ticket
    batch: LocalBatch = field(default_factory=lambda: LocalBatch({}, 0, 0, ()))
    prefetched: Lookup | None = None
    is_last: bool = False
    vectors: dict[object, tuple[TableCall, Tensor]] = field(default_factory=dict)
    returned: dict[object, int] = field(default_factory=dict)
    zeros: list[Tensor] = field(default_factory=list)
    is_backward_done: bool = False
    optimizers: set[int] = field(default_factory=set)


class TrainingLoop:
    """The steps of one trainer.

    Attributes:
        model: the module under DDP, and its gradients.
        checkpoints: the checkpoints of ``cluster.resume``, or None.
        resumed: position of the checkpoint from which the loop continues.
        in_epoch: what the script has done in this epoch.
        handed_out: the slices of the pass that was iterated last.
        is_in_pass: whether a pass over training batches has begun, and the next has not.
        is_saving: whether a checkpoint is reading the state dict of the module.
    """

    def __init__(self, backend: Backend, net: nn.Module) -> None:
        self._backend = backend
        self._config = config = backend.config
        devices = choose_devices(config.dense, backend.trainer)
        self.device = devices[0]
        clock = StepClock()
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
        self._warnings = LoopWarnings(backend, any(spec.optimizer.has_momentum for spec in specs))
        self._placed = placed = backend.place_tables(specs)
        self._rules = placed.rules
        self._tables = ModuleTables(specs, placed.placement, placed.workers, clock)
        self._modules = list(modules.values())
        # As the reference of hybrid compare, one process looks up all ids when they are used.
        is_reference = backend.is_single_process and backend.snapshot is not None
        self._ahead = [] if is_reference else self._modules  # whose named columns are looked up ahead
        for name, module in modules.items():
            module.bind(name, self)
        net.to(self.device)
        if not backend.is_single_process and (message := batch_norm_warning(net, config)):
            last = "cluster.batches(..., drop_last=True) leaves out a last batch that is too small"
            self._warnings.warn(f"{message}. {last}")
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
            is_single_process=backend.is_single_process,
        )
        self.model = self._engine.model
        self.trainers = TrainerGroup(backend.group, self._engine.device)
        # The running pass of each kind.
        self._training: ForwardPass | None = None
        self._evaluation: ForwardPass | None = None
        self._num_lookups = 0  # with gradients, in the micro-batches of the step so far
        # Factor of the step's gradients, once decided; None to skip the step.
        self._scale: float | None = None
        # In the order of first use.
        self._optimizers = weakref.WeakKeyDictionary[torch.optim.Optimizer, None]()
        self.checkpoints: LoopCheckpoints | None = None
        self.position = self.resumed = Position()
        self.in_epoch, self._resumed_epoch = EpochRecord(), EpochRecord()
        self.start: Mapping[str, str] = {}
        self.handed_out = PassSizes()
        self.is_in_pass = False
        self._sent_step = -1  # the last step with gradients on their way to the tables
        self.is_saving = False
        self._is_in_backward = False
        loop = weakref.ref(self)  # hooks of parameters must not keep it alive

        def after_gradient(_: Tensor) -> None:
            if (live_loop := loop()) is not None:
                live_loop._require_cluster_backward()

        for parameter in net.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(after_gradient)
        _call_before_steps()
        _LOOPS.add(self)

    @property
    def step(self) -> int:
        """Number of steps taken."""
        return self._engine.feed.step

    @property
    def remaining_steps(self) -> int | None:
        """Number of steps until ``train.max_steps`` are taken; None without this limit."""
        max_steps = self._config.train.max_steps
        return max(0, max_steps - self.step) if max_steps else None

    def batches(
        self, data: Any, size: int | None, whole: str | None = None, drop_last: bool = False
    ) -> Iterator[Any]:
        """Yield this trainer's slice of each batch, for training, or for evaluation under ``no_grad``."""
        if torch.is_grad_enabled():
            yield from self._training_batches(data, size, whole, drop_last)
            return
        outer, checksum, self.handed_out = self._evaluation, 0, PassSizes()
        try:
            for batch in self._local_batches(data, size, whole, drop_last, self.position.pass_index, 0):
                checksum = zlib.crc32(batch.checksum.to_bytes(4, "little"), checksum)
                ticket = self._evaluation_ticket()
                prefetched = self._tables.lookup(batch.sparse_features, ticket) if batch.calls else None
                self._evaluation = ForwardPass(ticket, batch, prefetched)
                self.handed_out.add(batch)
                yield batch.handed_out
            self.trainers.check_equal(checksum)
        finally:
            self._evaluation = outer

    def _local_batches(
        self, data: Any, size: int | None, whole: str | None, drop_last: bool, index: int, first_sample: int
    ) -> Iterator[LocalBatch]:
        """Yield the slices of pass number ``index``, from a sample on."""
        trainer, num_trainers = self._backend.trainer, self._backend.group.size()
        modules, needs_pairs = self.model.net.modules(), torch.is_grad_enabled()
        least = 1 + (needs_pairs and any(isinstance(each, BATCH_NORMS) and each.training for each in modules))
        if isinstance(data, PreparedData):
            split = trainer, num_trainers, size, self._ahead, whole, index, first_sample
            slices = data.local_batches(*split, least=least, drop_last=drop_last)
        else:
            batches = self._seeded(global_batches(data, size, whole, drop_last=drop_last), index)
            remaining = skip_samples(batches, first_sample)
            slices = local_batches(remaining, trainer, num_trainers, self._ahead, whole, least)
        return (replace(each, device=self.device) for each in slices)

    def _seeded(self, batches: Iterator[Any], index: int) -> Iterator[Any]:
        """Yield batches whose random numbers depend on their position only, and are alike on all trainers."""
        for number in count():
            seed_step(self._config.run.seed, _ALL_TRAINERS + index, number, ())
            if (batch := next(batches, None)) is None:
                return
            yield batch

    def _training_batches(
        self, data: Any, size: int | None, whole: str | None, drop_last: bool
    ) -> Iterator[Any]:
        self._flush()
        self.end_pass()
        index, resumed = self.position.pass_index, self.resumed
        if self.checkpoints is not None:
            self._note_length(data, index)
        if index < resumed.pass_index:  # its steps precede the checkpoint
            self.position = self.position._replace(pass_index=index + 1)
            return
        first = resumed.samples if index == resumed.pass_index else 0
        self._training, current, self.handed_out = None, None, PassSizes()
        self.position, self.is_in_pass = self.position._replace(samples=first), True
        self._engine.feed.begin(self._local_batches(data, size, whole, drop_last, index, first), self.step)
        try:
            for step_input in self._engine.steps(self.remaining_steps, self.save_if_due):
                step, self._num_lookups = self.step, 0
                for micro in step_input.micro_batches:
                    purpose = Purpose.TRAIN if self._rules.mode is UpdateMode.SYNC else Purpose.PREFETCH
                    ticket = micro.ticket._replace(purpose=purpose)
                    with self._engine.recording(micro) as sent:
                        is_last = micro.is_last
                        self._training = current = ForwardPass(ticket, micro.batch, sent.lookup, is_last)
                        self.handed_out.add(micro.batch)
                        yield micro.batch.handed_out
                    if self._training is not current:
                        raise RuntimeError(
                            "cluster.load(...), or a pass over other training batches, has ended this pass: "
                            "leave the pass first"
                        )
                    is_over = self.step == step + 1 if micro.is_last else current.is_backward_done
                    if not is_over:
                        optimizer = "optimizer.step() of parameters of the module"
                        missing = optimizer if current.is_backward_done else "cluster.backward(...)"
                        raise RuntimeError(
                            f"{missing} was not called for the batch of step {step}; each batch takes one "
                            "step. To add up the gradients of several batches, yield them as one batch, and "
                            "set train.micro_batches. To evaluate, iterate under torch.no_grad()"
                        )
                num_samples = self.position.samples + step_input.batch.global_size
                self.position = self.position._replace(samples=num_samples)
            self._flush()  # raises what went wrong in the last step
            if self.remaining_steps != 0:
                self.end_pass()
            elif self._backend.snapshot is not None:
                self.save(self._backend.snapshot, [*self._optimizers])
                raise SystemExit  # hybrid compare needs no further lines of the script
        finally:
            if self._training is current:  # an interrupted loop may end after the next one has begun
                self._training = None

    def _flush(self) -> None:
        """Wait until the workers have all gradients.

        Raises:
            RuntimeError: a step has begun.
        """
        if self._sent_step == self.step:
            raise RuntimeError(
                f"step {self.step} is not complete: optimizer.step(), of its last micro-batch, comes first. "
                "If the loop was left after cluster.backward(...), which updates the tables only, call "
                "hybrid.connect() again and distribute a new module"
            )
        self._engine.feed.flush()

    def end_pass(self) -> None:
        """Count the current pass as done, whether the script read all of its batches or left it."""
        if self.is_in_pass:
            self.position = self.position._replace(pass_index=self.position.pass_index + 1, samples=0)
            self.is_in_pass = False

    def begin_epoch(self, epoch: int) -> None:
        """End the current pass, and count further passes as those of an epoch."""
        self.end_pass()
        first = max(self.position.pass_index, self.resumed.first_pass)
        self.position, self.in_epoch = Position(epoch, first, first), EpochRecord()

    def save_if_due(self, *, is_last: bool = False) -> None:
        """Write a checkpoint of :attr:`checkpoints`, if one is due."""
        if self.checkpoints is not None:
            self.checkpoints.write_if_due(self.step, is_last=is_last)

    def _evaluation_ticket(self) -> Ticket:
        return Ticket(self._backend.trainer, self.step, self.step, purpose=Purpose.PREDICT)

    def vectors(self, call: TableCall) -> Tensor:
        """Return the vectors of a call of a table, (ids or bags, D), on the device.

        As with ``torch.nn``, a change in place does not change the vectors of another call.
        """
        current = self._training
        if not torch.is_grad_enabled():
            current = self._evaluation or ForwardPass(self._evaluation_ticket())
        if current is None:
            raise RuntimeError(
                "a module with tables trains on the batches of cluster.batches(...); call it on other "
                "tensors under torch.no_grad()"
            )
        self._use_prefetched(current)
        is_new, version = call.key not in current.vectors, current.returned.get(call.key)
        if is_new or (version is not None and version != current.vectors[call.key][1]._version):
            ticket = current.ticket
            if current is self._training:  # the parts below are those of prefetched lookups
                part = self._rules.parts + self._num_lookups + len(current.zeros)
                ticket = ticket._replace(part=part)
            self._use(current, self._tables.lookup([call.module.request(call)], ticket), [call])
            if is_new and current is self._training and call.ids.numel() and self._ahead:
                self._warnings.warn(
                    f"table {call.module.name} is called with ids that are not looked up before the module "
                    "runs. Each such call waits for a separate request. For speed, put the ids, and their "
                    'weights, into the batch, and name their columns, as in hybrid.Embedding(..., ids="user")'
                )
        vectors = current.vectors[call.key][1]
        if vectors.is_inference() or call.key in current.returned:
            vectors = vectors.clone()
        else:
            current.returned[call.key] = vectors._version
        return to_device(vectors, self.device)

    def _use_prefetched(self, current: ForwardPass) -> None:
        """Wait for the prefetched lookup of a pass, unless its vectors are already used."""
        if current.prefetched is not None:
            self._use(current, current.prefetched, current.batch.calls)
            current.prefetched = None

    def _use(self, current: ForwardPass, lookup: Lookup, calls: Sequence[TableCall]) -> None:
        """Wait for the vectors of a lookup of a pass."""
        *vectors, zero = lookup.outputs()
        current.zeros.append(zero)
        if zero.grad_fn is not None:
            zero.grad_fn.register_prehook(self._require_cluster_backward)
        for call, each in zip(calls, vectors, strict=True):
            current.vectors[call.key] = call, each
            current.returned.pop(call.key, None)

    def rows(self, module: TableModule) -> Tensor:
        """Return all rows of a table, (rows, D), as they are now."""
        ticket = self._evaluation_ticket()
        blocks = torch.arange(module.num_embeddings).split(_ROWS_PER_LOOKUP)
        requests = ([(module.name, Bags(ids))] for ids in blocks)
        return torch.cat([self._tables.lookup(request, ticket).outputs()[0] for request in requests])

    def backward(self, terms: Sequence[tuple[Tensor, Tensor | None]]) -> None:
        """Compute the gradients of the sum of weighted means over all trainers' samples.

        Args:
            terms: values and weights of each mean; see :meth:`Cluster.backward`.
        """
        current = self._training
        if current is None:
            raise RuntimeError("cluster.backward(...) takes the loss of a batch of cluster.batches(...)")
        if current.is_backward_done:
            raise RuntimeError(
                f"cluster.backward(...) is called again for the batch of step {self.step}: add up the losses "
                "of each sample, or pass further losses as more=[(loss, weights)]"
            )
        if self._rules.parts > 1 and any(weights is not None for _, weights in terms):
            rule = "must be 1 for a loss with weights, whose sum is known only after the last micro-batch"
            raise ConfigError("train.micro_batches", rule, self._rules.parts)
        local_loss = self._local_loss(terms, current.batch)
        if not local_loss.requires_grad:
            raise RuntimeError(
                "the loss does not depend on the module: its graph was detached, or not recorded"
            )
        parameters = list(self.model.net.parameters())
        if self.step == 0:
            tensors = tensors_of(current.batch.values)
            shapes = [each.shape for each in parameters] + [each.shape[1:] for each in tensors]
            self._warnings.check_pairs(
                local_loss, current.batch.size, {each.embedding_dim for each in self._modules}.union(*shapes)
            )
        # The workers wait for the gradients of every lookup, even if the module called no table.
        self._use_prefetched(current)
        loss = local_loss + torch.stack(current.zeros).sum().to(local_loss)
        self._num_lookups += len(current.zeros)
        if self._num_lookups != current.ticket.part + 1:  # not one lookup per micro-batch so far
            parts = self._num_lookups if current.is_last else _MANY_PARTS
            self._engine.feed.call_barriers(UpdateBarrier.expect, self.step, parts)
        for parameter in parameters:
            parameter.grad = None
        self._sent_step = self.step
        self._is_in_backward = True
        try:
            self._engine.backward(loss)
        finally:
            self._is_in_backward = False
        current.is_backward_done = True
        if not current.is_last:
            return
        for trainable, gradient in self.model.gradients.items():
            trainable.grad = gradient
        self._warnings.note_gradients(self.model.gradients.values())
        if not any(parameter.requires_grad for parameter in parameters):
            self._scale = self._engine.decide()  # no optimizer calls the hook

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
            size = batch.padded_size
            if values.dim() == 0 or len(values_B) != size:
                raise DataError(
                    f"cluster.backward takes one loss value per sample, ({size},), not "
                    f'{list(values.shape)}: use reduction="none". For a loss over pairs of samples, use '
                    "cluster.gather(vectors)"
                )
            values_B = values_B if batch.size == size else values_B[: batch.size]
            if weights is not None:
                weights_B = weights.reshape(-1).to(values_B)
                if len(weights_B) != size or not (weights_B.isfinite() & (weights_B >= 0)).all():
                    raise DataError(
                        f"cluster.backward takes one weight per sample, ({size},), finite and not "
                        f"negative, not {list(weights.shape)}"
                    )
                weights_B = weights_B[: batch.size]
                total = self.trainers.sum(weights_B.sum().double()).item()
                summands.append(weighted_summand(values_B, weights_B, total))
            elif batch.size:
                # A mean, not a sum over a size: with one trainer it has the bits of torch's mean.
                summands.append(values_B.mean() * (batch.size / batch.global_size))
            else:
                summands.append(values_B.sum())
        return sum(summands[1:], summands[0])

    def before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Scale or drop the gradients that an optimizer of the module's parameters is about to use.

        Raises:
            RuntimeError: the optimizer has no gradients of a new batch, or has other parameters, too.
        """
        module_ids = {id(parameter) for parameter in self.model.net.parameters()}
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        is_of_module = [id(parameter) in module_ids for parameter in parameters]
        if not any(is_of_module):
            return
        if not all(is_of_module):
            raise RuntimeError(
                "the optimizer has parameters outside the distributed module, which would differ between "
                "trainers: make them parameters of the module"
            )
        current = self._training
        if current is None or not current.is_backward_done or id(optimizer) in current.optimizers:
            raise RuntimeError("optimizer.step() comes after cluster.backward(...), once for each batch")
        if not current.is_last:
            self._scale = None
        elif self.step == current.ticket.step:  # not decided yet
            self._warnings.check_gradients(p.grad for p in self.model.gradients)
            self._scale = self._engine.decide()
        self._warnings.check_settings(optimizer)
        current.optimizers.add(id(optimizer))
        self._optimizers[optimizer] = None
        for parameter in parameters:
            if self._scale is None:
                parameter.grad = None
            elif self._scale != 1.0 and parameter.grad is not None:
                parameter.grad = parameter.grad * self._scale

    def save(self, folder: StoragePath, objects: Sequence[Stateful], best: Best | None = None) -> None:
        """Write a checkpoint with the best evaluation so far; see :meth:`Cluster.save`."""
        self._flush()
        manifest_path = folder / MANIFEST_FILE
        is_resumed = self.resumed != Position()
        if is_resumed and storage.exists(manifest_path) and Manifest.read(manifest_path).step == self.step:
            return  # a role was lost after this save, and the script repeats it
        self.is_saving = True
        try:
            state = self.position, self.in_epoch, self.start
            dense, progress = pack_state(self.model.net, objects, *state)
        finally:
            self.is_saving = False
        progress |= {CUSTOM_LOOP: True, BEST: best}
        manifest = Manifest(self.step, 0, self._placed.placement.shapes, progress=progress)
        self._backend.save(self._placed.number, folder, manifest, dense)

    def resume(self, stored: Checkpoint, objects: Sequence[Stateful]) -> None:
        """Continue from a checkpoint, and warn if the script starts otherwise than the one that wrote it."""
        now = self.start
        self.resumed, self._resumed_epoch, before = self.load(stored, objects)
        if differences := [
            f"the {name}: {before.get(name)}, and {now.get(name)} now"
            for name in sorted(before.keys() | now.keys())
            if before.get(name) != now.get(name)
        ]:
            self._warnings.warn(
                f"{stored.folder}: the script that wrote the checkpoint began with another value of "
                f"{'; '.join(differences)}. The states of the checkpoint apply, but results may differ from "
                "those of an undisturbed run"
            )

    def evaluate_once(self, evaluate: Callable[[], Metrics]) -> Metrics:
        """Return the metrics of ``evaluate``, or those of this evaluation before the checkpoint."""
        if self._training is not None or self.checkpoints is None:  # a skipped step does not evaluate again
            return evaluate()
        done, known = self.in_epoch.evaluations, self._resumed_epoch.evaluations
        is_before = self.position.pass_index + self.is_in_pass <= self.resumed.pass_index
        is_known = is_before and len(done) < len(known)
        done.append(known[len(done)] if is_known else evaluate())
        return done[-1]

    def _note_length(self, data: Any, index: int) -> None:
        """Record the length of a pass; warn if it was another one before the checkpoint."""
        counted = data.dataset if isinstance(data, DataLoader) else data
        length = size_of(data) if isinstance(data, Mapping | Jagged | Tensor) else length_hint(counted, -1)
        done, known = self.in_epoch.lengths, self._resumed_epoch.lengths
        if index <= self.resumed.pass_index and known[len(done) : len(done) + 1] not in ([], [length]):
            self._warnings.warn(
                f"pass {len(done)} of epoch {self.position.epoch} reads data of length {length}; before the "
                f"checkpoint, it was {known[len(done)]}. The position in other data is not that of the run"
            )
        done.append(length)

    def load(
        self, stored: Checkpoint, objects: Sequence[Stateful]
    ) -> tuple[Position, EpochRecord, dict[str, str]]:
        """Load a checkpoint, and return what :func:`load_progress` returns; see :meth:`Cluster.load`."""
        tables, shapes = stored.manifest.tables, self._placed.placement.shapes
        if tables.keys() != shapes.keys():
            raise CheckpointError(
                f"{stored.folder}: the checkpoint is of another model, with the tables "
                f"{', '.join(sorted(tables))}, not {', '.join(sorted(shapes))}"
            )
        self._flush()
        progress = load_progress(self.model.net, objects, stored)
        self._backend.load(self._placed.number, stored)
        self._engine.feed.begin(iter(()), stored.manifest.step)
        self._training, self._sent_step = None, -1
        return progress
