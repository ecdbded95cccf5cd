"""The tensors of a batch that each table is called with, to look up the next batch before the module runs.

The first forward pass shows the calls of the tables. Each tensor of a call is searched in the batch by its
memory address. A match is a tensor of the batch, or a view that has the same positions of every sample, such
as ``batch["ids"][:, 3]``. Later steps take the same views of their batches. Ids that the module computes are
in no batch, so their lookup starts with the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from torch import Tensor

from hybrid.custom_loop.embedding_modules import TableCall, TableModule

# Identifies a call: its module, and for each tensor the memory, the layout and the number of writes.
CallKey: TypeAlias = tuple[int, ...]
# Shape and strides of all dimensions but the first.
Layout: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]


class BatchView(NamedTuple):
    """A view of one tensor of a batch, with the same positions of every sample.

    Attributes:
        tensor_index: index of the tensor in the batch.
        source: layout of that tensor; None if the view is the full tensor, in any layout.
        offset: offset of the view's first element from the tensor's.
        layout: layout of the view.
    """

    tensor_index: int
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
        tensor = tensors[self.tensor_index]
        if self.source is None:
            return tensor
        if self.source != _layout(tensor):
            return None
        shape, strides = self.layout
        offset = tensor.storage_offset() + self.offset
        return tensor.as_strided((len(tensor), *shape), (tensor.stride(0), *strides), offset)


def _contains(tensor: Tensor, view: Tensor) -> bool:
    """Whether each sample of ``view`` lies within the same sample of ``tensor``.

    The storage alone does not decide: two columns may share it, one after the other.
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
        views: views of a batch that are the ids, offsets and weights; None for an argument that is None.
        has_end: see :class:`TableCall`.
    """

    module: TableModule
    views: tuple[BatchView | None, ...]
    has_end: bool

    @classmethod
    def find(cls, call: TableCall, tensors: Sequence[Tensor]) -> CallSite | None:
        """Find the tensors of a call in a batch; None if one of them is not there."""
        views = tuple(each if each is None else BatchView.find(each, tensors) for each in call.tensors)
        if [view is None for view in views] != [each is None for each in call.tensors]:
            return None
        return cls(call.module, views, call.has_end)

    def call(self, tensors: Sequence[Tensor]) -> TableCall | None:
        """Return the same call for another batch; None if the batch has another layout."""
        ids, offsets, weights = arguments = [view and view.take(tensors) for view in self.views]
        if ids is None or [each is None for each in arguments] != [view is None for view in self.views]:
            return None
        return TableCall(self.module, ids, offsets, weights, self.has_end)


def call_key(call: TableCall) -> CallKey:
    """Return a key that is equal for two calls of a module with the same tensors."""
    key: list[int] = [id(call.module)]
    for tensor in call.tensors:
        if tensor is not None:
            # Inference tensors have no version counter, so a hash of the content replaces it.
            version = hash(tensor.cpu().numpy().tobytes()) if tensor.is_inference() else tensor._version
            key += [tensor.untyped_storage().data_ptr(), int(tensor.storage_offset()), version]
            key += [tensor.dim(), *tensor.shape, *tensor.stride()]
        key.append(-1)
    return tuple(key)
