"""Embedding tables as modules with the interface of ``torch.nn``, and their copies in plain PyTorch.

The workers hold and update the rows, so rows are no parameters of the module. Distribute a module before you
call its tables.

Each table has an optimizer from a function below, which raises ValueError for an argument out of range.
Arguments that ``torch.optim`` has, too, have the same names. ``Momentum`` is torch's SGD with momentum.
With ``all_rows``, a step updates every row, as ``torch.optim`` does for an ``nn.Embedding``. Otherwise a step
updates only the rows that its batch reads. ``hybrid/embedding/worker/row_optimizers.py`` has the formulas.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from hybrid.config.table_sections import INITIALIZERS, POOLERS
from hybrid.embedding.bags import Bags, TableRequest
from hybrid.embedding.stored_matrix import make_absolute, read_shape
from hybrid.embedding.table_spec import UNLIMITED_ROWS, Growth, OptimizerSpec, Pooling, TableSpec
from hybrid.errors import DataError
from hybrid.primitives.key_hashes import next_random

if TYPE_CHECKING:
    from hybrid.custom_loop.training_loop import TrainingLoop


def SGD(lr: float, weight_decay: float = 0.0, *, all_rows: bool = False) -> OptimizerSpec:
    """Stochastic gradient descent."""
    return _optimizer_spec("sgd", lr, weight_decay=weight_decay, all_rows=all_rows)


def Momentum(
    lr: float, momentum: float = 0.9, weight_decay: float = 0.0, *, all_rows: bool = False
) -> OptimizerSpec:
    """SGD with momentum. Without ``all_rows``, only steps that read a row change its momentum."""
    return _optimizer_spec("momentum", lr, momentum=momentum, weight_decay=weight_decay, all_rows=all_rows)


def Adagrad(
    lr: float, eps: float = 1e-10, weight_decay: float = 0.0, *, all_rows: bool = False
) -> OptimizerSpec:
    """Adagrad with a sum of squared gradients for each value of a row."""
    return _optimizer_spec("adagrad", lr, eps=eps, weight_decay=weight_decay, all_rows=all_rows)


def RowwiseAdagrad(lr: float, eps: float = 1e-10, weight_decay: float = 0.0) -> OptimizerSpec:
    """Adagrad with one accumulator per row, which sums the mean squares of the row's gradients."""
    return _optimizer_spec("rowwise_adagrad", lr, eps=eps, weight_decay=weight_decay)


def Adam(
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    *,
    all_rows: bool = False,
) -> OptimizerSpec:
    """Adam. Each row has a step count. Without ``all_rows``, only steps that read a row update the row."""
    return _optimizer_spec("adam", lr, betas=betas, eps=eps, weight_decay=weight_decay, all_rows=all_rows)


def AdamW(
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    *,
    all_rows: bool = False,
) -> OptimizerSpec:
    """Adam with decoupled weight decay. For the step counts and ``all_rows``, see :func:`Adam`."""
    return _optimizer_spec("adamw", lr, betas=betas, eps=eps, weight_decay=weight_decay, all_rows=all_rows)


def Ftrl(lr: float, beta: float = 1.0, l1: float = 0.0, weight_decay: float = 0.0) -> OptimizerSpec:
    """FTRL-proximal with the penalties ``l1`` and, for L2, ``weight_decay``."""
    return _optimizer_spec("ftrl", lr, ftrl_beta=beta, ftrl_l1=l1, weight_decay=weight_decay)


def _optimizer_spec(name: str, lr: float, **settings: Any) -> OptimizerSpec:
    spec = OptimizerSpec(name, lr, **settings)
    values = [("lr", spec.learning_rate), ("eps", spec.eps), ("beta", spec.ftrl_beta)]
    values += [("weight_decay", spec.weight_decay), ("l1", spec.ftrl_l1)]
    values += [("momentum", spec.momentum), *(("betas", beta) for beta in spec.betas)]
    for argument, value in values:
        limit = 1 if argument in ("momentum", "betas") else math.inf
        if not 0 <= value < limit or (value == 0 and argument in ("lr", "eps", "beta")):
            raise ValueError(f"{name}: {argument} cannot be {value}")
    return spec


