"""Tables that stay in files."""

from pathlib import Path

import numpy as np
import psutil
import torch

from hybrid.inference.trained_module import MappedTable


def test_a_table_larger_than_memory_is_read_row_by_row(tmp_path: Path) -> None:
    """The files have holes except for one row; the system would not map them for writing."""
    num_bytes = psutil.virtual_memory().total + psutil.swap_memory().total
    num_rows, shards = num_bytes // 256, []
    for shard in range(2):
        path = tmp_path / f"shard-{shard}"
        with path.open("wb") as file:
            file.seek((num_rows - 3) * 256)
            file.write(np.full(64, 10.0 + shard, np.float32).tobytes())
            file.truncate(num_rows * 256)
        shards.append(np.memmap(path, np.float32, "r", shape=(num_rows, 64)))
    ids_L = torch.tensor([2 * num_rows - 5, 0, 2 * num_rows - 6, 2 * num_rows - 5])
    assert MappedTable(shards, torch.float32)(ids_L)[:, 7].tolist() == [11.0, 0.0, 10.0, 11.0]
