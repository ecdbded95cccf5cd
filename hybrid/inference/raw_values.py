"""Raw values in memory, encoded as those of files are."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from hybrid.custom_loop.prepared_batches import DENSE
from hybrid.data.encode.feature_encoder import EncodedBlock
from hybrid.data.parse.column_layout import Layout
from hybrid.data.parse.delimited_text import TableBlock
from hybrid.data.parse.sources import parse
from hybrid.data.prepare.new_rows import section_for
from hybrid.data.values.column_values import without_maps
from hybrid.errors import DataError
from hybrid.inference.trained_run import Trained
from hybrid.input_spec import InputSpec

_PLACE = Path("encode(columns)")  # in errors


def encoded(trained: Trained, columns: Any, offsets: str, weights: str) -> dict[str, Tensor]:
    """See :meth:`TrainedModule.encode`.

    Args:
        offsets: ends the names of tensors that say where the ids of each sample start.
        weights: ends the names of tensors of the weights of ids.
    """
    try:
        table = pa.table(columns)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise DataError(f"{_PLACE}: cannot be read as columns of one length: {error}") from error
    spec = trained.encoder.input_spec
    config = trained.config
    layout = Layout.of(section_for(config, [], spec), config.columns, config.tasks, with_labels=False)
    layout.require(table.column_names, _PLACE)
    arrays = {name: _one_array(table[name]) for name in layout.wanted}
    rows = np.arange(table.num_rows)
    try:
        block, bad = parse(TableBlock(arrays, rows, rows, table.num_rows, table.num_rows, []), layout)
    except pa.ArrowException as error:
        raise DataError(f"{_PLACE}: {error}") from error
    if bad:
        raise DataError(f"{_PLACE}: row {bad[0].line}: {bad[0].found}")
    return _batch(spec, trained.encoder.encode(block), offsets, weights)


def _one_array(column: Any) -> Any:
    return without_maps(pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type))


def _batch(spec: InputSpec, block: EncodedBlock, offsets: str, weights: str) -> dict[str, Tensor]:
    batch = {DENSE: torch.from_numpy(block.dense_BF)} if spec.dense_features else {}
    one_id, bags = iter(block.ids_BK.T), iter(block.bags)
    for feature in spec.sparse_features:
        if not feature.multi_hot:
            batch[feature.name] = torch.from_numpy(next(one_id).astype(np.int64))
            continue
        bag = next(bags)
        batch[feature.name] = torch.from_numpy(bag.ids_L.astype(np.int64))
        if bag.weights_L is not None:
            # A copy, since what is Arrow's cannot be written to.
            batch[feature.name + weights] = torch.from_numpy(bag.weights_L.copy())
        batch[feature.name + offsets] = torch.from_numpy(np.append(0, bag.lengths_B.cumsum()))
    return batch
