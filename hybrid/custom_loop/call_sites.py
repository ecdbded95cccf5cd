"""Which tensors of a batch each table is called with, to look up the next batch before the module runs.

After one forward pass the calls of tables are known. The tensors of a call are found in the batch by their
memory: a tensor of the batch, or a view with the same part of every sample, such as ``batch["ids"][:, 3]``.
The same views are then taken of the next batch. Computed ids are in no batch and wait for their call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from hybrid.custom_loop.embedding_modules import TableCall, TableModule

# Distinguishes tensors at one moment: memory, layout, and how often the memory was written to.
CallKey: TypeAlias = tuple[int, ...]
# Shape and strides of all dimensions but the first.
Layout: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """Yield all tensors of a batch, in the order of its dicts and lists."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_of(value)
    elif isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        for value in batch:
            yield from tensors_of(value)


class BatchView(NamedTuple):
    """A view of one tensor of a batch, with the same part of every sample.

    Attributes:
        number: index of the tensor in the batch.
        source: layout of the tensor; None if the view is the whole tensor, in any layout.
        offset: offset of the view's first element from the tensor's.
        layout: layout of the view.
    """

    number: int
    source: Layout | None
    offset: int
    layout: Layout

    @classmethod
    def find(cls, view: Tensor, tensors: Sequence[Tensor]) -> BatchView | None:
        """Find the tensor of a batch that ``view`` is a view of; None for computed or empty tensors."""
        if not view.numel():
            return None
        memory = view.untyped_storage().data_ptr()
        for index, tensor in enumerate(tensors):
            if tensor.numel() and tensor.untyped_storage().data_ptr() == memory and _contains(tensor, view):
                offset = int(view.storage_offset() - tensor.storage_offset())
                source, layout = _layout(tensor), _layout(view)
                return cls(index, None if (source, 0) == (layout, offset) else source, offset, layout)
        return None

    def take(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """Return the same view of another batch; None if its tensor has another layout."""
        tensor = tensors[self.number]
        if self.source is None:
            return tensor
        if self.source != _layout(tensor):
            return None
        shape, strides = self.layout
        offset = tensor.storage_offset() + self.offset
        return tensor.as_strided((len(tensor), *shape), (tensor.stride(0), *strides), offset)


def _contains(tensor: Tensor, view: Tensor) -> bool:
    """Whether both have the same samples, and each sample of ``view`` lies within that of ``tensor``.

    Two columns may lie in one memory, one after the other.
    """
    start = view.storage_offset() - tensor.storage_offset()
    return (
        tensor.dim() > 0
        and view.dim() > 0
        and tensor.dtype == view.dtype
        and len(tensor) == len(view)
        and tensor.stride(0) == view.stride(0)
        and 0 <= start <= _extent(tensor) - _extent(view)
    )


def _extent(tensor: Tensor) -> int:
    """Return the distance in memory between the first and the last element of a sample."""
    shape, strides = _layout(tensor)
    return sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _layout(tensor: Tensor) -> Layout:
    return tuple(tensor.shape[1:]), tensor.stride()[1:]


class CallSite(NamedTuple):
    """A call of a table that every batch is expected to have.

    Attributes:
        ids, offsets, weights: where a batch has the tensors of the call.
    """

    module: TableModule
    ids: BatchView
    offsets: BatchView | None
    weights: BatchView | None
    has_end: bool

    @classmethod
    def find(cls, call: TableCall, tensors: Sequence[Tensor]) -> CallSite | None:
        """Find the tensors of a call in a batch; None if one of them is not there."""
        views = []
        for tensor in (call.ids, call.offsets, call.weights):
            views.append(None if tensor is None else BatchView.find(tensor, tensors))
            if tensor is not None and views[-1] is None:
                return None
        ids, offsets, weights = views
        assert ids is not None
        return cls(call.module, ids, offsets, weights, call.has_end)

    def call(self, tensors: Sequence[Tensor]) -> TableCall | None:
        """Return the same call for another batch; None if the batch has another layout."""
        ids, offsets, weights = (
            view and view.take(tensors) for view in (self.ids, self.offsets, self.weights)
        )
        if ids is None or (self.offsets and offsets is None) or (self.weights and weights is None):
            return None
        return TableCall(self.module, ids, offsets, weights, self.has_end)


def call_key(call: TableCall) -> CallKey:
    """Return a key that is equal for two calls of a module with the same tensors."""
    key: list[int] = [id(call.module)]
    for tensor in (call.ids, call.offsets, call.weights):
        if tensor is not None:
            # Inference tensors count no versions: the content tells whether one was written to.
            version = hash(tensor.cpu().numpy().tobytes()) if tensor.is_inference() else tensor._version
            key += [tensor.untyped_storage().data_ptr(), int(tensor.storage_offset()), version]
            key += [tensor.dim(), *tensor.shape, *tensor.stride()]
        key.append(-1)
    return tuple(key)
