"""The steps of one trainer: micro-batches, lookups, the backward pass, and the decision about the update.

The caller is ``workers/controller/remote_trainer.py`` for a configured run, and
``hybrid/custom_loop/training_loop.py`` for the loop of a script::

    for each step       seed the random numbers
      micro-batch       recording: in sync mode, the lookup is sent, else it was sent earlier; the caller
                        computes the forward pass and the loss
                        backward: gradients of vectors go to the tables; gradients of the net are summed
      decide            with clipping or skipping, all trainers agree on the factor of the gradients
                        the caller updates the net

When lookups and gradients are sent depends on ``train.update``::

    sync        step s     look up s ── compute s, send its gradients
                step s+1                          look up s+1 ── compute s+1, send its gradients

    lookahead   step s     compute s, send its gradients with the lookup of s+1
    async       step s     compute s, send its gradients with the lookup of s+2

A lookup that is sent before its step begins is **prefetched**. When a pass over batches begins, no gradients
are left to send, so the lookup of its first step (in async mode, of its first two steps) has its own message.
In lookahead mode, a worker responds to the lookup of step s+1 once update s is applied. The vectors of
prefetched lookups enter the graph as values, and separate messages return their gradients. Without a remote
net, this graph is local, and its backward pass needs no distributed autograd.
"""

import itertools
import math
import random
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from hashlib import blake2b
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar, TypeVarTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import autograd as dist_autograd

from hybrid.config import RunConfig
from hybrid.embedding.trainer.embeddings import Embeddings, ModuleTables
from hybrid.engine.ddp import DdpMode, DdpModel, DensePlacement
from hybrid.engine.hybrid_model import HybridModel, MicroBatch
from hybrid.errors import NonFiniteError
from hybrid.primitives.pending_result import PendingResult
from hybrid.primitives.step_timings import StepClock
from hybrid.shared_memory.shared_slots import SharedSlots
from hybrid.updates.barrier import UpdateBarrier
from hybrid.updates.ticket import Purpose, Ticket
from hybrid.updates.update_rules import UpdateMode, UpdateRules

AnySamples = TypeVar("AnySamples", bound="Samples")
Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")
_CLIP_EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_
_REMEDY = 'lower the learning rates, look at the data, or set train.clip_norm or train.non_finite = "skip"'


class GuardedModule(Protocol):
    """A module on a worker, or its stub, whose updates wait until trainers decide to apply or drop them."""

    def squared_norm(self, step: int) -> PendingResult[float]:
        """Return the squared norm of a step's gradients, which is pending until all gradients arrive."""

    def call_barrier(
        self, method: Callable[[UpdateBarrier[Any], *Arguments], Result], *args: *Arguments
    ) -> PendingResult[Result]:
        """Call a method of the module's :class:`UpdateBarrier`, and return its pending result."""


class Samples(Protocol):
    """The attributes and methods of a batch that :class:`StepEngine` needs."""

    @property
    def checksum(self) -> int:
        """Checksum of the global batch, which workers compare among trainers; 0 for no comparison."""

    @property
    def sparse_features(self) -> Any:
        """The ids of the batch, as :meth:`Embeddings.lookup` or :meth:`ModuleTables.lookup` takes them."""

    def split(self, count: int) -> Sequence[Self]: ...


class StepInput(NamedTuple, Generic[AnySamples]):
    """The input of one step of one trainer."""

    batch: AnySamples
    micro_batches: list[MicroBatch[AnySamples]]


def seed_step(seed: int, trainer: int, step: int, devices: Iterable[torch.device]) -> None:
    """Seed the default generators of Python, NumPy, torch's CPU and ``devices`` for one step of one trainer.

    So dropout masks and other random numbers depend only on the arguments, and checkpoints need no generator
    state. ``torch.manual_seed`` would take 70 times as long, since it seeds all kinds of devices.
    """
    packed = struct.pack("<3Q", seed, trainer, step)
    digest = int.from_bytes(blake2b(packed, digest_size=8).digest(), "little")
    random.seed(digest)
    np.random.seed(digest % 2**32)
    torch.default_generator.manual_seed(digest)
    for device in devices:
        if device.type != "cpu":
            torch.get_device_module(device).default_generators[device.index].manual_seed(digest)


