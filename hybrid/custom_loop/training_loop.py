"""The steps of one trainer, driven by the loop of a script.

::

    next batch        send the lookups of the calls that earlier passes made
    model(batch)      a call of a table takes its vectors; other ids are looked up now
    cluster.backward  the weighted mean over all trainers; gradients are sent to the tables
    optimizer.step    a pre-hook of torch lets all trainers decide on the step first
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hybrid.checkpoint.checkpoint_folders import DENSE_FILE
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.checkpoint.tensor_file import load_state, pack_dense, unpack_dense
from hybrid.custom_loop.backend import Backend
from hybrid.custom_loop.call_sites import CallKey, CallSite, call_key
from hybrid.custom_loop.embedding_modules import TableCall, TableModule
from hybrid.custom_loop.local_batches import LocalBatch, PreparedData, global_batches, local_batches
from hybrid.custom_loop.loop_warnings import LoopWarnings
from hybrid.custom_loop.trainer_group import TrainerGroup
from hybrid.dense.dense_optimizer import DenseOptimizer
from hybrid.dense.devices import choose_devices
from hybrid.dense.net_builder import batch_norm_warning
from hybrid.embedding.trainer.embeddings import ModuleTables, TableRequest
from hybrid.embedding.trainer.lookup import Lookup
from hybrid.engine.ddp import DdpMode, DdpModel, DensePlacement, SharedMemoryReduce
from hybrid.engine.hybrid_model import to_device
from hybrid.engine.losses import weighted_summand
from hybrid.engine.step_feed import Feed
from hybrid.engine.train_step import Graph, record_graph, seed_step
from hybrid.engine.update_guard import Guard
from hybrid.errors import CheckpointError, ConfigError, DataError
from hybrid.primitives.step_timings import StepClock
from hybrid.protocol.ticket import Purpose, Ticket
from hybrid.protocol.update_rules import Schedule, UpdateMode
from hybrid.server.barrier import UpdateBarrier
from hybrid.storage.remote_path import StoragePath

_ROWS_PER_LOOKUP = 1 << 16
# Seeds the random numbers that all trainers draw alike; no trainer has this rank.
_ALL_TRAINERS = 1 << 32


@dataclass
class ForwardPass:
    """A forward pass that is running.

    Attributes:
        batch: the batch of the pass; None for a call without a batch.
        ticket: ticket of its lookups.
        prefetched: the lookup that was sent before the pass; None after its vectors are used.
        vectors: vectors by call.
        lookups: lookups whose vectors were used.
        zeros: the zero output of each of ``lookups``; see :meth:`ModuleTables.lookup`.
    """

    batch: LocalBatch | None
    ticket: Ticket
    prefetched: Lookup | None = None
    vectors: dict[CallKey, Tensor] = field(default_factory=dict)
    lookups: list[Lookup] = field(default_factory=list)
    zeros: list[Tensor] = field(default_factory=list)


class TrainingLoop:
    """The steps of one trainer.

    Args:
        backend: holds the tables and knows the other trainers.
        net: the script's module; its tables are bound to this loop.

    Attributes:
        model: the module under DDP, and its gradients.
        trainers: all trainers.
        device: device of the module.
        step: number of steps taken.
        is_saving: whether a checkpoint is reading the state dict of the module.
    """

    def __init__(self, backend: Backend, net: nn.Module) -> None:
        self._backend = backend
        config = backend.config
        self._devices = choose_devices(config.dense, backend.trainer)
        self.device = self._devices[0]
        self._clock = StepClock()
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
        self._mode = placed.rules.mode
        self._tables = ModuleTables(specs, placed.placement, placed.workers, self._clock)
        for name, module in modules.items():
            module.bind(name, self)
        net.to(self.device)
        if not backend.is_single_process and (message := batch_norm_warning(net, config)):
            self._warnings.warn(message)
        mode, shared = DdpMode.NONE, None
        if not backend.is_single_process and any(p.requires_grad for p in net.parameters()):
            mode = DdpMode(config.dense.ddp)
        if mode is not DdpMode.NONE and dist.get_backend(backend.group) == "gloo":
            timeout_seconds = config.cluster.timeout_seconds
            shared = SharedMemoryReduce.join(backend.group, backend.trainer, self.device, timeout_seconds)
        self.model = DdpModel(net, mode, DensePlacement(backend.group), self._clock, shared)
        is_nccl = not backend.is_single_process and dist.get_backend(backend.group) == "nccl"
        self.trainers = TrainerGroup(backend.group, self.device if is_nccl else torch.device("cpu"))
        self._guard = Guard(placed.rules, self._barriers, backend.group, self.trainers.device)
        self._feed = Feed[LocalBatch](self._tables, [], backend.trainer, self._mode, 1, self._clock)
        # The calls that every batch is expected to have, in the order of their first occurrence.
        self._sites: dict[CallSite, None] = {}
        # The running pass of each kind.
        self._training: ForwardPass | None = None
        self._evaluation: ForwardPass | None = None
        self._graph: Graph | None = None
        self._step_context = ExitStack()
        self._loss: float | None = None  # this trainer's loss of the step, after its backward pass
        # Factor of the step's gradients, once decided; None to skip the step.
        self._scale: float | None = None
        self._stepped_optimizers: set[int] = set()  # ids of the optimizers that have taken the step
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        _LOOPS.add(self)
        self._num_passes = 0
        self.step = 0
        self.is_saving = False
        self._is_in_backward = False
        for parameter in net.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._require_cluster_backward)

    def batches(self, data: Any, size: int | None, whole: str | None) -> Iterator[Any]:
        """Yield this trainer's slice of each batch, for training, or for evaluation under ``no_grad``."""
        # All trainers must shuffle alike, and samplers draw from the global generator of torch.
        seed_step(self._backend.config.run.seed, _ALL_TRAINERS, self._num_passes, ())
        self._num_passes += 1
        trainer, num_trainers, sites = self._backend.trainer, self._backend.group.size(), self._sites
        if isinstance(data, PreparedData):
            batches = data.local_batches(trainer, num_trainers, size, sites, whole)
        else:
            checked = self.trainers.check_batches(global_batches(data, size, whole))
            batches = local_batches(checked, trainer, num_trainers, sites, whole)
        if not torch.is_grad_enabled():
            outer = self._evaluation
            try:
                for batch in batches:
                    ticket = self._evaluation_ticket()
                    prefetched = self._tables.lookup(batch.sparse_features, ticket)
                    self._evaluation = ForwardPass(batch, ticket, prefetched)
                    yield batch.values
            finally:
                self._evaluation = outer
            return
        self._feed.begin(batches, self.step)
        max_steps = self._backend.config.train.max_steps
        try:
            while not max_steps or self.step < max_steps:
                if (current := next(self._feed, None)) is None:
                    return
                step, trainer = self.step, self._backend.trainer
                (micro_batch,) = current.micro_batches
                self._end_step()
                seed_step(self._backend.config.run.seed, trainer, step, self._devices)
                is_sync = self._mode is UpdateMode.SYNC
                spans_processes = is_sync and not self._backend.is_single_process
                graph = record_graph(self.model.net, spans_processes)
                self._graph = self._step_context.enter_context(graph)
                purpose = Purpose.TRAIN if is_sync else Purpose.PREFETCH
                ticket = Ticket(trainer, step, step, purpose=purpose)
                lookup: Any = micro_batch.start()
                self._training = ForwardPass(current.batch, ticket, lookup)
                yield current.batch.values
                if self.step != step + 1:
                    missing = "cluster.backward(...)" if self._loss is None else "optimizer.step()"
                    raise RuntimeError(
                        f"{missing} was not called for the batch of step {step}; each batch takes one step. "
                        "To evaluate, iterate under torch.no_grad()"
                    )
            if self._backend.snapshot is not None:
                self.save(self._backend.snapshot, next(iter(self._optimizers), None))
                self._backend.snapshot = None
        finally:
            self._end_step()

    def _end_step(self) -> None:
        """Close the graph of a step, and forget its state."""
        self._step_context.close()
        self._training = self._graph = self._loss = None
        self._stepped_optimizers.clear()

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
            current = ForwardPass(None, self._evaluation_ticket())
        key = call_key(call)
        if key not in current.vectors:
            self._use_prefetched(current)
        if key not in current.vectors:
            # The prefetched lookup is part 0 of the pass.
            ticket = current.ticket._replace(part=len(current.lookups))
            lookup = self._tables.lookup([call.module.request(call)], ticket)
            (current.vectors[key],) = self._outputs(current, lookup)
            if current.batch is not None and call.ids.numel():
                if (site := CallSite.find(call, current.batch.tensors)) is not None:
                    self._sites[site] = None
                elif current is self._training:
                    self._warnings.warn(
                        f"table {call.module.name} is called with ids that are computed in the module. Each "
                        "such call waits for a separate request. For speed, put the ids into the batch"
                    )
        return to_device(current.vectors[key], self.device)

    def _use_prefetched(self, current: ForwardPass) -> None:
        """Wait for the prefetched lookup of a pass, unless its vectors are already used."""
        if current.prefetched is not None:
            assert current.batch is not None
            vectors = self._outputs(current, current.prefetched)
            current.vectors.update(zip(current.batch.calls, vectors, strict=True))
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
        current, graph = self._training, self._graph
        if current is None or graph is None or current.batch is None:
            raise RuntimeError("cluster.backward(...) takes the loss of a batch of cluster.batches(...)")
        if self._loss is not None:
            raise RuntimeError(f"cluster.backward(...) is called again for the batch of step {self.step}")
        local_loss = self._local_loss(terms, current.batch)
        parameters = list(self.model.net.parameters())
        if self.step == 0:
            shapes = [each.shape for each in parameters] + [each.shape[1:] for each in current.batch.tensors]
            self._warnings.check_pairs(local_loss, current.batch.size, self._widths.union(*shapes))
        # The workers wait for the gradients of every lookup, even if the module called no table.
        self._use_prefetched(current)
        loss = local_loss + torch.stack(current.zeros).sum().to(local_loss)
        self._announce_lookups(current.lookups)
        for parameter in parameters:
            parameter.grad = None
        self._is_in_backward = True
        try:
            graph.backward(loss)
        finally:
            self._is_in_backward = False
        self.model.collect(graph.gradients(), is_last=True)
        for trainable, gradient in self.model.gradients.items():
            trainable.grad = gradient
        self._warnings.note_gradients(self.model.gradients.values())
        self._loss = loss.item()
        self._step_context.close()
        self._guard.check_loss(self.step, self._loss, self.model.first_not_finite)
        if not any(parameter.requires_grad for parameter in parameters):
            self._decide_step()  # no optimizer calls the hook

    def _announce_lookups(self, lookups: Sequence[Lookup]) -> None:
        """Send the number of lookups with gradients to the workers, if there are several."""
        if len(lookups) > 1:
            arguments = (self._backend.trainer, self.step, len(lookups))
            calls = [each.call_barrier(UpdateBarrier.expect, *arguments) for each in self._barriers]
            for call in calls:
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
        if self._loss is None or id(optimizer) in self._stepped_optimizers:
            raise RuntimeError("optimizer.step() comes after cluster.backward(...), once for each batch")
        if not self._stepped_optimizers:
            self._warnings.check_gradients(p.grad for p in self.model.gradients)
            self._decide_step()
        self._warnings.check_learning_rate(optimizer)
        self._stepped_optimizers.add(id(optimizer))
        self._optimizers.add(optimizer)
        for parameter in parameters:
            if self._scale is None:
                parameter.grad = None
            elif self._scale != 1.0 and parameter.grad is not None:
                parameter.grad = parameter.grad * self._scale

    def _decide_step(self) -> None:
        """Agree with all trainers on the factor of the step's gradients."""
        assert self._loss is not None
        norm = self.model.squared_norm()
        self._scale = self._guard.decide(self.step, self._loss, norm, self.model.gradient_not_finite)
        self._clock.end_step()
        self.step += 1

    def save(self, folder: StoragePath, optimizer: torch.optim.Optimizer | None) -> None:
        """See :meth:`Cluster.save`."""
        self._feed.flush()
        state = {} if optimizer is None else optimizer.state_dict()["state"]
        self.is_saving = True
        try:
            dense = pack_dense(self.model.net.state_dict(), state)
        finally:
            self.is_saving = False
        self._backend.save(folder, self.step, dense, {})

    def load(self, folder: StoragePath, optimizer: torch.optim.Optimizer | None) -> None:
        """See :meth:`Cluster.load`."""
        stored = Checkpoint.open(folder)
        if stored.manifest.tables.keys() != self._shapes.keys():
            raise CheckpointError(
                f"{folder}: the checkpoint is of another model, with the tables "
                f"{', '.join(sorted(stored.manifest.tables))}, not {', '.join(sorted(self._shapes))}"
            )
        net, state = unpack_dense(stored.tensors(DENSE_FILE))
        load_state(self.model.net, net, folder)
        if optimizer is not None:
            DenseOptimizer(optimizer, Schedule()).load(state, folder)
        self._backend.load(stored)
        self.step = stored.manifest.step


# All loops of this process. The optimizer hook is registered once, for all of them.
_LOOPS: weakref.WeakSet[TrainingLoop] = weakref.WeakSet()


def _before_optimizer_step(optimizer: torch.optim.Optimizer, args: Any, keywords: Any) -> None:
    for loop in list(_LOOPS):
        loop.before_optimizer_step(optimizer)


register_optimizer_step_pre_hook(_before_optimizer_step)
