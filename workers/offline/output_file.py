"""The outputs of any number of samples in a scratch file, where equal samples are tied."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

ROWS_AT_ONCE = 1 << 20


class StoredOutputs:
    """Outputs of ``num_samples`` samples, on the disk; what of them is in memory is a part.

    Args:
        folder: where the files are made; its own, and removed by whoever has made it.
        num_outputs: of a sample.
        dtype: of the outputs.
        rows_at_once: how many samples are looked at together, and of how many distinct ones a part is.
    """

    def __init__(
        self,
        folder: Path,
        num_samples: int,
        num_outputs: int,
        dtype: torch.dtype,
        rows_at_once: int = ROWS_AT_ONCE,
    ) -> None:
        name, shape = str(dtype).removeprefix("torch."), (num_samples, num_outputs)
        self._outputs_NO = np.lib.format.open_memmap(folder / "outputs.npy", "w+", name, shape)
        self._keys_N = np.lib.format.open_memmap(folder / "keys.npy", "w+", np.uint64, (num_samples,))
        self._rows_at_once = rows_at_once
        self._filled = 0

    def append(self, outputs_BO: Tensor, keys_B: Tensor) -> None:
        """Add samples.

        Args:
            outputs_BO: of the dense net; ``outputs_B`` where there is one of a sample.
            keys_B: which of all are equal; see :meth:`hybrid.batch.Batch.row_keys`.
        """
        stop = self._filled + len(keys_B)
        self._outputs_NO[self._filled : stop] = outputs_BO.numpy().reshape(len(keys_B), -1)
        self._keys_N[self._filled : stop] = keys_B.numpy().view(np.uint64)
        self._filled = stop

    def tie(self) -> None:
        """Give all equal samples the same outputs, the means of theirs, as :meth:`Predictions.tied` does."""
        parts = -(-len(self._keys_N) // self._rows_at_once)
        for part in range(parts):
            keys_U, means_UO = self._means(part, parts)
            for rows, of_part in self._rows_of(part, parts):
                found = np.searchsorted(keys_U, self._keys_N[rows][of_part])
                self._outputs_NO[rows][of_part] = means_UO[found]

    def outputs(self, start: int, stop: int) -> Tensor:
        """Those of the samples from one to another, in the shape in which they were added."""
        outputs_BO = torch.from_numpy(np.array(self._outputs_NO[start:stop]))
        return outputs_BO[:, 0] if outputs_BO.shape[1] == 1 else outputs_BO

    def _means(self, part: int, parts: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.float64]]:
        """The distinct keys of a part, in ascending order, and the mean of the outputs of each."""
        num_outputs = self._outputs_NO.shape[1]
        keys_U = np.empty(0, np.uint64)
        sums_UO: npt.NDArray[np.float64] = np.empty((0, num_outputs))
        counts_U: npt.NDArray[np.float64] = np.empty(0)
        for rows, of_part in self._rows_of(part, parts):
            keys = np.concatenate([keys_U, self._keys_N[rows][of_part]])
            sums = np.concatenate([sums_UO, self._outputs_NO[rows][of_part]])
            counts = np.concatenate([counts_U, np.ones(int(of_part.sum()))])
            keys_U, places = np.unique(keys, return_inverse=True)
            of_each = [np.bincount(places, sums[:, o], len(keys_U)) for o in range(num_outputs)]
            sums_UO = np.stack(of_each, axis=1).astype(np.float64)
            counts_U = np.bincount(places, counts, len(keys_U)).astype(np.float64)
        return keys_U, sums_UO / counts_U[:, None]

    def _rows_of(self, part: int, parts: int) -> Iterator[tuple[slice, npt.NDArray[np.bool_]]]:
        """Some samples after the other, and which of them are of a part: equal ones are of the same."""
        for start in range(0, len(self._keys_N), self._rows_at_once):
            rows = slice(start, start + self._rows_at_once)
            yield rows, self._keys_N[rows] % np.uint64(parts) == part
