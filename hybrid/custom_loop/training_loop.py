"""The steps of one trainer, driven by the loop of a script.

::

    next batch        send the lookups of the columns that tables name in ``ids``
    model(batch)      a call of a table takes the vectors of these columns, or looks up other ids now
    cluster.backward  gradients of the mean over all trainers; the workers get the gradients of vectors
    optimizer.step    a hook: all trainers together clip or drop gradients, before the update

``step_states.py`` has the states between these calls, and the calls that each state permits.
"""

import copy
import random
import weakref
import zlib
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hybrid.batch import slice_bounds
from hybrid.checkpoint.tensor_file import find_unstorable
from hybrid.custom_loop import step_states
from hybrid.custom_loop.backend import Backend
from hybrid.custom_loop.drawn_negatives import Negatives
from hybrid.custom_loop.embedding_modules import TableCall, TableModule
from hybrid.custom_loop.local_batches import (
    LocalBatch,
    PassSizes,
    PreparedData,
    Slicing,
    count_batches,
    cut,
    cut_last,
    global_batches,
    size_of,
    skip_samples,
    slice_batches,
)
from hybrid.custom_loop.loop_state import PassHistory
from hybrid.custom_loop.loop_warnings import LoopWarnings
from hybrid.custom_loop.step_states import StepCall, StepState
from hybrid.custom_loop.stream_data import StreamData
from hybrid.custom_loop.trainer_group import TrainerGroup
from hybrid.dense.devices import choose_devices
from hybrid.dense.sync_batch_norm import local_statistics, synchronize_batch_norms
from hybrid.embedding.bags import Bags
from hybrid.embedding.trainer.embeddings import ModuleTables
from hybrid.embedding.trainer.lookup import Lookup
from hybrid.engine.ddp import DensePlacement
from hybrid.engine.losses import weighted_summand
from hybrid.engine.step_engine import StepEngine, seed_step
from hybrid.errors import ConfigError, DataError, first_line
from hybrid.primitives.device_copies import to_device
from hybrid.primitives.step_timings import StepClock
from hybrid.updates.barrier import UpdateBarrier
from hybrid.updates.ticket import Purpose, Ticket
from hybrid.updates.update_rules import UpdateMode

_ROWS_PER_LOOKUP = 1 << 16
# A rank that no trainer has: seeds random numbers that must be equal on all trainers.
_ALL_TRAINERS = 1 << 32
_MANY_LOOKUPS = 1 << 30  # a placeholder until the number of lookups of the step is known
_LOOPS = weakref.WeakSet["TrainingLoop"]()


@cache
def _call_before_steps() -> None:
    """Call each loop's ``before_optimizer_step`` before a step of any optimizer; one hook per process.

    The hook is never removed, since that could disturb an optimizer that iterates over its hooks.
    """

    def before_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for loop in list(_LOOPS):
            loop.before_optimizer_step(optimizer)

    register_optimizer_step_pre_hook(before_step)


@dataclass(slots=True)
class CallVectors:
    """The vectors that a call of a table returns."""

    call: TableCall  # keeps its tensors, so that no other call gets its key
    vectors: Tensor
    version: int | None = None  # version counter of the vectors when the module got them; None before


@dataclass
class CurrentBatch:
    """The batch or micro-batch that the script works on, and the lookups of this batch."""

    ticket: Ticket
    # Without samples if the script calls the module on its own tensors.
    batch: LocalBatch = field(default_factory=lambda: LocalBatch({}, 0, 0, Slicing()))
    # The lookup that was sent before the script got the batch; None after its vectors are used.
    prefetched: Lookup | None = None
    is_last: bool = False  # whether it is the last micro-batch of a step
    # Number of the step's lookups whose gradients are sent; the backward pass adds those of this batch.
    num_lookups: int = 0
    vectors: dict[object, CallVectors] = field(default_factory=dict)  # by key of the call
    # For each used lookup, its zero output; see ModuleTables.lookup.
    zeros: list[Tensor] = field(default_factory=list)
    # Factor of the step's gradients; None until it is decided, and if the step is dropped.
    scale: float | None = None
    optimizers: set[int] = field(default_factory=set)  # ids of the optimizers that have taken the step


