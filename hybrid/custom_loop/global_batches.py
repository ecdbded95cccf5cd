"""Batches of the user's own, cut into the shares of the trainers.

A batch is any structure of dicts, lists and tuples whose tensors have a first dimension of samples; a
:class:`Jagged` has any number of values of each. All trainers see the same global batches, and each takes its
contiguous share, which may be empty. Where a column's groups stay whole, a group belongs to the batch, and to
the share, in whose range its last sample lies (``hybrid/primitives/grouping.py``).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybrid.batch import share
from hybrid.custom_loop.call_sites import Key, Site, key_of, tensors_of
from hybrid.custom_loop.embedding_modules import Call
from hybrid.custom_loop.jagged import Jagged
from hybrid.embedding.trainer.module_lookups import Asked
from hybrid.errors import DataError
from hybrid.primitives.grouping import group_ends, last_end, split_group, whole_bounds


class Share:
    """A trainer's share of a global batch.

    Args:
        values: in the structure of the user's batches.
        size: samples in it.
        global_size: samples of all trainers.
        sites: what tables are expected to be called with; those known when it is looked up count.
    """

    ended = False

    def __init__(self, values: Any, size: int, global_size: int, sites: Iterable[Site]) -> None:
        self.values = values
        self.size = size
        self.global_size = global_size
        self._sites = sites

    @cached_property
    def tensors(self) -> list[Tensor]:
        """All of its tensors."""
        return list(tensors_of(self.values))

    @cached_property
    def calls(self) -> dict[Key, Call]:
        """The calls that it is looked up for, in their order."""
        calls = [call for site in self._sites if (call := site.call(self.tensors)) is not None]
        return {key_of(call): call for call in calls}

    @property
    def sparse_features(self) -> list[Asked]:
        """What these calls ask for."""
        return [call.module.asked(call) for call in self.calls.values()]

    def split(self, parts: int) -> list[Share]:
        """It, in one part: a forward pass of the user's own takes the whole."""
        assert parts == 1
        return [self]


def shares(
    batches: Iterable[Any],
    trainer: int,
    num_trainers: int,
    sites: Iterable[Site],
    whole: str | None = None,
) -> Iterator[Share]:
    """The shares of trainer number ``trainer`` of all global batches.

    Args:
        whole: the column whose groups have one share each, or None.

    Raises:
        DataError: the samples of a group do not stand together in a batch.
    """
    for batch in batches:
        size = size_of(batch)
        start, stop = share(size, trainer, num_trainers)
        if whole is not None:
            start, stop = whole_bounds(_ends(batch, whole), start, stop)
        values = batch if num_trainers == 1 else cut(batch, start, stop)
        yield Share(values, stop - start, size, sites)


def global_batches(data: Any, size: int | None, whole: str | None = None) -> Iterator[Any]:
    """Batches of ``size`` samples, the last one perhaps smaller; as they come where that is None.

    Args:
        data: one structure with all samples, or an iterable of such in any numbers.
        whole: the column whose groups are whole in batches of ``size``, give or take a group; or None.

    Raises:
        DataError: it is neither, or a group is larger than a batch.
    """
    is_one = isinstance(data, Mapping | Jagged | Tensor)
    if not is_one and not isinstance(data, Iterable):
        raise DataError(
            f"cannot take batches of {type(data).__name__}; give an iterable, such as a DataLoader"
        )
    if size is not None and whole is not None:
        yield from _rebatched_whole([data] if is_one else data, size, whole)
    elif is_one:
        total = size_of(data)
        step = size or total
        yield from (cut(data, start, min(start + step, total)) for start in range(0, total, step))
    else:
        yield from data if size is None else _rebatched(data, size)


def _rebatched(batches: Iterable[Any], size: int) -> Iterator[Any]:
    held: list[Any] = []
    num_held = 0
    for batch in batches:
        num, start = size_of(batch), 0
        while num_held + num - start >= size:
            stop = start + size - num_held
            yield _joined([*held, cut(batch, start, stop)])
            held, num_held, start = [], 0, stop
        if start < num:
            held.append(cut(batch, start, num))
            num_held += num - start
    if held:
        yield _joined(held)


def _rebatched_whole(batches: Iterable[Any], size: int, whole: str) -> Iterator[Any]:
    """Batches of whole groups: number s has those whose last samples lie from s * size to (s + 1) * size."""
    held: list[Any] = []
    start, seen, stop = 0, 0, size  # positions: of the first held sample, after the last, where a range ends
    for batch, is_last in _with_last(batches):
        held.append(batch)
        seen += size_of(batch)
        if seen <= stop and not is_last:
            continue
        joined = _joined(held)
        groups_B = _column(joined, whole)
        ends_G = start + group_ends(groups_B)
        _refuse_larger(groups_B, ends_G - start, size)
        first = start
        while stop < seen or (is_last and start < seen):
            # Of the last group there may be more to come, but not where a range ends before its end.
            end = last_end(ends_G, stop)
            yield cut(joined, start - first, end - first)
            start, stop = end, stop + size
        held = [cut(joined, start - first, seen - first)]


