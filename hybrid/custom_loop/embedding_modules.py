"""Embedding tables as modules with the interface of ``torch.nn``, and their copies in plain PyTorch.

The rows are no parameters of a module: the workers hold and update them, each table by its own optimizer. A
table can be called once the module that contains it is distributed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn

from hybrid.config.table_sections import INITIALIZERS, POOLERS
from hybrid.custom_loop.table_optimizers import Adagrad
from hybrid.embedding.pretrained_by_position import absolute, shape_of
from hybrid.embedding.table_spec import OptimizerSpec, Pooling, TableSpec
from hybrid.embedding.trainer.module_lookups import TableRequest

_DEFAULT_OPTIMIZER = Adagrad(lr=0.05)


class Jagged(NamedTuple):
    """A column with any number of values per sample.

    Attributes:
        values: the values of all samples, concatenated.
        offsets: int64 of shape (samples + 1), where the values of each sample start.
    """

    values: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, samples: Sequence[Sequence[Any]], dtype: torch.dtype = torch.int64) -> Jagged:
        """Make a column from one list of values per sample."""
        lengths = torch.tensor([0, *map(len, samples)])
        return cls(torch.tensor([v for sample in samples for v in sample], dtype=dtype), lengths.cumsum(0))

    @property
    def lengths(self) -> Tensor:
        """Number of values of each sample, int64."""
        return self.offsets.diff()

    def samples(self, start: int, stop: int) -> Jagged:
        """Return the samples from ``start`` to ``stop``."""
        first, last = int(self.offsets[start]), int(self.offsets[stop])
        return Jagged(self.values[first:last], self.offsets[start : stop + 1] - first)


class TableCall(NamedTuple):
    """The arguments of a call of a table.

    Attributes:
        ids: of any shape; for bags (bags, ids), or flat.
        offsets: where each bag starts, if the ids of bags are flat.
        weights: a weight per id, or None.
        has_end: whether the offsets include the end of the last bag.
    """

    module: TableModule
    ids: Tensor
    offsets: Tensor | None = None
    weights: Tensor | None = None
    has_end: bool = True


class VectorSource(Protocol):
    """What gives distributed tables their vectors.

    Attributes:
        is_saving: whether a checkpoint takes the state dict of the module now, without rows.
    """

    is_saving: bool

    def vectors(self, call: TableCall) -> Tensor:
        """Return the vectors of a call, (ids or bags, D)."""
        ...


class TableModule(nn.Module):
    """Base of :class:`Embedding` and :class:`EmbeddingBag`.

    Args:
        num_embeddings: number of rows.
        embedding_dim: width of a row.
        optimizer: updates the rows; by default ``hybrid.Adagrad(lr=0.05)``.
        padding_idx: id of padding: its vector is zeros, and bags skip it.
        init_scale: scale of the initial rows; by default 1 / sqrt(rows).
        init: "uniform" in [-init_scale, init_scale], "normal" with this standard deviation, or "zeros".
        initial: file of pretrained rows, read by the workers; see :meth:`from_pretrained`.

    Attributes:
        name: path of the table in the distributed module; empty before.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        optimizer: OptimizerSpec | None = None,
        padding_idx: int | None = None,
        init_scale: float | None = None,
        init: str = "uniform",
        initial: str = "",
    ) -> None:
        super().__init__()
        if min(num_embeddings, embedding_dim) < 1:
            raise ValueError(f"a table needs rows and columns, not {num_embeddings} x {embedding_dim}")
        if init not in INITIALIZERS.names:
            raise ValueError(f"init is one of {', '.join(INITIALIZERS.names)}, not {init!r}")
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.optimizer = optimizer or _DEFAULT_OPTIMIZER
        self.padding_idx = padding_idx
        self.init_scale = num_embeddings**-0.5 if init_scale is None else init_scale
        self.init = init
        self.initial = initial
        self.name = ""
        self._source: VectorSource | None = None

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        *,
        freeze: bool = True,
        optimizer: OptimizerSpec | None = None,
        **options: Any,
    ) -> Self:
        """Make a table with the size and the rows of a matrix in a file.

        Args:
            source: path or URL that all hosts see: a safetensors file, ``path#name`` for one of several
                tensors in it, or a ``.npy`` file.
            freeze: whether the rows stay as they are; else ``optimizer`` updates them.
            options: other arguments of the constructor.

        Raises:
            DataError: the file has no matrix.
        """
        if freeze and optimizer is not None:
            raise ValueError("frozen rows have no optimizer; give freeze=False to train them")
        initial = absolute(source)
        num_rows, dim = shape_of(initial)
        chosen = OptimizerSpec("frozen", 0.0) if freeze else optimizer
        return cls(num_rows, dim, optimizer=chosen, initial=initial, **options)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, optimizer={self.optimizer.name}"

    def spec(self, name: str, bytes_per_value: int) -> TableSpec:
        """Return the specification of the table under its name in the distributed module."""
        return TableSpec(
            name=name,
            num_rows=self.num_embeddings,
            dim=self.embedding_dim,
            pooling=Pooling.SUM,
            features=(name,),
            optimizer=self.optimizer,
            init_scale=self.init_scale,
            init=self.init,
            bytes_per_value=bytes_per_value,
            initial=self.initial,
        )

    def bind(self, name: str, source: VectorSource) -> None:
        """Set what answers the calls of this table."""
        self.name, self._source = name, source
        self.register_state_dict_pre_hook(_refuse_state_dict)  # type: ignore[no-untyped-call]

    def request(self, call: TableCall) -> TableRequest:
        """Return the lookup of a call: its ids without padding, as int64 in one dimension."""
        raise NotImplementedError

    def _vectors(self, call: TableCall) -> Tensor:
        if self._source is None:
            raise RuntimeError(
                f"{type(self).__name__} has no rows before it is distributed: call "
                "model = hybrid.connect().distribute(model) with the whole module"
            )
        return self._source.vectors(call)

    def _is_padding(self, ids: Tensor) -> Tensor | None:
        """Return which ids are padding; None if none is."""
        if self.padding_idx is None:
            return None
        is_padding = ids == self.padding_idx
        return is_padding if bool(is_padding.any()) else None


