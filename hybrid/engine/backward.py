"""The backward pass of a micro-batch: of the processes that its graph spans, or of this one alone.

Lookups ahead of their step are values where they enter the graph, and their gradients leave by messages of
their own. Without a remote net such a graph ends in this process, and torch's own backward pass will do: in
the thread that asks for it, it spares the threads and the bookkeeping of a distributed one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor, nn
from torch.distributed import autograd as dist_autograd


class Graph(Protocol):
    """What one forward pass has recorded."""

    def backward(self, loss: Tensor) -> None: ...

    def gradients(self) -> dict[Tensor, Tensor]:
        """Those of this process's parameters, after the backward pass."""
        ...


@contextmanager
def recorded_graph(net: nn.Module, spans_processes: bool) -> Iterator[Graph]:
    """In here, a forward pass is recorded for the backward pass of what this gives.

    Args:
        net: whose parameters get gradients.
        spans_processes: whether a lookup or a remote net is part of the graph.
    """
    if not spans_processes:
        yield _OwnGraph(net)
        return
    with dist_autograd.context() as context_id:
        yield _SpanningGraph(context_id)


class _OwnGraph:
    def __init__(self, net: nn.Module) -> None:
        self._net = net

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def gradients(self) -> dict[Tensor, Tensor]:
        found: dict[Tensor, Tensor] = {}
        for parameter in self._net.parameters():
            if parameter.grad is not None:
                found[parameter], parameter.grad = parameter.grad, None
        return found


class _SpanningGraph:
    def __init__(self, context_id: int) -> None:
        self._context_id = context_id

    def backward(self, loss: Tensor) -> None:
        dist_autograd.backward(self._context_id, [loss])

    def gradients(self) -> dict[Tensor, Tensor]:
        found: dict[Tensor, Tensor] = dist_autograd.get_gradients(self._context_id)
        return found
