"""The steps of one trainer, driven by a loop of the user's own.

::

    next batch     its ids are known: look up what the passes before have called tables with
    module         a call of a table takes its vectors; one with other ids looks them up now
    backward       a value a sample, weighed over all trainers; gradients leave for the tables
    optimizer      the same step for every parameter and every row, or for none: torch has a hook before each
"""

from __future__ import annotations

import warnings
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

from hybrid.checkpoint.checkpoint_files import DENSE_FILE
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.checkpoint.dense_state import load_state, pack_dense, unpack_dense
from hybrid.custom_loop.backend import Host
from hybrid.custom_loop.embedding_modules import Call, TableModule
from hybrid.custom_loop.forward_pass import Passes
from hybrid.custom_loop.global_batches import Share, global_batches, shares
from hybrid.custom_loop.loop_config import check_tables
from hybrid.custom_loop.loop_warnings import LoopWarnings
from hybrid.custom_loop.prepared_batches import PreparedData
from hybrid.custom_loop.trainer_group import Trainers
from hybrid.dense.custom_net import batch_norm_warning
from hybrid.dense.dense_optimizer import DenseOptimizer
from hybrid.dense.devices import choose_devices
from hybrid.embedding.trainer.module_lookups import AskedTables
from hybrid.engine.backward import Graph, record_graph
from hybrid.engine.ddp import DdpMode, DdpModel
from hybrid.engine.dense_placement import DensePlacement
from hybrid.engine.gradient_reduction import SharedMemoryReduce
from hybrid.engine.hybrid_model import LocalModel
from hybrid.engine.losses import weighted_part
from hybrid.engine.step_feed import Feed, StepInput
from hybrid.engine.train_step import seed_step
from hybrid.engine.update_guard import Guard
from hybrid.errors import CheckpointError, DataError
from hybrid.primitives.step_timings import StepClock
from hybrid.protocol.learning_rate_schedule import Schedule
from hybrid.protocol.ticket import Purpose, Ticket
from hybrid.protocol.update_rules import UpdateMode
from hybrid.storage.remote_path import StoragePath

_NO_TRAINER = 1 << 32  # whose random numbers are those that all trainers draw alike


