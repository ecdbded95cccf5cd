"""One training step, its graph, and one forward pass without training.

The vectors of prefetched lookups enter the graph as values, and separate messages return their gradients.
Without a remote net, such a graph is local to this process. Its backward pass then avoids the threads and the
bookkeeping of distributed autograd.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import autograd as dist_autograd

from hybrid.batch import Batch
from hybrid.dense.dense_optimizer import DenseOptimizer
from hybrid.embedding.trainer.embeddings import Embeddings
from hybrid.engine.ddp import DdpModel
from hybrid.engine.hybrid_model import MicroBatch
from hybrid.engine.losses import Objective
from hybrid.engine.update_guard import Guard
from hybrid.primitives.step_timings import StepClock
from hybrid.protocol.ticket import Ticket


class StepResult(NamedTuple):
    """The result of one step on one trainer.

    Attributes:
        loss: this trainer's contribution to the mean loss of the global batch.
        outputs: ``outputs_BO`` before the update, on the CPU; ``outputs_B`` for one output per sample.
        is_skipped: whether the step made no update because a loss or gradient was not finite.
    """

    loss: float
    outputs: Tensor
    is_skipped: bool


def seed_step(seed: int, trainer: int, step: int, devices: Iterable[torch.device]) -> None:
    """Seed torch's default generators of the CPU and of ``devices`` for one step of one trainer.

    Random numbers, such as dropout masks, are thus a function of the step, and a checkpoint needs no
    generator state. ``torch.manual_seed`` seeds all kinds of devices, which takes 70 times as long.
    """
    packed = struct.pack("<3Q", seed, trainer, step)
    digest = int.from_bytes(blake2b(packed, digest_size=8).digest(), "little")
    torch.default_generator.manual_seed(digest)
    for device in devices:
        if device.type == "cuda":
            torch.cuda.default_generators[device.index or 0].manual_seed(digest)


class Graph:
    """The graph that one forward pass records.

    Args:
        net: the local net, whose parameters get gradients.
        context_id: the context of distributed autograd; None for a local graph.
    """

    def __init__(self, net: nn.Module, context_id: int | None) -> None:
        self._net = net
        self._context_id = context_id

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of ``loss``."""
        if self._context_id is None:
            loss.backward()
        else:
            dist_autograd.backward(self._context_id, [loss])

    def gradients(self) -> dict[Tensor, Tensor]:
        """Return the gradients of the local parameters, after the backward pass."""
        if self._context_id is not None:
            return dict(dist_autograd.get_gradients(self._context_id))
        gradients: dict[Tensor, Tensor] = {}
        for parameter in self._net.parameters():
            if parameter.grad is not None:
                gradients[parameter], parameter.grad = parameter.grad, None
        return gradients


@contextmanager
def record_graph(net: nn.Module, spans_processes: bool) -> Iterator[Graph]:
    """Record the forward pass of the block.

    Args:
        net: the local net, whose parameters get gradients.
        spans_processes: whether a lookup or a remote net is part of the graph.
    """
    if not spans_processes:
        yield Graph(net, None)
        return
    with dist_autograd.context() as context_id:
        yield Graph(net, context_id)


def train_step(
    model: DdpModel,
    micro_batches: Sequence[MicroBatch[Batch]],
    objective: Objective,
    optimizer: DenseOptimizer,
    guard: Guard,
    step: int,
    clock: StepClock,
    spans_processes: bool,
) -> StepResult:
    """Take one training step; every trainer calls it with its slice of the global batch.

    Workers update tables and remote nets by the gradients that each backward pass sends. ``optimizer``
    updates the local net by the gradients of all micro-batches.

    Args:
        objective: the loss.
        spans_processes: whether lookups or a remote net are part of the graph.
    """
    losses, outputs = [], []
    for micro in micro_batches:
        is_last = micro is micro_batches[-1]
        with model.reducing(is_last), record_graph(model.net, spans_processes) as graph:
            outputs_BO = model.module(micro, clock)
            with clock.phase("dense"), clock.span("loss"):
                loss = objective(outputs_BO, micro.batch)
            with clock.phase("backward"):
                try:
                    graph.backward(loss)
                except RuntimeError:
                    model.raise_of_backward()
                    raise
                model.collect(graph.gradients(), is_last)
        losses.append(loss.item())
        outputs.append(outputs_BO.detach().cpu())
        guard.check_loss(step, losses[-1], model.first_not_finite)
    with clock.phase("update"):
        with clock.span("decide"):
            scale = guard.decide(step, sum(losses), model.squared_norm(), model.gradient_not_finite)
        if scale is not None:
            with clock.span("optimizer"):
                optimizer.step(step, model.gradients, scale)
    return StepResult(sum(losses), torch.cat(outputs), scale is None)


def predict_step(
    model: nn.Module, embeddings: Embeddings, batch: Batch, ticket: Ticket, clock: StepClock
) -> Tensor:
    """Return ``outputs_BO`` of a batch, on the CPU; the purpose of the ticket must be to predict."""
    micro = MicroBatch(batch, ticket, partial(embeddings.lookup, batch.sparse_features, ticket))
    with torch.no_grad():
        outputs_BO: Tensor = model(micro, clock)
        return outputs_BO.cpu()
