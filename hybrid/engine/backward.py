"""The backward pass of a micro-batch: distributed autograd, or torch's local autograd.

The vectors of prefetched lookups enter the graph as values, and separate messages return their gradients.
Without a remote net, such a graph is local to this process. Local autograd then avoids the threads and the
bookkeeping of distributed autograd.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor, nn
from torch.distributed import autograd as dist_autograd


class Graph(Protocol):
    """The graph that one forward pass records."""

    def backward(self, loss: Tensor) -> None: ...

    def gradients(self) -> dict[Tensor, Tensor]:
        """Return the gradients of the local parameters, after the backward pass."""
        ...


@contextmanager
def record_graph(net: nn.Module, spans_processes: bool) -> Iterator[Graph]:
    """Record the forward pass of the block.

    Args:
        net: the local net, whose parameters get gradients.
        spans_processes: whether a lookup or a remote net is part of the graph.
    """
    if not spans_processes:
        yield _LocalGraph(net)
        return
    with dist_autograd.context() as context_id:
        yield _DistributedGraph(context_id)


class _LocalGraph:
    def __init__(self, net: nn.Module) -> None:
        self._net = net

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def gradients(self) -> dict[Tensor, Tensor]:
        gradients: dict[Tensor, Tensor] = {}
        for parameter in self._net.parameters():
            if parameter.grad is not None:
                gradients[parameter], parameter.grad = parameter.grad, None
        return gradients


class _DistributedGraph:
    def __init__(self, context_id: int) -> None:
        self._context_id = context_id

    def backward(self, loss: Tensor) -> None:
        dist_autograd.backward(self._context_id, [loss])

    def gradients(self) -> dict[Tensor, Tensor]:
        gradients: dict[Tensor, Tensor] = dist_autograd.get_gradients(self._context_id)
        return gradients