class OwnModule(LocalModel):
    """A module of the user's own, as DDP wraps it."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, *args: Any, **keywords: Any) -> Any:
        return self.net(*args, **keywords)


class Loop:
    """One trainer's part in the steps of all.

    Args:
        host: where it runs.
        net: the user's module; its tables are found in it, and bound.

    Attributes:
        model: the module under DDP, and its gradients.
        trainers: all of them.
        device: where the module computes.
        step: how many are taken.
    """

    def __init__(self, host: Host, net: nn.Module) -> None:
        self._host = host
        config = host.config
        self._devices = choose_devices(config.dense, host.trainer)
        self.device = self._devices[0]
        self._clock = StepClock()
        modules = _tables_in(net)
        specs = [
            module.spec(name, 8 if config.train.dtype == "float64" else 4) for name, module in modules.items()
        ]
        check_tables(config, specs)
        deployed = host.deploy(specs)
        self._hosted = deployed.hosted
        self._widths = {spec.dim for spec in specs}
        self._shapes = deployed.placement.shapes
        self._mode = deployed.rules.mode
        self._tables = AskedTables(specs, deployed.placement, deployed.sources, self._clock)
        for name, module in modules.items():
            module.bind(name, self)
        self.model = self._wrapped(net)
        self.trainers = Trainers(host.group, self._reducing_device)
        self._guard = Guard(deployed.rules, deployed.hosted, host.group, self.trainers.device)
        self._feed = Feed[Share](self._tables, [], host.trainer, self._mode, 1, self._clock)
        self._warnings = LoopWarnings(host)
        self._passes = Passes(
            self._tables, self.device, host.trainer, self._warnings, self._refuse_plain_backward
        )
        self._graph: Graph | None = None
        self._entered = ExitStack()
        self._loss: float | None = None  # of the step under way, once its backward pass is done
        self._scale: float | None = None  # of its gradients, once that is decided
        self._stepped: set[int] = set()  # the optimizers that have taken it
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # all that have
        _LOOPS.add(self)
        self._num_passes = 0
        self.step = 0
        self.is_saving = False
        self._is_in_backward = False
        for parameter in net.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._refuse_plain_backward)

    def _wrapped(self, net: nn.Module) -> DdpModel:
        host, dense = self._host, self._host.config.dense
        module = OwnModule(net.to(self.device))
        if host.trainer == 0 and not host.is_alone and (text := batch_norm_warning(net, host.config)):
            warnings.warn(text, stacklevel=2)
        is_reduced = not host.is_alone and any(p.requires_grad for p in net.parameters())
        mode = DdpMode(dense.ddp) if is_reduced else DdpMode.NONE
        shared = None
        if mode is not DdpMode.NONE and dist.get_backend(host.group) == "gloo":
            timeout_seconds = host.config.cluster.timeout_seconds
            shared = SharedMemoryReduce.join(host.group, host.trainer, self.device, timeout_seconds)
        return DdpModel(module, mode, DensePlacement(host.group), self._clock, shared)

    @property
    def _reducing_device(self) -> torch.device:
        is_nccl = not self._host.is_alone and dist.get_backend(self._host.group) == "nccl"
        return self.device if is_nccl else torch.device("cpu")

    def batches(self, data: Any, size: int | None, whole: str | None) -> Iterator[Any]:
        """This trainer's shares of all batches, to train on; to evaluate where gradients are disabled."""
        self._seed_pass()
        trainer, num_trainers = self._host.trainer, self._host.group.size()
        if isinstance(data, PreparedData):
            own = data.shares(trainer, num_trainers, size, self._passes.sites, whole)
        else:
            batches = self.trainers.checked(global_batches(data, size, whole))
            own = shares(batches, trainer, num_trainers, self._passes.sites, whole)
        if not torch.is_grad_enabled():
            yield from self._evaluating(own)
            return
        self._feed.begin(own, self.step)
        try:
            for current in self._up_to_the_last(self._feed):
                step = self.step
                (micro_batch,) = current.micro_batches
                self._begin(current.batch, micro_batch.start)
                yield current.batch.values
                self._refuse_untrained(step)
        finally:
            self._drop()

    def _up_to_the_last(self, inputs: Iterator[StepInput[Share]]) -> Iterator[StepInput[Share]]:
        """As many steps as ``train.max_steps`` leaves, if it is set."""
        most = self._host.config.train.max_steps
        while not most or self.step < most:
            if (current := next(inputs, None)) is None:
                return
            yield current
        if self._host.snapshot is not None:
            (optimizer,) = (*self._optimizers, None)[:1]
            self.save(self._host.snapshot, optimizer)
            self._host.snapshot = None

    def _seed_pass(self) -> None:
        """Have all trainers shuffle alike: torch's samplers draw from its generator."""
        seed_step(self._host.config.run.seed, _NO_TRAINER, self._num_passes, ())
        self._num_passes += 1

    def _evaluating(self, own: Iterator[Share]) -> Iterator[Any]:
        before = self._passes.evaluated
        try:
            for share in own:
                self._passes.evaluated = self._passes.evaluate(share, self.step)
                yield share.values
        finally:
            self._passes.evaluated = before

    def _begin(self, share: Share, start: Any) -> None:
        """Open the step of a batch: its graph, and its lookup."""
        self._drop()
        seed_step(self._host.config.run.seed, self._host.trainer, self.step, self._devices)
        is_sync = self._mode is UpdateMode.SYNC
        spans_processes = is_sync and not self._host.is_alone
        self._graph = self._entered.enter_context(record_graph(self.model.net, spans_processes))
        purpose = Purpose.TRAIN if is_sync else Purpose.PREFETCH
        ticket = Ticket(self._host.trainer, self.step, self.step, purpose=purpose)
        self._passes.trained = self._passes.begin(share, ticket, start())

    def _drop(self) -> None:
        """Close what a step has open."""
        self._entered.close()
        self._passes.trained = self._graph = self._loss = None
        self._stepped.clear()

    def _refuse_untrained(self, step: int) -> None:
        if self.step != step + 1:
            missing = "cluster.backward(...)" if self._loss is None else "optimizer.step()"
            raise RuntimeError(
                f"{missing} was not called for the batch of step {step}; every batch is trained on once, "
                "but for those that are asked for under torch.no_grad()"
            )

    def vectors(self, call: Call) -> Tensor:
        """The vectors of a call of a table, on this trainer's device; see :class:`Asker`."""
        return self._passes.vectors(call, self.step)

    def backward(self, terms: Sequence[tuple[Tensor, Tensor | None]]) -> None:
        """Take the gradients of the sum of the means of some values, by their weights, over all trainers'
        samples; see :meth:`Cluster.backward`."""
        current, graph = self._passes.trained, self._graph
        if current is None or graph is None or current.share is None:
            raise RuntimeError("cluster.backward(...) takes the loss of a batch of cluster.batches(...)")
        if self._loss is not None:
            raise RuntimeError(f"cluster.backward(...) is called again for the batch of step {self.step}")
        part = self._part_of_means(terms, current.share)
        if self.step == 0:
            shapes = [p.shape for p in self.model.net.parameters()] + [
                t.shape[1:] for t in current.share.tensors
            ]
            self._warnings.check_pairs(part, current.share.size, self._widths.union(*shapes))
        current.take_ahead()  # where no table was called, the workers wait for gradients all the same
        loss = part + sum(current.zeros).to(part)  # type: ignore[union-attr]  # there is one at least
        self._passes.expect(current, self._hosted, self.step)
        for parameter in self.model.net.parameters():
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
        self._entered.close()
        self._guard.check_loss(self.step, self._loss, self.model.first_not_finite)
        if not any(parameter.requires_grad for parameter in self.model.net.parameters()):
            self._decide()  # no optimizer will

    def _refuse_plain_backward(self, *_: object) -> None:
        """Raise if ``cluster.backward`` did not start the backward pass that is under way."""
        if not self._is_in_backward:
            raise RuntimeError(
                "loss.backward() does not train a distributed module: call cluster.backward(loss) with one "
                'loss value per sample (reduction="none"). It takes the mean over the batch of all trainers, '
                "and sends the gradients of the tables to the workers"
            )

    def _part_of_means(self, terms: Sequence[tuple[Tensor, Tensor | None]], share: Share) -> Tensor:
        """This trainer's part of the means over the global batch."""
        columns = [_columns(values, weights, share) for values, weights in terms]
        sums = [weights_B.sum().double() for _, weights_B in columns if weights_B is not None]
        totals = iter(self.trainers.sum(torch.stack(sums)).tolist() if sums else ())
        parts = []
        for values_B, weights_B in columns:
            if weights_B is not None:
                parts.append(weighted_part(values_B, weights_B, next(totals)))
            elif share.size:
                # Not a sum over a size: with one trainer it has the bits of torch's own mean.
                parts.append(values_B.mean() * (share.size / share.global_size))
            else:
                parts.append(values_B.sum())
        return reduce(add, parts)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Scale, or drop, the gradients that an optimizer of the module's parameters is about to take.

        Raises:
            RuntimeError: it has no gradients of a new batch.
        """
        own = {id(parameter) for parameter in self.model.net.parameters()}
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if not any(id(parameter) in own for parameter in parameters):
            return
        if self._loss is None or id(optimizer) in self._stepped:
            raise RuntimeError("optimizer.step() comes after cluster.backward(...), once for each batch")
        if not self._stepped:
            self._warnings.check_gradients(p.grad for p in self.model.gradients)
            self._decide()
        self._warnings.check_learning_rate(optimizer)
        self._stepped.add(id(optimizer))
        self._optimizers.add(optimizer)
        for parameter in parameters:
            if self._scale is None:
                parameter.grad = None
            elif self._scale != 1.0 and parameter.grad is not None:
                parameter.grad = parameter.grad * self._scale

    def _decide(self) -> None:
        """Agree with all trainers on what becomes of the step; the first of several optimizers asks."""
        assert self._loss is not None
        norm = self.model.squared_norm()
        self._scale = self._guard.decide(self.step, self._loss, norm, self.model.gradient_not_finite)
        self._clock.end_step()
        self.step += 1

    def rows(self, module: TableModule) -> Tensor:
        """All rows of a table, (rows, D), as they are now."""
        return self._passes.rows(module, self.step)

    def save(self, folder: StoragePath, optimizer: torch.optim.Optimizer | None) -> None:
        """See :meth:`Cluster.save`."""
        self._feed.settle()
        state = {} if optimizer is None else optimizer.state_dict()["state"]
        self.is_saving = True
        try:
            dense = pack_dense(self.model.net.state_dict(), state)
        finally:
            self.is_saving = False
        self._host.save(folder, self.step, dense)

    def load(self, folder: StoragePath, optimizer: torch.optim.Optimizer | None) -> None:
        """See :meth:`Cluster.load`."""
        stored = Checkpoint.open(folder)
        if stored.manifest.tables.keys() != self._shapes.keys():
            raise CheckpointError(
                f"{folder}: is of another model: it has the tables "
                f"{', '.join(sorted(stored.manifest.tables))}, not {', '.join(sorted(self._shapes))}"
            )
        net, state = unpack_dense(stored.tensors(DENSE_FILE))
        load_state(self.model.net, net, folder)
        if optimizer is not None:
            DenseOptimizer(optimizer, Schedule()).load(state, folder)
        self._host.load(stored)
        self.step = stored.manifest.step


def _columns(values: Tensor, weights: Tensor | None, share: Share) -> tuple[Tensor, Tensor | None]:
    """One value of each sample of a share, and one weight; DataError where there are others."""
    values_B = values.reshape(-1)
    if values.dim() == 0 or len(values_B) != share.size:
        raise DataError(
            f"cluster.backward takes one value a sample, ({share.size},), not {list(values.shape)}; "
            'have the loss reduce nothing: reduction="none"'
        )
    if weights is None:
        return values_B, None
    weights_B = weights.reshape(-1).to(values_B)
    if len(weights_B) != share.size or bool((weights_B < 0).any()) or not bool(weights_B.isfinite().all()):
        raise DataError("weights are one for each sample, finite and not negative")
    return values_B, weights_B


# Those of this process; torch's hook, registered once, outlives each of them.
_LOOPS: weakref.WeakSet[Loop] = weakref.WeakSet()


def _before_step(optimizer: torch.optim.Optimizer, args: Any, keywords: Any) -> None:
    for loop in list(_LOOPS):
        loop.before_step(optimizer)


register_optimizer_step_pre_hook(_before_step)


def _tables_in(net: nn.Module) -> dict[str, TableModule]:
    """The tables of a module, by their place in it.

    Raises:
        DataError: there are none.
    """
    found = {name: module for name, module in net.named_modules() if isinstance(module, TableModule)}
    if not found:
        raise DataError(
            f"{type(net).__name__} has no hybrid.Embedding or hybrid.EmbeddingBag, and needs no cluster"
        )
    return found
