"""The steps of one trainer, driven by the loop of a script.

::

    next batch        look up the calls that earlier passes made
    model(batch)      a call of a table takes its vectors; other ids are looked up now
    cluster.backward  the weighted mean over all trainers; gradients leave for the tables
    optimizer.step    all trainers decide on the step; torch calls the hook of the loop before it
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import reduce
from operator import add
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hybrid.checkpoint.checkpoint_manifest import DENSE_FILE
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.checkpoint.tensor_file import load_state, pack_dense, unpack_dense
from hybrid.custom_loop.backend import Backend
from hybrid.custom_loop.embedding_modules import TableCall, TableModule
from hybrid.custom_loop.forward_pass import ForwardPass, ForwardPasses
from hybrid.custom_loop.global_batches import LocalBatch, global_batches, local_batches
from hybrid.custom_loop.loop_warnings import LoopWarnings
from hybrid.custom_loop.prepared_batches import PreparedData
from hybrid.custom_loop.trainer_group import TrainerGroup
from hybrid.dense.custom_net import batch_norm_warning
from hybrid.dense.dense_optimizer import DenseOptimizer
from hybrid.dense.devices import choose_devices
from hybrid.embedding.trainer.module_lookups import ModuleTables
from hybrid.engine.backward import Graph, record_graph
from hybrid.engine.ddp import DdpMode, DdpModel
from hybrid.engine.dense_placement import DensePlacement
from hybrid.engine.gradient_reduction import SharedMemoryReduce
from hybrid.engine.hybrid_model import LocalModel
from hybrid.engine.losses import weighted_summand
from hybrid.engine.step_feed import Feed
from hybrid.engine.train_step import seed_step
from hybrid.engine.update_guard import Guard
from hybrid.errors import CheckpointError, ConfigError, DataError
from hybrid.primitives.step_timings import StepClock
from hybrid.protocol.learning_rate_schedule import Schedule
from hybrid.protocol.ticket import Purpose, Ticket
from hybrid.protocol.update_rules import UpdateMode
from hybrid.storage.remote_path import StoragePath

# Seeds the random numbers that all trainers draw alike; no trainer has this rank.
_ALL_TRAINERS = 1 << 32


class WrappedModule(LocalModel):
    """The script's module in the form that DDP wraps."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, *args: Any, **keywords: Any) -> Any:
        return self.net(*args, **keywords)


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
        is_saving: whether a checkpoint takes the state dict of the module now.
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
                f"{type(net).__name__} has no hybrid.Embedding or hybrid.EmbeddingBag, and needs no cluster"
            )
        bytes_per_value = 8 if config.train.dtype == "float64" else 4
        specs = [module.spec(name, bytes_per_value) for name, module in modules.items()]
        for spec in specs:
            if spec.optimizer.all_rows and config.train.update == "async":
                rule = f"must be sync or pipelined, since each step updates all rows of table {spec.name}"
                raise ConfigError("train.update", rule, "async")
        placed = backend.place_tables(specs)
        self._barriers = placed.barriers
        self._widths = {spec.dim for spec in specs}
        self._shapes = placed.placement.shapes
        self._mode = placed.rules.mode
        self._tables = ModuleTables(specs, placed.placement, placed.sources, self._clock)
        for name, module in modules.items():
            module.bind(name, self)
        wrapped = WrappedModule(net.to(self.device))
        if not backend.is_single_process and (message := batch_norm_warning(net, config)):
            self._warnings.warn(message)
        mode, shared = DdpMode.NONE, None
        if not backend.is_single_process and any(p.requires_grad for p in net.parameters()):
            mode = DdpMode(config.dense.ddp)
        if mode is not DdpMode.NONE and dist.get_backend(backend.group) == "gloo":
            timeout_seconds = config.cluster.timeout_seconds
            shared = SharedMemoryReduce.join(backend.group, backend.trainer, self.device, timeout_seconds)
        self.model = DdpModel(wrapped, mode, DensePlacement(backend.group), self._clock, shared)
        is_nccl = not backend.is_single_process and dist.get_backend(backend.group) == "nccl"
        self.trainers = TrainerGroup(backend.group, self.device if is_nccl else torch.device("cpu"))
        self._guard = Guard(placed.rules, placed.barriers, backend.group, self.trainers.device)
        self._feed = Feed[LocalBatch](self._tables, [], backend.trainer, self._mode, 1, self._clock)
        self._passes = ForwardPasses(
            self._tables, self.device, backend.trainer, self._warnings, self._require_cluster_backward
        )
        self._graph: Graph | None = None
        self._step_context = ExitStack()
        self._loss: float | None = None  # this trainer's loss of the step, after its backward pass
        # Factor of the step's gradients, once decided; None to skip the step.
        self._scale: float | None = None
        self._stepped: set[int] = set()  # ids of the optimizers that have taken the step
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
        """Yield this trainer's slice of each batch, to train on; to evaluate if gradients are disabled."""
        # Samplers of torch draw from its generator: all trainers must shuffle alike.
        seed_step(self._backend.config.run.seed, _ALL_TRAINERS, self._num_passes, ())
        self._num_passes += 1
        trainer, num_trainers, sites = self._backend.trainer, self._backend.group.size(), self._passes.sites
        if isinstance(data, PreparedData):
            own = data.local_batches(trainer, num_trainers, size, sites, whole)
        else:
            checked = self.trainers.check_batches(global_batches(data, size, whole))
            own = local_batches(checked, trainer, num_trainers, sites, whole)
        if not torch.is_grad_enabled():
            outer = self._passes.evaluation
            try:
                for batch in own:
                    self._passes.evaluation = self._passes.evaluate(batch, self.step)
                    yield batch.values
            finally:
                self._passes.evaluation = outer
            return
        self._feed.begin(own, self.step)
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
                self._passes.training = ForwardPass(current.batch, ticket, lookup)
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
        self._passes.training = self._graph = self._loss = None
        self._stepped.clear()

    def vectors(self, call: TableCall) -> Tensor:
        """See :class:`VectorSource`."""
        return self._passes.vectors(call, self.step)

    def backward(self, terms: Sequence[tuple[Tensor, Tensor | None]]) -> None:
        """Compute the gradients of the sum of weighted means over all trainers' samples.

        Args:
            terms: values and weights of each mean; see :meth:`Cluster.backward`.
        """
        current, graph = self._passes.training, self._graph
        if current is None or graph is None or current.batch is None:
            raise RuntimeError("cluster.backward(...) takes the loss of a batch of cluster.batches(...)")
        if self._loss is not None:
            raise RuntimeError(f"cluster.backward(...) is called again for the batch of step {self.step}")
        own_loss = self._own_loss(terms, current.batch)
        parameters = list(self.model.net.parameters())
        if self.step == 0:
            shapes = [each.shape for each in parameters] + [each.shape[1:] for each in current.batch.tensors]
            self._warnings.check_pairs(own_loss, current.batch.size, self._widths.union(*shapes))
        # The workers wait for the gradients of every lookup, even if the module called no table.
        self._passes.use_prefetched(current)
        loss = own_loss + torch.stack(current.zeros).sum().to(own_loss)
        self._passes.announce_lookups(current, self._barriers, self.step)
        for parameter in parameters:
            parameter.grad = None
        self._is_in_backward = True
        try:
            graph.backward(loss)
        finally:
            self._is_in_backward = False
        self.model.collect(graph.gradients(), is_last=True)
        for trained, gradient in self.model.gradients.items():
            trained.grad = gradient
        self._warnings.note_gradients(self.model.gradients.values())
        self._loss = loss.item()
        self._step_context.close()
        self._guard.check_loss(self.step, self._loss, self.model.first_not_finite)
        if not any(parameter.requires_grad for parameter in parameters):
            self._decide_step()  # no optimizer will

    def _require_cluster_backward(self, *_: object) -> None:
        """Raise if ``cluster.backward`` did not start the running backward pass."""
        if not self._is_in_backward:
            raise RuntimeError(
                "loss.backward() does not train a distributed module: call cluster.backward(loss) with one "
                'loss value per sample (reduction="none"). It takes the mean over the batch of all trainers, '
                "and sends the gradients of the tables to the workers"
            )

    def _own_loss(self, terms: Sequence[tuple[Tensor, Tensor | None]], batch: LocalBatch) -> Tensor:
        """Return this trainer's part of the sum of means over the global batch.

        Raises:
            DataError: there is not one value, or weight, per sample; or a weight is negative or not finite.
        """
        columns = []
        for values, weights in terms:
            values_B = values.reshape(-1)
            if values.dim() == 0 or len(values_B) != batch.size:
                raise DataError(
                    f"cluster.backward takes one loss value per sample, ({batch.size},), not "
                    f'{list(values.shape)}: use reduction="none". For a loss over pairs of the batch, '
                    "compare with cluster.gather(vectors)"
                )
            weights_B = None if weights is None else weights.reshape(-1).to(values_B)
            if weights_B is not None and (
                len(weights_B) != batch.size or not bool((weights_B.isfinite() & (weights_B >= 0)).all())
            ):
                raise DataError("cluster.backward takes one weight per sample, finite and not negative")
            columns.append((values_B, weights_B))
        sums = [weights_B.sum().double() for _, weights_B in columns if weights_B is not None]
        totals = iter(self.trainers.sum(torch.stack(sums)).tolist() if sums else ())
        parts = []
        for values_B, weights_B in columns:
            if weights_B is not None:
                parts.append(weighted_summand(values_B, weights_B, next(totals)))
            elif batch.size:
                # A mean, not a sum over a size: with one trainer it has the bits of torch's mean.
                parts.append(values_B.mean() * (batch.size / batch.global_size))
            else:
                parts.append(values_B.sum())
        return reduce(add, parts)

    def before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Scale or drop the gradients that an optimizer of the module's parameters is about to use.

        Raises:
            RuntimeError: the optimizer has no gradients of a new batch.
        """
        own = {id(parameter) for parameter in self.model.net.parameters()}
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if not any(id(parameter) in own for parameter in parameters):
            return
        if self._loss is None or id(optimizer) in self._stepped:
            raise RuntimeError("optimizer.step() comes after cluster.backward(...), once for each batch")
        if not self._stepped:
            self._warnings.check_gradients(p.grad for p in self.model.gradients)
            self._decide_step()
        self._warnings.check_learning_rate(optimizer)
        self._stepped.add(id(optimizer))
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

    def rows(self, module: TableModule) -> Tensor:
        """Return all rows of a table, (rows, D), as they are now."""
        return self._passes.rows(module, self.step)

    def save(self, folder: StoragePath, optimizer: torch.optim.Optimizer | None) -> None:
        """See :meth:`Cluster.save`."""
        self._feed.flush()
        state = {} if optimizer is None else optimizer.state_dict()["state"]
        self.is_saving = True
        try:
            dense = pack_dense(self.model.net.state_dict(), state)
        finally:
            self.is_saving = False
        self._backend.save(folder, self.step, dense)

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


# All loops of this process. The hook of torch is registered once, and stays.
_LOOPS: weakref.WeakSet[TrainingLoop] = weakref.WeakSet()


def _before_optimizer_step(optimizer: torch.optim.Optimizer, args: Any, keywords: Any) -> None:
    for loop in list(_LOOPS):
        loop.before_optimizer_step(optimizer)


register_optimizer_step_pre_hook(_before_optimizer_step)
