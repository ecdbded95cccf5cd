"""What of a batch tables were called with: known after one forward pass, it is looked up before the next.

A call's tensors are found in the batch by where they lie: a tensor of the batch, or a view of it that takes
the same of every sample, such as ``batch["ids"][:, 3]``. Of the next batch the same views are taken. Ids that
are computed on the way are in no batch, and are looked up when they are there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from hybrid.custom_loop.embedding_modules import Call, TableModule

# What tells tensors of one moment apart: their memory, how they lie there, how often that was written.
Key: TypeAlias = tuple[int, ...]


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """All tensors of a batch, in the order of its dicts and lists."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_of(value)
    elif isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        for value in batch:
            yield from tensors_of(value)


# Shape and strides of all dimensions but the first.
Layout: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]


class View(NamedTuple):
    """A view of one of the tensors of a batch, the same of every sample.

    Attributes:
        tensor: which of them.
        of: the tensor's layout; None where the view is all of it, whatever its layout.
        offset: of the view's first element from that of the tensor.
        layout: the view's; its first dimension is the tensor's.
    """

    tensor: int
    of: Layout | None
    offset: int
    layout: Layout

    @classmethod
    def find(cls, wanted: Tensor, tensors: Sequence[Tensor]) -> View | None:
        """What view ``wanted`` is, if it is one; of no samples nothing is to be told."""
        if not wanted.numel():
            return None
        memory = wanted.untyped_storage().data_ptr()
        for number, tensor in enumerate(tensors):
            if tensor.numel() and tensor.untyped_storage().data_ptr() == memory and _agree(tensor, wanted):
                offset = int(wanted.storage_offset() - tensor.storage_offset())
                of, layout = _layout(tensor), _layout(wanted)
                return cls(number, None if (of, 0) == (layout, offset) else of, offset, layout)
        return None

    def taken(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """The same view of another batch; None where its tensor has another layout."""
        tensor = tensors[self.tensor]
        if self.of is None:
            return tensor
        if self.of != _layout(tensor):
            return None
        shape, strides = self.layout
        offset = tensor.storage_offset() + self.offset
        return tensor.as_strided((len(tensor), *shape), (tensor.stride(0), *strides), offset)


def _agree(tensor: Tensor, wanted: Tensor) -> bool:
    """Whether both have as many samples, equally far apart, and each sample of ``wanted`` is within that of
    ``tensor``: two columns may lie in one memory, one after the other."""
    start = wanted.storage_offset() - tensor.storage_offset()
    return (
        tensor.dim() > 0
        and wanted.dim() > 0
        and tensor.dtype == wanted.dtype
        and len(tensor) == len(wanted)
        and tensor.stride(0) == wanted.stride(0)
        and 0 <= start <= _reach(tensor) - _reach(wanted)
    )


def _reach(tensor: Tensor) -> int:
    """How far the last element of a sample is from its first, in memory."""
    shape, strides = _layout(tensor)
    return sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _layout(tensor: Tensor) -> Layout:
    return tuple(tensor.shape[1:]), tensor.stride()[1:]


class Site(NamedTuple):
    """A call that every batch is expected to have.

    Attributes:
        ids, offsets, weights: where its tensors are in a batch.
    """

    module: TableModule
    ids: View
    offsets: View | None
    weights: View | None
    has_end: bool

    @classmethod
    def find(cls, call: Call, tensors: Sequence[Tensor]) -> Site | None:
        """Where the tensors of a call are in a batch; None where one of them is not."""
        views = [None if each is None else View.find(each, tensors) for each in _tensors(call)]
        if any(view is None and each is not None for view, each in zip(views, _tensors(call), strict=True)):
            return None
        ids, offsets, weights = views
        assert ids is not None
        return cls(call.module, ids, offsets, weights, call.has_end)

    def call(self, tensors: Sequence[Tensor]) -> Call | None:
        """The same call, of another batch; None where that is laid out otherwise."""
        views = (self.ids, self.offsets, self.weights)
        ids, offsets, weights = (view and view.taken(tensors) for view in views)
        if ids is None or (self.offsets and offsets is None) or (self.weights and weights is None):
            return None
        return Call(self.module, ids, offsets, weights, self.has_end)


def key_of(call: Call) -> Key:
    """Equal for two calls that ask for the same."""
    key: list[int] = [id(call.module)]
    for each in _tensors(call):
        if each is not None:
            # Inference tensors count no versions: their content tells whether one was written to.
            version = hash(each.cpu().numpy().tobytes()) if each.is_inference() else each._version
            where = each.untyped_storage().data_ptr(), int(each.storage_offset()), version
            key += [*where, each.dim(), *each.shape, *each.stride()]
        key.append(-1)
    return tuple(key)


def _tensors(call: Call) -> tuple[Tensor, Tensor | None, Tensor | None]:
    return call.ids, call.offsets, call.weights
