"""The module of a custom training loop, with the tables of a checkpoint that the loop has written."""

import copy
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from hybrid.checkpoint.checkpoint_folders import DENSE_FILE
from hybrid.checkpoint.tensor_file import unpack_dense
from hybrid.custom_loop.backend import BACKEND
from hybrid.custom_loop.embedding_modules import EmbeddingBag, Jagged, TableModule
from hybrid.custom_loop.local_batches import DENSE
from hybrid.embedding.table_spec import Pooling
from hybrid.errors import ConfigError, HybridError
from hybrid.inference.table_modules import hash_ids
from hybrid.inference.trained_module import TrainedModule, load_parameters, pool_bags
from hybrid.inference.trained_run import TrainedRun
from hybrid.storage import files
from hybrid.user_code.user_modules import load_function

_KEY = "--module"


class _NoBackend:
    def __getattr__(self, name: str) -> NoReturn:
        raise HybridError('hybrid.connect() must be called below if __name__ == "__main__":')


class CustomModule(TrainedModule):
    """A trained model whose net is the module of a custom training loop.

    Args:
        name: FILE.py:FUNCTION or package.module:FUNCTION. This function, or class, makes the module from one
            argument, which has the attributes ``num_rows`` and ``dense_columns`` of :class:`PreparedData`.
        in_memory: whether tables are parameters in memory; otherwise rows are read from the files.

    Raises:
        ConfigError: there is no such function, its file cannot be imported, or it returns no module.
        CheckpointError: the checkpoint is of another module.
        HybridError: the file of the function calls ``hybrid.connect()``.
    """

    def __init__(self, trained: TrainedRun, name: str, *, in_memory: bool) -> None:
        spec = trained.encoder.input_spec
        num_rows = {each.name: each.num_rows for each in spec.sparse_features}
        data = SimpleNamespace(num_rows=num_rows, dense_columns=spec.dense_features)
        module_name, _, function = name.partition(":")
        file, folder = Path(module_name), None
        is_module = module_name.replace(".", "").isidentifier()
        if not function or not (is_module or file.suffix == ".py"):
            raise ConfigError(_KEY, "must be FILE.py:FUNCTION or package.module:FUNCTION", name)
        if file.suffix == ".py":
            if not files.is_file(file):
                raise ConfigError(_KEY, "is not a file", module_name)
            module_name, folder = file.stem, file.parent
        token = BACKEND.set(cast(Any, _NoBackend()))
        try:
            module = load_function(_KEY, f"{module_name}:{function}", ("data",), folder)(data)
        finally:
            BACKEND.reset(token)
        if not isinstance(module, nn.Module):
            raise ConfigError(_KEY, f"must return a torch.nn.Module, not a {type(module).__name__}", name)
        tables = load_parameters(module, trained.stored)
        specs = [each.spec(name, 4) for name, each in tables.items()]
        super().__init__(trained, specs, range(len(num_rows)), in_memory)  # each feature may be a sequence
        pairs = zip(tables.values(), self.tables, strict=True)
        stored = {id(table): StoredTable(table, rows, self.dtype) for table, rows in pairs}
        self.module: nn.Module = copy.deepcopy(module, stored)  # these tables replace its own
        self.dense_states = {DENSE_FILE: unpack_dense(trained.stored.tensors(DENSE_FILE))[0]}
        self.eval()

    def outputs(self, columns: Mapping[str, Any]) -> Tensor:
        """Return the outputs of the module for a batch; HybridError if their shape does not fit the tasks."""
        first = columns[self.inputs[0].name]
        size = first.offsets.shape[0] - 1 if isinstance(first, Jagged) else first.shape[0]
        outputs: Tensor = self.module({DENSE: torch.zeros(size, 0), **columns})
        shape = [size, *self._output_shape[1:]]
        form = list(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        if form not in (shape, [*shape, 1][:2]):  # one output may also have the shape (size, 1)
            rule = f"must return outputs of shape {shape}, not {form}"
            raise HybridError(f"{_KEY}: the module {rule}")
        return outputs.to(self.dtype).view(self._output_shape)


class StoredTable(nn.Module):
    """A replacement of ``table`` that needs no workers: a call has the same arguments, and returns the same.

    Args:
        rows: a module that returns the stored rows (ids, D) of ids (ids,), or of keys if ``table`` grows.
    """

    def __init__(self, table: TableModule, rows: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.rows, self.dtype = rows, dtype
        self.padding_idx, self.is_growing = table.padding_idx, table.growth is not None
        self.pooling = table.pooling
        self.has_end = isinstance(table, EmbeddingBag) and table.include_last_offset

    def forward(self, ids: Any, offsets: Tensor | None = None, per_sample_weights: Any = None) -> Tensor:
        has_end = self.has_end or isinstance(ids, Jagged)
        ids, offsets = ids if isinstance(ids, Jagged) else (ids, offsets)
        ids_L = ids.reshape(-1).long()
        is_id_L = torch.ones_like(ids_L, dtype=torch.bool)
        if self.padding_idx is not None:
            is_id_L = ids_L != self.padding_idx
        is_id_L1 = is_id_L.unsqueeze(1)
        rows_LD: Tensor = self.rows(hash_ids(ids_L) if self.is_growing else ids_L).to(self.dtype)
        weights = per_sample_weights
        if weights is not None:
            weights = weights.values if isinstance(weights, Jagged) else weights
            rows_LD = rows_LD * weights.reshape(-1, 1).to(rows_LD)
        rows_LD = rows_LD.masked_fill(~is_id_L1, -torch.inf if self.pooling is Pooling.MAX else 0.0)
        if self.pooling is None:
            return rows_LD.view(*ids.shape, rows_LD.shape[1])
        if offsets is None:
            offsets = torch.arange(ids.shape[0] + 1) * ids.shape[1]
        elif not has_end:
            offsets = torch.cat([offsets, offsets.new_full((1,), ids.shape[0])])
        counts_B1 = pool_bags(is_id_L1.to(rows_LD), offsets, Pooling.SUM)
        if self.pooling is Pooling.MEAN:
            return pool_bags(rows_LD, offsets, Pooling.SUM) / counts_B1.clamp(min=1)
        return pool_bags(rows_LD, offsets, self.pooling).masked_fill(counts_B1 == 0, 0.0)