def _refuse_larger(groups_B: npt.NDArray[np.generic], ends_G: npt.NDArray[np.int64], size: int) -> None:
    sizes_G = np.diff(ends_G, prepend=0)
    if (largest := int(sizes_G.max(initial=0))) > size:
        group = groups_B[ends_G[sizes_G.argmax()] - 1]
        raise DataError(
            f"group {group} has {largest} samples, more than a batch of {size}: give a larger size"
        )


def _with_last(batches: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """Each batch, and whether it is the last."""
    rest = iter(batches)
    held = next(rest, None)
    while held is not None:
        following = next(rest, None)
        yield held, following is None
        held = following


def _ends(batch: Any, whole: str) -> npt.NDArray[np.int64]:
    """Where the groups of a batch end; DataError where one is split."""
    groups_B = _column(batch, whole)
    if (split := split_group(groups_B)) is not None:
        raise DataError(
            f"group {split} of {whole!r} is split: its samples do not stand together in a batch; sort them"
        )
    return group_ends(groups_B)


def _column(batch: Any, whole: str) -> npt.NDArray[np.generic]:
    """The groups of a batch's samples; DataError where it has none."""
    column = batch.get(whole) if isinstance(batch, Mapping) else None
    if not isinstance(column, Tensor) or column.dim() != 1:
        raise DataError(f"whole = {whole!r} is to name a column of every batch, one number a sample")
    groups_B: npt.NDArray[np.generic] = column.cpu().numpy()
    return groups_B


def size_of(batch: Any) -> int:
    """Return the number of samples in a batch.

    Raises:
        DataError: the batch has no tensors, or their numbers of samples differ.
    """
    sizes = [len(each.offsets) - 1 if isinstance(each, Jagged) else len(each) for each in _parts(batch)]
    if not sizes:
        raise DataError("a batch has no tensors")
    if len(set(sizes)) > 1:
        names = _names(batch)
        counts = ", ".join(f"{name}: {size}" for name, size in zip(names, sizes, strict=True))
        raise DataError(
            f"the tensors of a batch have different numbers of samples ({counts}). Their first dimension is "
            "the sample; give a column of any number of values per sample as hybrid.Jagged(values, offsets)"
        )
    return sizes[0]


def _names(batch: Any, path: str = "") -> list[str]:
    """Return the key or index path of each tensor of a batch, in the order of :func:`_parts`."""
    if isinstance(batch, Mapping):
        items: list[tuple[Any, Any]] = list(batch.items())
    elif isinstance(batch, list | tuple) and not isinstance(batch, Jagged) and _is_nested(batch):
        items = list(enumerate(batch))
    else:
        return [path or "the tensor"]
    return [name for key, value in items for name in _names(value, f"{path}[{key!r}]" if path else repr(key))]


def cut(batch: Any, start: int, stop: int) -> Any:
    """The samples from ``start`` to ``stop`` of a batch."""
    return _mapped(
        batch, lambda each: each.samples(start, stop) if isinstance(each, Jagged) else each[start:stop]
    )


def checksum(batch: Any) -> int:
    """Of all bytes of a batch's tensors."""
    total = 0
    for tensor in tensors_of(batch):
        total = zlib.crc32(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data, total)
    return total


def _joined(batches: Sequence[Any]) -> Any:
    """The samples of several batches of one structure, as one."""
    if len(batches) == 1:
        return batches[0]
    parts = [list(_parts(batch)) for batch in batches]
    if len({len(each) for each in parts}) != 1:
        raise DataError("batches differ in their structure, and cannot be joined to others of another size")
    joined = iter([_concatenated(of_place) for of_place in zip(*parts, strict=True)])
    return _mapped(batches[0], lambda _: next(joined))


def _concatenated(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], Tensor):
        return torch.cat(list(parts))
    if isinstance(parts[0], Jagged):
        lengths = torch.cat([each.lengths for each in parts])
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        return Jagged(torch.cat([each.values for each in parts]), offsets)
    return [value for each in parts for value in each]


def _parts(batch: Any) -> Iterator[Any]:
    """What of a batch has samples: tensors, jagged ones, and lists of anything else."""
    found: list[Any] = []
    _mapped(batch, found.append)
    return iter(found)


def _mapped(batch: Any, function: Callable[[Any], Any]) -> Any:
    """A structure of the same form, of what ``function`` makes of each part that has samples."""
    if isinstance(batch, Tensor | Jagged):
        return function(batch)
    if isinstance(batch, Mapping):
        return {name: _mapped(value, function) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_mapped(value, function) for value in batch))
    if isinstance(batch, list | tuple) and _is_nested(batch):
        return type(batch)(_mapped(value, function) for value in batch)
    if isinstance(batch, list):
        return function(batch)  # of texts, as a DataLoader collates them
    raise DataError(f"a batch holds a {type(batch).__name__}, and not tensors alone")


def _is_nested(batch: Sequence[Any]) -> bool:
    """Whether a list or tuple is part of a batch's structure, and not a column of plain values."""
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return True
    return any(isinstance(each, Tensor | Mapping | list | tuple) for each in batch)
