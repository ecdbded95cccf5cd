"""Several columns as one, whose values are the combinations of theirs."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

_BETWEEN = "\x1f"  # the unit separator of ASCII


def crossed(columns: Sequence[Any]) -> Any:
    """A value for each row of columns as :func:`values` gives them, of one value a row.

    Returns:
        A dictionary array of strings; null where one of the columns is.
    """
    indices_CB = np.stack([np.asarray(each.indices.fill_null(-1)).astype(np.int64) for each in columns])
    code_B = np.zeros(indices_CB.shape[1], np.int64)
    for each, index_B in zip(columns, indices_CB, strict=True):
        # Codes are numbered anew each time, so that their products stay small.
        _, code_B = np.unique(code_B * (len(each.dictionary) + 1) + index_B + 1, return_inverse=True)
    _, first_N, code_B = np.unique(code_B, return_index=True, return_inverse=True)
    texts = [
        [None if i < 0 else words[i] for i in index_B[first_N].tolist()]
        for words, index_B in zip((c.dictionary.to_pylist() for c in columns), indices_CB, strict=True)
    ]
    joined = [_BETWEEN.join(word or "" for word in combination) for combination in zip(*texts, strict=True)]
    absent_B = (indices_CB < 0).any(axis=0)
    coded = pa.array(code_B.astype(np.int32), pa.int32(), mask=absent_B)
    return pa.DictionaryArray.from_arrays(coded, pa.array(joined, pa.string()))