class StepEngine(Generic[AnySamples]):
    """The engine that runs the steps of one trainer.

    Args:
        group: all trainers.
        tables: sends the lookups and the gradients of tables.
        workers: the module with the tables of each worker; used to clip gradients and skip updates.
        model: the module to train; the stages of a ``HybridModel`` may be wrapped in place.
        is_single_process: whether this process holds the tables, and there are no other trainers.

    Attributes:
        model: the module under DDP, and the gradients of its parameters.
        step: number of completed steps, which is also the index of the current or next step.

    Raises:
        ClusterError: shared memory cannot be set up, or a trainer does not connect to it in time.
        ConfigError: ``dense.ddp`` does not fit the model.
    """

    def __init__(
        self,
        config: RunConfig,
        group: dist.ProcessGroup,
        rules: UpdateRules,
        tables: Embeddings | ModuleTables,
        workers: Mapping[int, GuardedModule],
        remote_net: GuardedModule | None,
        model: nn.Module,
        placement: DensePlacement,
        devices: Sequence[torch.device],
        clock: StepClock,
        *,
        is_single_process: bool = False,
    ) -> None:
        self._seed = config.run.seed
        self._group = group
        self._trainer = group.rank()
        self._devices = devices
        self._clock = clock
        self._tables = tables
        self._rules = rules
        mode = DdpMode(config.dense.ddp)
        shared_reduce = None
        num_bytes = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        if is_single_process or (not num_bytes and mode is DdpMode.INSIDE):
            mode = DdpMode.NONE
        if mode is not DdpMode.NONE and num_bytes and dist.get_backend(group) == "gloo":
            is_cpu, seconds = devices[0].type == "cpu", config.cluster.timeout_seconds
            shared_reduce = SharedSlots.join(placement.group, group.rank(), num_bytes, is_cpu, seconds)
        self._hybrid_model = model if isinstance(model, HybridModel) else None
        self.model = DdpModel(model, mode, placement, clock, shared_reduce)
        self._guarded = [*workers.values(), *([] if remote_net is None else [remote_net])]
        self._sent_scales: list[PendingResult[None]] = []
        self._spans_processes = not is_single_process and (
            rules.mode is UpdateMode.SYNC or remote_net is not None
        )
        self._should_prefetch = rules.mode is not UpdateMode.SYNC
        # The number of steps that are read before the first of them begins.
        self._num_ahead = 2 if rules.mode is UpdateMode.ASYNC else 1
        self._recording = ExitStack()
        self._context_id: int | None = None
        self._micro: MicroBatch[AnySamples] | None = None
        self._loss = 0.0
        self.begin(iter(()), 0)

    def begin(self, batches: Iterator[AnySamples], step: int) -> None:
        """Continue at ``step`` with the first of ``batches``. Drop all batches that were read ahead."""
        self.step = self._first_step = step
        self._batches = batches
        # The current step until it ends, and then the steps that were read ahead.
        self._inputs: deque[StepInput[AnySamples]] = deque()

    def steps(
        self, max_steps: int | None = None, before_step: Callable[[], None] | None = None
    ) -> Iterator[StepInput[AnySamples]]:
        """Yield the inputs of each step. The caller ends each step with :meth:`decide`.

        Args:
            max_steps: None for all batches of :meth:`begin`.
            before_step: called before each step, when the previous step is complete.
        """
        for _ in itertools.count() if max_steps is None else range(max_steps):
            if before_step is not None and self._has_next():
                before_step()
            self._clock.begin_step(self.step)
            if not self._has_next():
                return
            current = self._inputs[0]
            if self._should_prefetch and len(self._inputs) == self._num_ahead:  # fewer after the last batch
                self._read_step(current)
            seed_step(self._seed, self._trainer, self.step, self._devices)
            self._loss = 0.0
            yield current
            self._clock.end_step()

    def _has_next(self) -> bool:
        """Read the batches that the next step needs; return whether there is a next step."""
        while len(self._inputs) < self._num_ahead and self._read_step():
            pass
        return bool(self._inputs)

    def _read_step(self, previous: StepInput[AnySamples] | None = None) -> bool:
        """Read a batch ahead, and, except in sync mode, prefetch its lookups; return False after the last.

        Args:
            previous: the step whose gradients share a message with the lookups; None sends the lookups now.
        """
        with self._clock.phase("data"):
            batch = next(self._batches, None)
        if batch is None:
            return False
        step, num_micro_batches = self.step + len(self._inputs), self._rules.micro_batches
        micro_batches = []
        for index, samples in enumerate(batch.split(num_micro_batches)):
            # For lookups, gradients and net calls in the step; they must see all earlier updates.
            ticket = Ticket(self._trainer, step, version=step, lookup_index=index, checksum=batch.checksum)
            lookup = None
            if self._should_prefetch:
                # In async mode, a lookup does not wait for the gradients of the step before.
                version = max(self._first_step, step - 1) if self._num_ahead > 1 else step
                prefetch = ticket._replace(version=version, purpose=Purpose.PREFETCH)
                sent_with = None if previous is None else previous.micro_batches[index].lookup
                with self._clock.phase("lookup"):
                    lookup = self._tables.lookup(samples.sparse_features, prefetch, sent_with)
            micro_batches.append(MicroBatch(samples, ticket, lookup, index == num_micro_batches - 1))
        self._inputs.append(StepInput(batch, micro_batches))
        return True

    def flush(self) -> None:
        """Wait until workers have all gradients of completed steps; raise an error if a message is lost."""
        for step in self._inputs:
            for micro in step.micro_batches:
                if micro.lookup is not None:
                    micro.lookup.flush()  # the response shows that the same message's gradients are there
        self._tables.sources.flush()

    @contextmanager
    def recording(self, micro: MicroBatch[AnySamples]) -> Iterator[MicroBatch[AnySamples]]:
        """Yield a micro-batch with its lookup, for the forward pass.

        In sync mode, this sends the lookup; else, it was sent earlier. If the graph spans processes,
        a distributed autograd context is open until :meth:`backward` or the end of the block.
        """
        self._recording.close()  # of a pass that the script has left, but not closed
        with ExitStack() as self._recording:
            self.model.begin(micro.is_last)
            context = dist_autograd.context() if self._spans_processes else nullcontext()
            self._context_id = self._recording.enter_context(context)
            if micro.lookup is None:
                with self._clock.phase("lookup"):
                    lookup = self._tables.lookup(micro.batch.sparse_features, micro.ticket)
                micro = micro._replace(lookup=lookup)
            self._micro = micro
            yield micro

    def backward(self, loss: Tensor) -> float:
        """Compute the gradients of a micro-batch, and return the loss as a number.

        Args:
            loss: this trainer's summand of the mean loss of the global batch.

        Raises:
            NonFiniteError: the loss is not finite, and ``train.non_finite`` stops the run.
            RuntimeError: autograd fails; also see :meth:`DdpModel.collect`.
        """
        assert self._micro is not None, "backward is called once, while the forward pass is recorded"
        self._micro = None
        gradients: dict[Tensor, Tensor]
        with self._clock.phase("backward"):
            try:
                if self._context_id is None:
                    loss.backward()
                    gradients = {p: p.grad for p in self.model.net.parameters() if p.grad is not None}
                else:
                    dist_autograd.backward(self._context_id, [loss])
                    gradients = dict(dist_autograd.get_gradients(self._context_id))
            except RuntimeError:
                if self._hybrid_model is not None:
                    self._hybrid_model.repeat_backward()
                raise
            for parameter in gradients:
                parameter.grad = None
            self.model.collect(gradients)
        self._recording.close()
        value = loss.item()
        self._loss += value
        if self._rules.check_finite and not math.isfinite(value):
            found = "" if self._hybrid_model is None else self._hybrid_model.first_not_finite()
            first = f": {found}" if found else ""
            raise NonFiniteError(
                f"step {self.step}: the loss of trainer {self._trainer} is {value}{first}; {_REMEDY}"
            )
        return value

    def decide(self) -> float | None:
        """End the step; return the factor for its gradients, or None to skip the update.

        Without clipping and skipping, the factor is 1. Otherwise, the decision takes one round trip::

            trainers                                            workers
            ────────                                            ───────
            after the backward pass: norm of the dense ──────►  merge the step's gradients
              gradients; request the norms of workers  ◄──────  respond with their norm, hold the update
            sum over trainers and workers; all compute
              the same scale, trainer 0 sends it       ──────►  apply the update, or drop it

        Raises:
            NonFiniteError: ``train.non_finite`` stops the run, and a gradient of the dense net is not finite.
                With clipping, also if a gradient on a worker is not finite.
        """
        squared_norm = self.model.squared_norm()
        with self._clock.span("decide"):
            if self._rules.check_finite and not math.isfinite(squared_norm):
                name = self.model.gradient_not_finite()
                what = f"gradient of the dense net's {name}" if name else "norm of the dense net's gradients"
                raise NonFiniteError(f"step {self.step}: the {what} is not finite; {_REMEDY}")
            scale = self._common_scale(squared_norm) if self._rules.has_update_guard else 1.0
        self._inputs.popleft()
        self.step += 1
        return scale

    def _common_scale(self, squared_norm: float) -> float | None:
        """Return the factor of :meth:`decide`, from the sum of ``squared_norm`` over trainers and workers."""
        norms = [each.squared_norm(self.step) for each in self._guarded]
        summand = squared_norm if math.isfinite(self._loss) else math.nan
        of_trainers = torch.tensor(summand, dtype=torch.float64)
        if self._group.size() > 1:
            dist.all_reduce(of_trainers, group=self._group)
        total = of_trainers.item() + sum(norm.wait() for norm in norms)
        scale: float | None = 1.0
        if not math.isfinite(total):
            if self._rules.check_finite:
                what = f"norm of the gradients on the workers is {math.sqrt(total)}"
                raise NonFiniteError(f"step {self.step}: the {what}; {_REMEDY}")
            scale = None
        elif self._rules.clip_norm is not None:
            scale = min(1.0, self._rules.clip_norm / (math.sqrt(total) + _CLIP_EPS))
        if self._trainer == 0:
            for sent in self._sent_scales:
                sent.wait()  # ends at once: the norm of this step shows that the worker has the earlier scale
            calls = [each.call_barrier(UpdateBarrier.set_scale, self.step, scale) for each in self._guarded]
            self._sent_scales = calls
        return scale