class Jagged(NamedTuple):
    """A column with any number of values per sample.

    Attributes:
        values: the values of all samples, concatenated.
        offsets: int64 of shape (samples + 1): the start of each sample in ``values``, and the end.
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
        """Return the samples ``start : stop``."""
        first, last = int(self.offsets[start]), int(self.offsets[stop])
        return Jagged(self.values[first:last], self.offsets[start : stop + 1] - first)


Column: TypeAlias = Tensor | Jagged  # of a batch


@dataclass(eq=False)
class TableCall:
    """The arguments of a call of a table.

    Attributes:
        ids: of any shape; for bags (bags, ids per bag), or flat.
        offsets: where each bag starts, if the ids of bags are flat.
        has_end: whether the offsets include the end of the last bag.
        key: equal for two calls of a table with the same tensors, if these have not changed in between. Such
            calls share one lookup. Calls keep their tensors in memory, so other tensors have other keys.
    """

    module: TableModule
    ids: Tensor
    offsets: Tensor | None = None
    weights: Tensor | None = None
    has_end: bool = True

    def __post_init__(self) -> None:
        self.key = id(self.module), self.has_end, *map(_identify, (self.ids, self.offsets, self.weights))


def _identify(tensor: Tensor | None) -> tuple[object, ...] | None:
    """Return address and layout of a tensor, and a number that changes with each change in place."""
    if tensor is None:
        return None
    # Inference tensors have no version counter.
    content = hash(tensor.cpu().numpy().tobytes()) if tensor.is_inference() else tensor._version
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, content


class TableModule(nn.Module):
    """Base of :class:`Embedding` and :class:`EmbeddingBag`.

    Args:
        num_embeddings: number of rows; None for a growing table.
        embedding_dim: width of a row.
        growing: True, or a ``hybrid.Growth`` with rules for adding and evicting rows, for a table that adds a
            row for each new id. An id is then any 64-bit integer.
        optimizer: updates the rows; by default ``hybrid.Adagrad(lr=0.05)``.
        padding_idx: id of padding, whose vector is zeros; bags skip it.
        init_scale: scale of the initial rows; by default 1 / sqrt(rows). For a growing table, ``rows`` is
            its ``max_rows``, or a million without this limit.
        init: "uniform" in [-init_scale, init_scale], "normal" with standard deviation init_scale, or "zeros".
        initial: file of pretrained rows, read by the workers; see :meth:`from_pretrained`.
        dtype: type of the stored rows: None for ``train.dtype``, or ``torch.bfloat16``. Updated bfloat16 rows
            are rounded up or down at random. A call returns ``train.dtype`` in both cases.
        ids: names of the columns that the module passes to the table, such as ``"user"``. Their ids are
            looked up before the module runs; other ids are looked up when the module calls the table. A
            nested column has a name like ``"features['user']"``, and a column of a tuple has its index as
            the name, such as ``"0"``. If the batch is one tensor, the name is ``""``.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Attributes:
        name: path of the table in the distributed module; empty before the module is distributed.
        pooling: how a bag becomes a vector; None if there is a vector for each id.
    """

    pooling: Pooling | None = None

    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        *,
        growing: bool | Growth = False,
        optimizer: OptimizerSpec | None = None,
        padding_idx: int | None = None,
        init_scale: float | None = None,
        init: str = "uniform",
        initial: str = "",
        dtype: torch.dtype | None = None,
        ids: str | Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.growth = Growth() if growing is True else growing or None
        if (num_embeddings is None) != (self.growth is not None):
            raise ValueError("a table has a number of rows, or num_embeddings=None and growing=True")
        if embedding_dim < 1 or (num_embeddings is not None and num_embeddings < 1):
            raise ValueError(f"a table needs rows and columns, not {num_embeddings} x {embedding_dim}")
        if not isinstance(optimizer, OptimizerSpec | None):
            raise TypeError(f"optimizer must be of tables, such as hybrid.Adam(lr=0.01), not {optimizer!r}")
        if init not in INITIALIZERS.names:
            raise ValueError(f"init is one of {', '.join(INITIALIZERS.names)}, not {init!r}")
        if dtype not in (None, torch.bfloat16):
            raise ValueError(f"dtype is torch.bfloat16, or None for train.dtype, not {dtype}")
        if padding_idx is not None and num_embeddings and not 0 <= padding_idx < num_embeddings:
            raise ValueError(f"padding_idx must be at least 0 and below {num_embeddings}, not {padding_idx}")
        if self.growth is not None and (initial or (optimizer is not None and optimizer.all_rows)):
            raise ValueError("a growing table has neither a matrix of initial rows nor all_rows=True")
        self.num_embeddings = num_embeddings or 0
        self.embedding_dim = embedding_dim
        self.optimizer = optimizer or Adagrad(lr=0.05)
        self.padding_idx = padding_idx
        num_rows = num_embeddings or (self.growth and self.growth.max_rows) or UNLIMITED_ROWS
        self._spec = TableSpec(
            name="",
            num_rows=self.num_embeddings,
            dim=embedding_dim,
            pooling=Pooling.SUM,
            features=(),
            optimizer=self.optimizer,
            init_scale=num_rows**-0.5 if init_scale is None else init_scale,
            init=init,
            initial=initial,
            growth=self.growth,
            has_bfloat16_rows=dtype is torch.bfloat16,
        )
        self.ids = (ids,) if isinstance(ids, str) else tuple(ids)
        self.weights: tuple[str, ...] = ()
        self.name = ""
        self._loop: TrainingLoop | None = None

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
            freeze: whether the rows stay constant; otherwise ``optimizer`` updates them.
            options: other arguments of the constructor.

        Raises:
            DataError, StorageError: the file cannot be read, or has no matrix of floating-point values.
            TypeError, ValueError: an option is invalid, or there is an optimizer although ``freeze`` is set.
        """
        if freeze and optimizer is not None:
            raise ValueError("frozen rows have no optimizer; give freeze=False to train them")
        initial = make_absolute(source)
        num_rows, dim = read_shape(initial)
        chosen = OptimizerSpec("frozen", 0.0) if freeze else optimizer
        return cls(num_rows, dim, optimizer=chosen, initial=initial, **options)

    def __getattr__(self, name: str) -> Any:
        if name != "weight":
            return super().__getattr__(name)
        # For an error whose object is not the table, Python suggests no attribute of a similar name.
        rule = "the workers hold the rows. Call the table, with torch.arange(num_embeddings) for all rows"
        raise AttributeError(f"table {self.name} has no weight: {rule}", name=name, obj=None)

    def extra_repr(self) -> str:
        rows = self.num_embeddings if self.growth is None else "growing"
        return f"{rows}, {self.embedding_dim}, optimizer={self.optimizer.name}"

    def spec(self, name: str, bytes_per_value: int) -> TableSpec:
        """Return the table's specification; ``name`` is its path in the distributed module."""
        return replace(
            self._spec, name=name, features=(name,), optimizer=self.optimizer, bytes_per_value=bytes_per_value
        )

    def bind(self, name: str, loop: TrainingLoop) -> None:
        """Set the name, and the loop that looks up vectors. RuntimeError if the table has a loop."""
        if self._loop is not None:
            raise RuntimeError(f"table {self.name} is already distributed: build the module again")
        self.name, self._loop = name, loop
        # A graph break for torch.compile: a lookup waits for other processes.
        self.forward = torch.compiler.disable(self.forward)
        self.register_state_dict_pre_hook(_refuse_copy)  # type: ignore[no-untyped-call]

    def __getstate__(self) -> dict[str, Any]:
        _refuse_copy(self)
        return self.__dict__

    def calls(self, columns: Mapping[str, Column]) -> list[TableCall]:
        """Return a call for each column that ``self.ids`` names, with weights if ``self.weights`` names them.

        If ``columns`` lacks the column of a call, evaluation skips the call; training raises DataError.
        """
        missing = [name for name in (*self.ids, *self.weights) if name not in columns]
        if missing and torch.is_grad_enabled():
            tensors = ", ".join(columns)
            raise DataError(f"table {self.name}: the batch has no tensor {missing[0]!r}; it has {tensors}")
        pairs = [pair for pair in zip_longest(self.ids, self.weights) if not {*pair} & {*missing}]
        return [self.call(columns[i], None, None if w is None else columns[w]) for i, w in pairs]

    def call(self, ids: Column, offsets: Tensor | None = None, weights: Column | None = None) -> TableCall:
        """Return a :class:`TableCall` of the arguments of ``forward``."""
        return TableCall(self, ids.values if isinstance(ids, Jagged) else ids)

    def request(self, call: TableCall) -> TableRequest:
        """Return what a call looks up: the table's name, and row numbers or keys of ids except padding."""
        # Bags that the module pools itself have flat ids without offsets.
        if self.pooling is None or (call.offsets is None and call.ids.dim() == 1):
            is_padding = self._is_padding(call.ids)
            ids = call.ids if is_padding is None else call.ids[~is_padding]
            return self.name, Bags(self._rows(_as_ids(ids)))
        ids_L, offsets, weights_L = self._without_padding(call)
        weights_L = None if weights_L is None else weights_L.detach().cpu()
        return self.name, Bags(self._rows(ids_L), offsets, weights_L, self.pooling)

    def _vectors(self, call: TableCall) -> Tensor:
        if self._loop is None:
            raise RuntimeError(
                f"{type(self).__name__} has no rows before it is distributed: call "
                "model = hybrid.connect().distribute(model) with the whole module"
            )
        return self._loop.vectors(call)

    def _rows(self, ids_L: Tensor) -> Tensor:
        """Convert ids to keys (hashes) if the table grows; otherwise, ids are row numbers."""
        if self.growth is None:
            return ids_L
        return torch.from_numpy(next_random(ids_L.numpy().view(np.uint64)).view(np.int64))

    def _is_padding(self, ids: Tensor) -> Tensor | None:
        if self.padding_idx is None:
            return None
        is_padding = ids == self.padding_idx
        return is_padding if bool(is_padding.any()) else None

    def _without_padding(self, call: TableCall) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return flat ids, offsets (bags + 1) and flat weights or None, all without padding."""
        ids, offsets, weights = call.ids.cpu(), call.offsets, call.weights
        if offsets is None:
            offsets = torch.arange(len(ids) + 1) * ids.shape[1]
        elif not call.has_end:
            offsets = torch.cat([offsets, offsets.new_tensor([len(ids)])])
        offsets = offsets.to("cpu", torch.int64).contiguous()
        if (is_padding := self._is_padding(ids)) is not None:
            kept_before = torch.cat([torch.zeros(1, dtype=torch.int64), (~is_padding).reshape(-1).cumsum(0)])
            ids, offsets = ids[~is_padding], kept_before[offsets]
            weights = None if weights is None else weights[(~is_padding).to(weights.device)]
        return _as_ids(ids), offsets, None if weights is None else weights.reshape(-1)


class Embedding(TableModule):
    """A vector for each id, like ``torch.nn.Embedding``."""

    def forward(self, ids: Tensor | Jagged) -> Tensor:
        """Return vectors (*ids.shape, D), or (ids, D) for a :class:`Jagged`; zeros for padding.

        Raises:
            DataError: an id is not a row of the table.
            RuntimeError: the table is not distributed, or gradients are enabled without a training batch.
            TypeError: ``ids`` are not integers.
        """
        call = self.call(ids)
        flat, vectors_LD = call.ids, self._vectors(call)
        if (is_padding := self._is_padding(flat)) is not None:
            positions = (~is_padding).reshape(-1).nonzero().view(-1).to(vectors_LD.device)
            empty_LD = vectors_LD.new_zeros(flat.numel(), self.embedding_dim)
            vectors_LD = empty_LD.index_copy(0, positions, vectors_LD)
        return vectors_LD.view(*flat.shape, self.embedding_dim)


class EmbeddingBag(TableModule):
    """One vector for each bag of ids, like ``torch.nn.EmbeddingBag``; zeros for an empty bag.

    Args:
        mode: how the rows of a bag become a vector: "sum", "mean" or "max".
        weights: columns with ``per_sample_weights``, one for each column in ``ids``; by default none.
        include_last_offset: whether offsets include the end of the last bag.
        pooled_by: the roles that pool bags: the "workers" that hold the rows, or the "trainers", which fetch
            each distinct row of a call once. If rows occur in many bags, "trainers" sends fewer bytes.
    """

    pooling: Pooling

    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        *,
        mode: str = "mean",
        growing: bool | Growth = False,
        optimizer: OptimizerSpec | None = None,
        padding_idx: int | None = None,
        init_scale: float | None = None,
        init: str = "uniform",
        initial: str = "",
        dtype: torch.dtype | None = None,
        ids: str | Sequence[str] = (),
        weights: str | Sequence[str] = (),
        include_last_offset: bool = False,
        pooled_by: str = "workers",
    ) -> None:
        if pooled_by not in POOLERS:
            raise ValueError(f"pooled_by is one of {', '.join(POOLERS)}, not {pooled_by!r}")
        super().__init__(
            num_embeddings,
            embedding_dim,
            growing=growing,
            optimizer=optimizer,
            padding_idx=padding_idx,
            init_scale=init_scale,
            init=init,
            initial=initial,
            dtype=dtype,
            ids=ids,
        )
        self.weights = (weights,) if isinstance(weights, str) else tuple(weights)
        if self.weights and len(self.weights) != len(self.ids):
            raise ValueError(f"weights must name one column for each of ids, not {list(self.weights)}")
        if mode not in [*Pooling]:
            raise ValueError(f"mode is one of {', '.join(Pooling)}, not {mode!r}")
        self.pooling = Pooling(mode)
        self.include_last_offset = include_last_offset
        self._spec = replace(self._spec, pooled_by=pooled_by)

    def forward(
        self,
        ids: Tensor | Jagged,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | Jagged | None = None,
    ) -> Tensor:
        """Return a vector for each bag, (bags, D). :meth:`Embedding.forward` lists further errors.

        Args:
            ids: (bags, ids per bag), a :class:`Jagged`, or flat with ``offsets``.
            offsets: where each bag starts.
            per_sample_weights: a weight per id, in the layout of the ids; only for mode "sum". If the weights
                require gradients, the rows are looked up in this call, and the trainer pools the bags.

        Raises:
            DataError, ValueError: the arguments do not match, or there are weights and ``mode`` is not "sum".
        """
        call = self.call(ids, offsets, per_sample_weights)
        if call.weights is None or not (call.weights.requires_grad and torch.is_grad_enabled()):
            return self._vectors(call)
        ids_L, offsets, weights_L = self._without_padding(call)
        rows_LD = self._vectors(TableCall(self, ids_L))
        bags_L = torch.arange(len(offsets) - 1).repeat_interleave(offsets.diff()).to(rows_LD.device)
        assert weights_L is not None
        pooled_ND = rows_LD.new_zeros(len(offsets) - 1, self.embedding_dim)
        return pooled_ND.index_add(0, bags_L, rows_LD * weights_L.to(rows_LD).unsqueeze(1))

    def call(self, ids: Column, offsets: Tensor | None = None, weights: Column | None = None) -> TableCall:
        """Return a :class:`TableCall`; DataError or ValueError if ids, offsets and weights do not match."""
        if isinstance(weights, Jagged):
            if isinstance(ids, Jagged) and ids.offsets.tolist() != weights.offsets.tolist():
                raise DataError(f"table {self.name}: the weights have other offsets than the ids")
            weights = weights.values
        if weights is not None and self.pooling is not Pooling.SUM:
            rule = f"per_sample_weights need mode='sum', not {self.pooling.value!r}"
            raise ValueError(f"table {self.name}: {rule}")
        if isinstance(ids, Jagged):
            return TableCall(self, ids.values, ids.offsets, weights)
        if (ids.dim() == 2) == (offsets is not None) or ids.dim() not in (1, 2):
            raise ValueError(
                f"ids of shape {list(ids.shape)}: flat ids need offsets, ids of shape (bags, ids) take none"
            )
        return TableCall(self, ids, offsets, weights, self.include_last_offset)


def _refuse_copy(table: TableModule, *_: object) -> None:
    if table._loop is not None and not table._loop.is_saving:
        raise RuntimeError(
            "a copy or state_dict() of a distributed module would lack the rows, which workers hold: call "
            "cluster.save(folder, optimizer), cluster.plain_module() or cluster.plain_module().state_dict()"
        )


def _as_ids(ids: Tensor) -> Tensor:
    if ids.is_floating_point() or ids.is_complex() or ids.dtype is torch.bool:
        raise TypeError(f"ids must be integers, not {ids.dtype}")
    return ids.detach().reshape(-1).to("cpu", torch.int64).contiguous()


def plain_copy(net: nn.Module, rows_of: Callable[[TableModule], Tensor | nn.Module]) -> nn.Module:
    """Copy a module to the CPU, with an ``nn.Embedding`` or ``nn.EmbeddingBag`` in place of each table.

    Args:
        rows_of: returns the rows of a table, or another module that takes the place of the table.
    """
    copies: dict[int, nn.Module] = {}
    for table in net.modules():
        if not isinstance(table, TableModule):
            continue
        rows_RD = rows_of(table)
        if isinstance(rows_RD, nn.Module):
            copies[id(table)] = rows_RD
            continue
        if table.padding_idx is not None:
            rows_RD[table.padding_idx] = 0.0
        options: dict[str, Any] = {"freeze": False, "padding_idx": table.padding_idx}
        if isinstance(table, EmbeddingBag):
            options |= {"mode": table.pooling.value, "include_last_offset": table.include_last_offset}
            copies[id(table)] = nn.EmbeddingBag.from_pretrained(rows_RD, **options)
        else:
            copies[id(table)] = nn.Embedding.from_pretrained(rows_RD, **options)
    # A table refers to processes and connections, which cannot be copied. deepcopy uses ``copies`` instead.
    return copy.deepcopy(net, copies).cpu()