class TrainingLoop:
    """The steps of one trainer, which the script drives by calls of ``Cluster`` and of its optimizers.

    Attributes:
        device: the device of the module.
        model: the module under DDP, and its gradients.
        placed: the tables of the module, and their workers.
        trainers: collective operations of all trainers.
        history: the passes over training batches.
        warnings: warnings about the script.
        optimizers: the optimizers of the module's parameters, in the order of first use.
        pass_sizes: the sizes of the slices of the latest pass.
        is_saving: True while a checkpoint reads the module's state dict. Otherwise, a read is an error.
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
        self.warnings = LoopWarnings(backend, any(spec.optimizer.has_momentum for spec in specs))
        self.placed = placed = backend.create_tables(specs)
        self._rules = placed.rules
        self._purpose = Purpose.TRAIN if placed.rules.mode is UpdateMode.SYNC else Purpose.PREFETCH
        self._tables = ModuleTables(specs, placed.placement, placed.workers, clock)
        self._modules = list(modules.values())
        # As the reference of hybrid compare, one process looks up all ids when they are used.
        is_reference = backend.is_single_process and backend.snapshot is not None
        # The tables whose columns are looked up before the module runs.
        self._prefetching = [] if is_reference else self._modules
        for name, module in modules.items():
            module.bind(name, self)
        self.is_saving = True
        if (problem := find_unstorable(net.state_dict())) is not None:
            raise DataError(f"{type(net).__name__}: {problem}")
        self.is_saving = False
        net.to(self.device)
        if not backend.is_single_process and (warning := synchronize_batch_norms(net, config, backend.group)):
            self.warnings.warn(warning)
        self._engine = StepEngine[LocalBatch](
            config,
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
        self.trainers = TrainerGroup(backend.group)
        self.history = PassHistory(self.warnings)
        self._state = StepState.NEW
        # The batches that the script has: of a pass over training data, and of an evaluation.
        self._training: CurrentBatch | None = None
        self._evaluation: CurrentBatch | None = None
        self.optimizers = weakref.WeakKeyDictionary[torch.optim.Optimizer, None]()
        self.pass_sizes = PassSizes()
        self._last_size = 0  # size of a smaller last batch, until the module is tried with a slice of it
        self._is_trying = False
        loop = weakref.ref(self)  # hooks of parameters must not keep it alive

        def after_gradient(_: Tensor) -> None:
            if (live_loop := loop()) is not None:
                live_loop._check_gradient()

        for parameter in net.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(after_gradient)
        _call_before_steps()
        _LOOPS.add(self)

    @property
    def step(self) -> int:
        """Number of steps taken."""
        return self._engine.step

    @property
    def remaining_steps(self) -> int | None:
        """Number of steps until ``train.max_steps`` are taken; None without this limit."""
        max_steps = self._config.train.max_steps
        return max(0, max_steps - self.step) if max_steps else None

    @property
    def has_batch(self) -> bool:
        """Whether the script has a batch of a training pass."""
        return self._training is not None

    def advance(self, call: StepCall) -> None:
        """Change the state as ``call`` does; RuntimeError if the state does not permit the call."""
        self._state = call.state_after(self._state, self.step)

    def _current(self, call: StepCall) -> CurrentBatch:
        call.state_after(self._state, self.step)
        assert self._training is not None, "the state has a batch"
        return self._training

    def evaluation_batches(self, slices: Iterator[LocalBatch]) -> Iterator[Any]:
        """Send the lookups of each slice and yield its columns; DataError if trainers' batches differ."""
        outer, checksum = self._evaluation, 0
        self.pass_sizes = PassSizes()
        try:
            for batch in slices:
                checksum = zlib.crc32(batch.checksum.to_bytes(4, "little"), checksum)
                ticket = self._evaluation_ticket()
                prefetched = self._tables.lookup(batch.sparse_features, ticket) if batch.calls else None
                self._evaluation = CurrentBatch(ticket, batch, prefetched)
                self.pass_sizes.add(batch)
                yield batch.device_columns
            self.trainers.check_equal(checksum)
        finally:
            self._evaluation = outer

    def slices(
        self, data: Any, slicing: Slicing, negatives: Mapping[str, Negatives], index: int, first_sample: int
    ) -> Iterator[LocalBatch]:
        """Return an iterator over the slices of pass ``index``, from sample ``first_sample`` on."""
        slicing = replace(slicing, tables=self._prefetching, device=self.device)
        num_equal, last = count_batches(data, slicing) if torch.is_grad_enabled() else (0, 0)
        steps, is_compared = self.remaining_steps, self._backend.snapshot is not None
        if isinstance(data, StreamData):
            slices = data.slices(slicing)
        elif isinstance(data, PreparedData):
            if is_compared and last and slicing.whole is None and steps is not None and steps <= num_equal:
                # So that the last of the compared steps has the last, smaller batch.
                first_sample = (len(data) - last) // num_equal * (num_equal - steps + 1)
            slices = data.slices(slicing, index, first_sample)
        else:
            remaining = skip_samples(self._seeded(global_batches(data, slicing), index), first_sample)
            slices = slice_batches(cut_last(remaining, steps, last) if is_compared else remaining, slicing)
        if self.step == 0 and slicing.whole is None and not self._backend.is_single_process:
            self._last_size = last if steps is None or steps > num_equal else 0

        if not negatives:
            return slices

        def drawn(step: int) -> dict[str, Tensor]:
            columns = (each.columns(name, self._config.run.seed, step) for name, each in negatives.items())
            return dict(ChainMap(*columns))

        return (replace(each, drawn=drawn(step)) for step, each in enumerate(slices, self.step))

    def _seeded(self, batches: Iterator[Any], index: int) -> Iterator[Any]:
        """Yield batches; seed the CPU generators before each, so that all trainers draw the same numbers."""
        for number in count():
            seed_step(self._config.run.seed, _ALL_TRAINERS + index, number, ())
            if (batch := next(batches, None)) is None:
                return
            yield batch

    def training_batches(
        self, slices: Iterator[LocalBatch], before_step: Callable[[], None]
    ) -> Iterator[Any]:
        """Yield the columns of each micro-batch, and call ``before_step`` before each step.

        Raises:
            RuntimeError: the script has called ``load``, begun another pass, or not completed a batch.
        """
        self.advance(step_states.LEAVE_PASS)
        self._training = current = None
        self.pass_sizes = sizes = PassSizes()
        self._engine.begin(slices, self.step)
        try:
            for batch, micro_batches in self._engine.steps(self.remaining_steps, before_step):
                num_lookups = 0
                for each in micro_batches:
                    with self._engine.recording(each) as micro:
                        self.advance(step_states.NEXT_BATCH)
                        ticket = micro.ticket._replace(purpose=self._purpose)
                        current = CurrentBatch(ticket, micro.batch, micro.lookup, micro.is_last, num_lookups)
                        self._training = current
                        sizes.add(micro.batch)
                        yield micro.batch.device_columns
                        self.pass_sizes = sizes  # the script may have evaluated meanwhile
                    if self._training is not current:
                        raise RuntimeError(
                            "cluster.load(...), or a pass over other training batches, has ended this pass: "
                            "leave the pass first"
                        )
                    self.advance(step_states.END_BATCH)
                    num_lookups = current.num_lookups
                self.history.now.samples += batch.global_size
            self.flush()  # raises the errors of the last step
            if self.remaining_steps != 0:
                self.history.end_pass()
        finally:
            if self._training is current:  # an interrupted loop may end after the next one has begun
                self._training = None
                self.advance(step_states.LEAVE_PASS)

    def flush(self) -> None:
        """Wait until workers have the gradients of all steps. RuntimeError if a step is incomplete."""
        step_states.FLUSH.state_after(self._state, self.step)
        self._engine.flush()

    def continue_from(self, step: int) -> None:
        """Continue with the number of steps of a loaded checkpoint. An unfinished pass over data ends."""
        self.advance(step_states.LEAVE_PASS)
        self._engine.begin(iter(()), step)
        self._training = None

    def _evaluation_ticket(self) -> Ticket:
        return Ticket(self._backend.trainer, self.step, self.step, purpose=Purpose.PREDICT)

    def vectors(self, call: TableCall) -> Tensor:
        """Return the vectors of a call of a table: one per bag, or one per id that is no padding.

        The vectors were looked up before the batch was yielded, or are looked up now. As with ``torch.nn``,
        the script may change them in place, without an effect on other calls.

        RuntimeError if gradients are enabled, and the script has no training batch.
        """
        if self._is_trying:
            size = call.module.request(call)[1].num_bags, call.module.embedding_dim
            return torch.zeros(size, dtype=getattr(torch, self._config.train.dtype), device=self.device)
        if torch.is_grad_enabled():
            current = self._current(step_states.CALL_TABLE)
        else:
            current = self._evaluation or CurrentBatch(self._evaluation_ticket())
        self._use_prefetched(current)
        known = current.vectors.get(call.key)
        if known is None or (known.version is not None and known.version != known.vectors._version):
            ticket = current.ticket
            if current is self._training:  # lower indices belong to prefetched lookups
                index = self._rules.micro_batches + current.num_lookups + len(current.zeros)
                ticket = ticket._replace(lookup_index=index)
            self._use(current, self._tables.lookup([call.module.request(call)], ticket), [call])
            if known is None and current is self._training and call.ids.numel() and self._prefetching:
                self.warnings.warn(
                    f"table {call.module.name} is called with ids that are not looked up before the module "
                    "runs. Each such call waits for a separate request. For speed, put the ids, and their "
                    'weights, into the batch, and name their columns, as in hybrid.Embedding(..., ids="user")'
                )
            known = current.vectors[call.key]
        if known.version is not None or known.vectors.is_inference():
            return to_device(known.vectors.clone(), self.device)
        known.version = known.vectors._version
        return to_device(known.vectors, self.device)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def module_to_call(self, inputs: Any) -> nn.Module:
        """Return the module under DDP, for a call with ``inputs``; all trainers call it together.

        If the last batch of the data is smaller, the first call on a cluster tests a copy of the module with
        as few samples as this trainer will get of the last batch. Batches with ``whole`` are not tested.

        Raises:
            DataError: the copy fails with these few samples, but not with the samples of the first batch.
        """
        last, self._last_size = self._last_size, 0
        batch = None if self._training is None else self._training.batch
        if last and batch is not None and inputs is batch.device_columns:
            start, stop = slice_bounds(last, self._backend.trainer, self._backend.group.size())
            size = max((stop - start) // self._rules.micro_batches, 1)
            error = self._try(inputs, batch.drawn, size) if last < batch.global_size else None
            if error is not None and self._try(inputs, batch.drawn, batch.padded_size) is None:
                text = f"{type(error).__name__}: {first_line(error)}"
                raise DataError(
                    f"the module fails with {size} sample(s), which trainer {self._backend.trainer} gets of "
                    f"the last batch: {text}. Correct it, or call cluster.batches(..., drop_last=True)"
                ) from error
        module: nn.Module = self.model.follow_parameters()
        return module

    def _try(self, batch: Any, drawn: Mapping[str, Tensor], size: int) -> Exception | None:
        """Call a copy of the module with ``size`` samples and zeros as vectors; return its error or None."""
        kept = {name: batch[name] for name in drawn}
        batch = {name: each for name, each in batch.items() if name not in drawn} if drawn else batch
        shared = {id(each): each for each in (*self.model.net.parameters(), *self._modules)}
        states = random.getstate(), np.random.get_state()
        self._is_trying = True
        try:
            size_of(batch)  # the script may have added tensors of other sizes
            kind = self.device.type
            forked = torch.random.fork_rng([] if kind == "cpu" else [self.device], device_type=kind)
            with torch.no_grad(), forked, torch.compiler.set_stance("force_eager"), local_statistics():
                samples = cut(batch, 0, size)
                copy.deepcopy(self.model.net, shared)({**samples, **kept} if kept else samples)
        except Exception as error:  # user code may raise anything
            return error
        finally:
            self._is_trying = False
            random.setstate(states[0])
            np.random.set_state(states[1])
        return None

    def _use_prefetched(self, current: CurrentBatch) -> None:
        if current.prefetched is not None:
            self._use(current, current.prefetched, current.batch.calls)
            current.prefetched = None

    def _use(self, current: CurrentBatch, lookup: Lookup, calls: Sequence[TableCall]) -> None:
        """Wait for the vectors of a lookup, and store them in ``current``, one tensor per call."""
        *vectors, zero = lookup.outputs()
        current.zeros.append(zero)
        if zero.grad_fn is not None:
            zero.grad_fn.register_prehook(self._check_gradient)
        for call, each in zip(calls, vectors, strict=True):
            current.vectors[call.key] = CallVectors(call, each)

    def rows(self, module: TableModule) -> Tensor:
        """Return all rows of a table that does not grow, (rows, D), as they are now."""
        ticket = self._evaluation_ticket()
        blocks = torch.arange(module.num_embeddings).split(_ROWS_PER_LOOKUP)
        requests = ([(module.name, Bags(ids))] for ids in blocks)
        return torch.cat([self._tables.lookup(request, ticket).outputs()[0] for request in requests])

    def backward(self, terms: Sequence[tuple[Tensor, Tensor | None]]) -> None:
        """Compute the gradients of a sum of weighted means. :meth:`Cluster.backward` lists the errors.

        Args:
            terms: for each mean, the values per sample, and the weights or None.
        """
        current = self._current(step_states.BACKWARD)
        if self._rules.micro_batches > 1 and any(weights is not None for _, weights in terms):
            rule = "must be 1 for a loss with weights, whose sum is known only after the last micro-batch"
            raise ConfigError("train.micro_batches", rule, self._rules.micro_batches)
        local_loss = self._local_loss(terms, current.batch)
        if not local_loss.requires_grad:
            raise RuntimeError("the loss does not depend on the module: it was detached, or has no graph")
        parameters = list(self.model.net.parameters())
        # The workers wait for the gradients of every lookup, even if the module called no table.
        self._use_prefetched(current)
        zero = torch.stack(current.zeros).sum().to(local_loss.dtype)
        loss = local_loss + to_device(zero, local_loss.device)
        current.num_lookups += len(current.zeros)
        if current.num_lookups != current.ticket.lookup_index + 1:  # not one lookup per micro-batch so far
            number = current.num_lookups if current.is_last else _MANY_LOOKUPS
            trainer, method = self._backend.trainer, UpdateBarrier.set_num_lookups
            workers = self.placed.workers.values()
            for call in [each.call_barrier(method, trainer, self.step, number) for each in workers]:
                call.wait()
        for parameter in parameters:
            parameter.grad = None
        self.advance(step_states.BACKWARD)
        try:
            self._engine.backward(loss)
        except BaseException:
            self.advance(step_states.LEAVE_PASS)
            raise
        if not current.is_last:
            self.advance(step_states.END_BACKWARD)
            return
        self.advance(step_states.END_LAST_BACKWARD)
        for trainable, gradient in self.model.gradients.items():
            trainable.grad = gradient
        self.warnings.note_gradients(self.model.gradients.values())
        if not any(parameter.requires_grad for parameter in parameters):  # no optimizer calls the hook
            self._engine.decide()
            self.advance(step_states.OPTIMIZER_STEP)

    def _check_gradient(self, *_: object) -> None:
        """Raise RuntimeError if autograd computes a gradient outside of ``cluster.backward``."""
        self.advance(step_states.ADD_GRADIENT)

    def _local_loss(self, terms: Sequence[tuple[Tensor, Tensor | None]], batch: LocalBatch) -> Tensor:
        """Return this trainer's summand of the global loss; DataError for invalid values or weights."""
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
                # A mean, not a sum divided by a size, to be bit-identical to torch's mean with one trainer.
                summands.append(values_B.mean() * (batch.size / batch.global_size))
            else:
                summands.append(values_B.sum())
        return sum(summands[1:], summands[0])

    def before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Scale or drop the gradients before a step of the module's optimizer; ignore other optimizers.

        Raises:
            NonFiniteError: a gradient is not finite, and ``train.non_finite`` is "stop".
            RuntimeError: there are no gradients of a new batch; the optimizer has parameters outside the
                module; or the script has changed the optimizer's momentum, and a table has momentum, too.
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
        current = self._current(step_states.OPTIMIZER_STEP)
        if id(optimizer) in current.optimizers:
            raise RuntimeError(step_states.OPTIMIZER_STEP.error)
        if self._state is StepState.REDUCED:
            self.warnings.check_gradients(p.grad for p in self.model.gradients)
            current.scale = self._engine.decide()
        self.advance(step_states.OPTIMIZER_STEP)
        self.warnings.check_settings(optimizer)
        current.optimizers.add(id(optimizer))
        self.optimizers[optimizer] = None
        for parameter in parameters:
            if current.scale is None:
                parameter.grad = None
            elif current.scale != 1.0 and parameter.grad is not None:
                parameter.grad = parameter.grad * current.scale
