"""One training step, and one forward pass without training."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybrid.batch import Batch
from hybrid.clock import StepClock
from hybrid.dense.optimizer import DenseOptimizer
from hybrid.embedding.trainer.embeddings import Embeddings
from hybrid.steps.ticket import Ticket
from hybrid.training.backward import Graph, recorded_graph
from hybrid.training.ddp import DdpModel
from hybrid.training.guard import Guard
from hybrid.training.model import MicroBatch, to_device


class StepResult(NamedTuple):
    """What one trainer has after a step.

    Attributes:
        loss: this trainer's part of the global batch's mean loss; the parts add up to it.
        logits: ``logits_B`` before the update, on the CPU.
        is_skipped: whether no update was made, on any side, since a loss or gradient was not finite.
    """

    loss: float
    logits: Tensor
    is_skipped: bool


def train_step(
    model: DdpModel,
    micro_batches: Sequence[MicroBatch[Batch]],
    optimizer: DenseOptimizer,
    guard: Guard,
    step: int,
    clock: StepClock,
    spans_processes: bool,
) -> StepResult:
    """One step of training, called by every trainer with its share of the global batch.

    Tables and remote nets are updated at their workers, by the gradients that each backward pass
    delivers there; the trainers' own net by ``optimizer``, with those of all micro-batches together.

    Args:
        spans_processes: whether lookups or a remote net are part of the graph.
    """
    losses, logits = [], []
    for micro in micro_batches:
        is_last = micro is micro_batches[-1]
        with model.reducing(is_last), recorded_graph(model.net, spans_processes) as graph:
            logits_B = model.module(micro, clock)
            with clock.phase("dense"), clock.span("loss"):
                loss = _loss(logits_B, micro)
            with clock.phase("backward"):
                _backward(model, graph, loss)
                model.collect(graph.gradients(), is_last)
        losses.append(loss.item())
        logits.append(logits_B.detach().cpu())
        guard.check_loss(step, losses[-1], model.first_not_finite)
    with clock.phase("update"):
        with clock.span("decide"):
            scale = guard.decide(step, sum(losses), model.squared_norm(), model.gradient_not_finite)
        if scale is not None:
            with clock.span("optimizer"):
                optimizer.step(step, model.gradients, scale)
    return StepResult(sum(losses), torch.cat(logits), scale is None)


def _backward(model: DdpModel, graph: Graph, loss: Tensor) -> None:
    try:
        graph.backward(loss)
    except RuntimeError:
        model.raise_of_backward()
        raise


def _loss(logits_B: Tensor, micro: MicroBatch[Batch]) -> Tensor:
    """This micro-batch's part of the mean over the global batch, and zero where it is empty.

    Written as a mean times a share, not a sum over a size: with one trainer the share is 1 and every
    gradient has the bits of torch's own mean.
    """
    labels_B = to_device(micro.batch.labels.to(logits_B.dtype), logits_B.device)
    if not len(labels_B):
        return logits_B.sum()
    mean = F.binary_cross_entropy_with_logits(logits_B, labels_B)
    return mean * (len(labels_B) / micro.batch.global_size)


def predict_step(
    model: nn.Module, embeddings: Embeddings, batch: Batch, ticket: Ticket, clock: StepClock
) -> Tensor:
    """``logits_B`` of a batch, on the CPU; the ticket's purpose must be to predict."""
    micro = MicroBatch(batch, ticket, partial(embeddings.lookup, batch.sparse_features, ticket))
    with torch.no_grad():
        logits_B: Tensor = model(micro, clock)
        return logits_B.cpu()
