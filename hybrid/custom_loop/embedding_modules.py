"""Tables as modules, called as those of ``torch.nn`` are; their rows lie with the workers, or here.

A module of these has no parameters: the workers update its rows, each table by the optimizer that it is made
with. It can be called once the module that it is part of is distributed.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn

from hybrid.config.table_sections import INITIALIZERS, POOLERS
from hybrid.custom_loop.jagged import Jagged
from hybrid.custom_loop.table_optimizers import Adagrad
from hybrid.embedding.pretrained_by_position import absolute, shape_of
from hybrid.embedding.table_spec import OptimizerSpec, Pooling, TableSpec
from hybrid.embedding.trainer.module_lookups import Asked

_DEFAULT_OPTIMIZER = Adagrad(lr=0.05)


class Call(NamedTuple):
    """What a table's module was called with, before anything is made of it.

    Attributes:
        ids: of any shape, or (bags, ids) or flat for bags.
        offsets: where bags start, where the ids of bags are flat.
        weights: of the shape of the ids, or None.
        has_end: whether the offsets have the end of the last bag, too.
    """

    module: TableModule
    ids: Tensor
    offsets: Tensor | None = None
    weights: Tensor | None = None
    has_end: bool = True


class Asker(Protocol):
    """Whoever has the rows of distributed modules.

    Attributes:
        is_saving: whether a checkpoint takes the state dict of the module now, without rows.
    """

    is_saving: bool

    def vectors(self, call: Call) -> Tensor:
        """The vectors of a call, (ids or bags, D)."""
        ...


class TableModule(nn.Module):
    """What both kinds of tables have in common.

    Args:
        num_embeddings, embedding_dim: its rows and their width.
        optimizer: of its rows, such as ``hybrid.Adagrad(lr=0.05)``, the default.
        padding_idx: an id that stands for none: its vector is zeros, and it takes no part in a bag.
        init_scale: rows start uniform in [-init_scale, init_scale]; by default 1 / sqrt(rows).
        init: "uniform", "normal" with a deviation of ``init_scale``, or "zeros".
        initial: a file with the first rows, read by the workers; see :meth:`from_pretrained`.

    Attributes:
        name: of the table, once it is distributed: the module's place in the whole.
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
        self._asker: Asker | None = None

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        *,
        freeze: bool = True,
        optimizer: OptimizerSpec | None = None,
        **options: Any,
    ) -> Self:
        """A table whose rows are in a file, or at a URL, that all hosts see, of the size of its matrix.

        Args:
            source: a safetensors file, ``path#name`` for one of several tensors in it, or a ``.npy`` file.
            freeze: whether rows stay as they are; else ``optimizer`` updates them.
            options: other arguments of the constructor.

        Raises:
            DataError: it is no file of a matrix; names it.
        """
        if freeze and optimizer is not None:
            raise ValueError("rows that are frozen have no optimizer; give freeze=False")
        initial = absolute(source)
        num_rows, dim = shape_of(initial)
        chosen = OptimizerSpec("frozen", 0.0) if freeze else optimizer
        return cls(num_rows, dim, optimizer=chosen, initial=initial, **options)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, optimizer={self.optimizer.name}"

    def spec(self, name: str, bytes_per_value: int) -> TableSpec:
        """The table that this is, under its name in the whole module."""
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

    def bind(self, name: str, asker: Asker) -> None:
        """Have calls answered by ``asker``."""
        self.name, self._asker = name, asker
        self.register_state_dict_pre_hook(_refuse_state_dict)  # type: ignore[no-untyped-call]

    def asked(self, call: Call) -> Asked:
        """What a call comes to, ids as int64 in one row."""
        raise NotImplementedError

    def _vectors(self, call: Call) -> Tensor:
        if self._asker is None:
            raise RuntimeError(
                f"{type(self).__name__} is called before its rows are anywhere: have the whole module "
                "distributed, model = hybrid.connect().distribute(model)"
            )
        return self._asker.vectors(call)

    def _is_padding(self, ids: Tensor) -> Tensor | None:
        """Where ids stand for none; None where none does."""
        if self.padding_idx is None:
            return None
        is_padding = ids == self.padding_idx
        return is_padding if bool(is_padding.any()) else None


class Embedding(TableModule):
    """A vector for each id, as ``torch.nn.Embedding`` gives."""

    def forward(self, ids: Tensor | Jagged) -> Tensor:
        """Vectors (*ids.shape, D), or (ids, D) of a :class:`Jagged`; zeros for padding.

        Args:
            ids: integers of any shape.
        """
        flat = ids.values if isinstance(ids, Jagged) else ids
        call = Call(self, flat)
        vectors_LD = self._vectors(call)
        if (is_padding := self._is_padding(flat)) is not None:
            positions = (~is_padding).view(-1).nonzero().view(-1).to(vectors_LD.device)
            empty_LD = vectors_LD.new_zeros(flat.numel(), self.embedding_dim)
            vectors_LD = empty_LD.index_copy(0, positions, vectors_LD)
        return vectors_LD.view(*flat.shape, self.embedding_dim)

    def asked(self, call: Call) -> Asked:
        is_padding = self._is_padding(call.ids)
        ids = call.ids if is_padding is None else call.ids[~is_padding]
        return Asked(self.name, _as_ids(ids))


class EmbeddingBag(TableModule):
    """One vector for each bag of ids, as ``torch.nn.EmbeddingBag`` gives; zeros for an empty bag.

    Args:
        mode: how the rows of a bag become a vector: "sum", "mean" or "max".
        include_last_offset: whether offsets have the end of the last bag, too.
        pooled_by: who makes a vector of a bag: the "workers" that hold its rows, or the "trainers", which
            then fetch each distinct row of a call once: less, where bags name the same rows often.
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
        """Vectors (bags, D).

        Args:
            ids: (bags, ids of each), a :class:`Jagged`, or flat with ``offsets``.
            offsets: where each bag starts.
            per_sample_weights: a weight for each id, in the form of the ids; only where bags are summed. They
                get no gradients.
        """
        weights = per_sample_weights.values if isinstance(per_sample_weights, Jagged) else per_sample_weights
        if weights is not None and self.pooling is not Pooling.SUM:
            raise ValueError(f"per_sample_weights need mode='sum', not {self.pooling.value!r}")
        if isinstance(ids, Jagged):
            return self._vectors(Call(self, ids.values, ids.offsets, weights))
        if (ids.dim() == 2) == (offsets is not None) or ids.dim() not in (1, 2):
            raise ValueError(
                f"ids of shape {list(ids.shape)} need offsets if they are flat, and none if (bags, ids)"
            )
        return self._vectors(Call(self, ids, offsets, weights, self.include_last_offset))

    def asked(self, call: Call) -> Asked:
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
        return Asked(self.name, _as_ids(ids), offsets.to(torch.int64).contiguous(), weights_L, self.pooling)


def _refuse_state_dict(table: TableModule, prefix: str, keep_vars: bool) -> None:
    assert table._asker is not None
    if not table._asker.is_saving:
        raise RuntimeError(
            "state_dict() of a distributed module would lack the rows of its tables: the workers hold them. "
            "Call cluster.save(folder, optimizer) for a checkpoint, or cluster.plain_module().state_dict() "
            "for all parameters and rows"
        )


def _as_ids(ids: Tensor) -> Tensor:
    if ids.is_floating_point() or ids.is_complex() or ids.dtype is torch.bool:
        raise TypeError(f"ids are integers, not {ids.dtype}")
    return ids.detach().reshape(-1).to("cpu", torch.int64).contiguous()
