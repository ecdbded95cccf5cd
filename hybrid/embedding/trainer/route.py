"""Routes: which requests the ids of a batch become, and how responses become vectors of samples.

A route covers some features. It adds its requests to the message of each worker, and returns an assembler.
The assembler turns responses into vectors of shape (B, features, D), and gradients of vectors into gradients
of responses. A sequence has one vector per position instead of one. The kinds:

============= ======================== ============================== ===================================
route         features                 requests from a worker         assembles responses by
============= ======================== ============================== ===================================
RowRoute      one id per sample        each distinct row once         copying rows to the samples
SequenceRoute the same, and sequences  the same                       the same, to positions of samples
LengthRoute   sequences                nothing                        counting ids
BagRoute      multi-hot, tables on     a pooled vector per sample;    nothing; sum or max over workers if
              the same workers         a partial one if the tables    tables are split
                                       are split over workers
PoolRoute     multi-hot, of tables     each distinct row once         pooling rows
              that trainers pool
============= ======================== ============================== ===================================

The number of messages and of kernel calls does not depend on the number of tables.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias

from torch import Tensor

from hybrid.embedding.bags import Item
from hybrid.embedding.trainer.batch_ids import BatchIds

Items: TypeAlias = Mapping[int, list[Item]]
Responses: TypeAlias = Mapping[int, Sequence[Tensor]]
Slot: TypeAlias = tuple[int, int]  # a worker, and the index of a tensor in its response


class Assembler(Protocol):
    """Turns the responses for one batch into vectors, and gradients of vectors into those of responses.

    Attributes:
        shape_BFD: shape of the vectors.
    """

    @property
    def shape_BFD(self) -> tuple[int, int, int]: ...

    def vectors(self, responses: Responses) -> Tensor:
        """Return ``vectors_BFD`` of the route's features, or of the positions of its sequences."""
        ...

    def gradients(self, grad_BFD: Tensor) -> list[tuple[Slot, Tensor]]:
        """Return the gradient of each response tensor; none is a view, since RPC sends whole storages."""
        ...


class Route(Protocol):
    """The route of some features; see the module's docstring."""

    features: tuple[int, ...]

    def start(self, ids: BatchIds, items: Items) -> Assembler:
        """Append this route's requests to ``items``, and return the assembler of their responses."""
        ...


def append(items: Items, worker: int, item: Item) -> Slot:
    """Append a request to a worker's message, and return the slot of its response."""
    items[worker].append(item)
    return worker, len(items[worker]) - 1
