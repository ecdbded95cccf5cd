"""Where the ids of a batch go, and how the answers become vectors of samples.

A route covers some features. It adds the lookups it needs to the items of each worker, and returns what
assembles the answers to vectors of shape (B, its features, D), and takes their gradients apart. Of a sequence
there are as many vectors as it has places, in place of one. The kinds:

============= ====================== ============================== =====================================
route         features               asks a worker for              assembles answers by
============= ====================== ============================== =====================================
RowRoute      exactly one id a       each distinct row once         spreading rows over samples
              sample
SequenceRoute the same, and          the same                       the same, over the places of samples
              sequences
LengthRoute   sequences              nothing                        counting their ids
BagRoute      multi-hot, tables on   a pooled vector a sample, or   nothing, or sum or max over
              the same workers       a partial one where the tables workers
                                     are split
PoolRoute     multi-hot, of tables   each distinct row once         pooling rows
              that trainers pool
============= ====================== ============================== =====================================

None makes more messages, nor calls more kernels, for more tables.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias

from torch import Tensor

from hybrid.embedding.bags import Item
from hybrid.embedding.trainer.batch_ids import BatchIds

Items: TypeAlias = Mapping[int, list[Item]]
Results: TypeAlias = Mapping[int, Sequence[Tensor]]
Slot: TypeAlias = tuple[int, int]  # a worker, and the place in its answer


class Assembler(Protocol):
    """What turns the answers for one batch into vectors, and their gradients into gradients of answers.

    Attributes:
        shape_BFD: of the vectors.
    """

    @property
    def shape_BFD(self) -> tuple[int, int, int]: ...

    def vectors(self, results: Results) -> Tensor:
        """``vectors_BFD`` of the route's features, or of their places."""
        ...

    def gradients(self, grad_BFD: Tensor) -> list[tuple[Slot, Tensor]]:
        """The gradient of each answer, in no view of a larger tensor: RPC would send it whole."""
        ...


class Route(Protocol):
    """A way for some features; see the module's docstring."""

    features: tuple[int, ...]

    def start(self, ids: BatchIds, items: Items) -> Assembler:
        """Append this route's lookups to ``items``; return what assembles vectors of their answers."""
        ...


def append(items: Items, worker: int, item: Item) -> Slot:
    """Ask ``worker`` for one thing more; where in its answer that will be."""
    items[worker].append(item)
    return worker, len(items[worker]) - 1