class Embedding(TableModule):
    """A vector for each id, like ``torch.nn.Embedding``."""

    def forward(self, ids: Tensor | Jagged) -> Tensor:
        """Return vectors (*ids.shape, D), or (ids, D) for a :class:`Jagged`; zeros for padding.

        Args:
            ids: integers of any shape.
        """
        flat = ids.values if isinstance(ids, Jagged) else ids
        vectors_LD = self._vectors(TableCall(self, flat))
        if (is_padding := self._is_padding(flat)) is not None:
            positions = (~is_padding).view(-1).nonzero().view(-1).to(vectors_LD.device)
            empty_LD = vectors_LD.new_zeros(flat.numel(), self.embedding_dim)
            vectors_LD = empty_LD.index_copy(0, positions, vectors_LD)
        return vectors_LD.view(*flat.shape, self.embedding_dim)

    def request(self, call: TableCall) -> TableRequest:
        is_padding = self._is_padding(call.ids)
        ids = call.ids if is_padding is None else call.ids[~is_padding]
        return TableRequest(self.name, _as_ids(ids))


class EmbeddingBag(TableModule):
    """One vector for each bag of ids, like ``torch.nn.EmbeddingBag``; zeros for an empty bag.

    Args:
        mode: how the rows of a bag become a vector: "sum", "mean" or "max".
        include_last_offset: whether offsets include the end of the last bag.
        pooled_by: what pools bags: the "workers" that hold the rows, or the "trainers", which fetch each
            distinct row of a call once. This moves less if bags repeat the same rows often.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        mode: str = "mean",
        optimizer: OptimizerSpec | None = None,
        padding_idx: int | None = None,
        init_scale: float | None = None,
        init: str = "uniform",
        initial: str = "",
        include_last_offset: bool = False,
        pooled_by: str = "workers",
    ) -> None:
        if pooled_by not in POOLERS:
            raise ValueError(f"pooled_by is one of {', '.join(POOLERS)}, not {pooled_by!r}")
        super().__init__(
            num_embeddings,
            embedding_dim,
            optimizer=optimizer,
            padding_idx=padding_idx,
            init_scale=init_scale,
            init=init,
            initial=initial,
        )
        self.pooling = Pooling(mode)
        self.include_last_offset = include_last_offset
        self.pooled_by = pooled_by

    def spec(self, name: str, bytes_per_value: int) -> TableSpec:
        return replace(super().spec(name, bytes_per_value), pooled_by=self.pooled_by)

    def forward(
        self,
        ids: Tensor | Jagged,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | Jagged | None = None,
    ) -> Tensor:
        """Return vectors (bags, D).

        Args:
            ids: (bags, ids per bag), a :class:`Jagged`, or flat with ``offsets``.
            offsets: where each bag starts.
            per_sample_weights: a weight per id, in the form of the ids; for mode "sum" only. They get no
                gradients.
        """
        weights = per_sample_weights.values if isinstance(per_sample_weights, Jagged) else per_sample_weights
        if weights is not None and self.pooling is not Pooling.SUM:
            raise ValueError(f"per_sample_weights need mode='sum', not {self.pooling.value!r}")
        if isinstance(ids, Jagged):
            return self._vectors(TableCall(self, ids.values, ids.offsets, weights))
        if (ids.dim() == 2) == (offsets is not None) or ids.dim() not in (1, 2):
            raise ValueError(
                f"ids of shape {list(ids.shape)}: flat ids need offsets, ids of shape (bags, ids) take none"
            )
        return self._vectors(TableCall(self, ids, offsets, weights, self.include_last_offset))

    def request(self, call: TableCall) -> TableRequest:
        ids, offsets, weights = call.ids, call.offsets, call.weights
        if offsets is None:
            offsets = torch.arange(len(ids) + 1) * ids.shape[1]
        elif not call.has_end:
            offsets = torch.cat([offsets, offsets.new_tensor([len(ids)])])
        if (is_padding := self._is_padding(ids)) is not None:
            kept_before = torch.cat([torch.zeros(1, dtype=torch.int64), (~is_padding).view(-1).cumsum(0)])
            ids, offsets = ids[~is_padding], kept_before[offsets]
            weights = None if weights is None else weights[~is_padding]
        weights_L = None if weights is None else weights.detach().reshape(-1)
        offsets = offsets.to(torch.int64).contiguous()
        return TableRequest(self.name, _as_ids(ids), offsets, weights_L, self.pooling)


def _refuse_state_dict(table: TableModule, prefix: str, keep_vars: bool) -> None:
    assert table._source is not None
    if not table._source.is_saving:
        raise RuntimeError(
            "state_dict() of a distributed module would lack the rows of its tables: the workers hold them. "
            "Call cluster.save(folder, optimizer) for a checkpoint, or cluster.plain_module().state_dict() "
            "for all parameters and rows"
        )


def _as_ids(ids: Tensor) -> Tensor:
    if ids.is_floating_point() or ids.is_complex() or ids.dtype is torch.bool:
        raise TypeError(f"ids must be integers, not {ids.dtype}")
    return ids.detach().reshape(-1).to("cpu", torch.int64).contiguous()


def plain_copy(net: nn.Module, rows_of: Callable[[TableModule], Tensor]) -> nn.Module:
    """Copy a module to the CPU with each table as a module of ``torch.nn``.

    Args:
        rows_of: returns the rows of a table, (rows, D).
    """
    copies: dict[int, nn.Module] = {}
    for table in net.modules():
        if not isinstance(table, TableModule):
            continue
        rows_RD = rows_of(table)
        if table.padding_idx is not None:
            rows_RD[table.padding_idx] = 0.0
        options: dict[str, Any] = {"freeze": False, "padding_idx": table.padding_idx}
        if isinstance(table, EmbeddingBag):
            options |= {"mode": table.pooling.value, "include_last_offset": table.include_last_offset}
            copies[id(table)] = nn.EmbeddingBag.from_pretrained(rows_RD, **options)
        else:
            copies[id(table)] = nn.Embedding.from_pretrained(rows_RD, **options)
    # A table refers to processes and connections, which cannot be copied: deepcopy takes these instead.
    return copy.deepcopy(net, copies).cpu()
