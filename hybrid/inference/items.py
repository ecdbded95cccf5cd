"""Evaluation, search and vector export for the items of a retrieval model."""

from functools import cached_property
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor

from hybrid.batch import Batch
from hybrid.engine.retrieval import ItemRanking
from hybrid.errors import ConfigError
from hybrid.inference.trained_module import TrainedModule
from hybrid.metrics import Predictions
from hybrid.models.two_towers import top_items

SEARCHED = ("items", "scores")  # the columns of :meth:`Items.search`
ITEMS_FILE = "items.parquet"


class Items:
    """All items of a model, in the order of their rows in the item table.

    Args:
        key: the command-line option that needs items; errors name this option.

    Raises:
        ConfigError: the model has no retrieval task.

    Attributes:
        column: the name of the item column.
        vectors_ID: the vector of each item.
    """

    def __init__(self, model: TrainedModule, key: str) -> None:
        config, self._encoder, self._key = model.trained.config, model.trained.encoder, key
        if config.retrieval is None:
            raise ConfigError(key, "needs a run with a task of type retrieval")
        self.column = config.retrieval.item
        self._ranking = ItemRanking(config, self._encoder.input_spec)
        self.vectors_ID = self._ranking.item_vectors(lambda batch: model.predict(batch).outputs)

    @cached_property
    def names(self) -> pa.LargeStringArray:
        """The name of each item in the training data; ConfigError if the model does not store names."""
        encoding = self._encoder.sparse[self._ranking.feature]
        if encoding.values is None:
            rule = f"needs vocabulary = build for column {encoding.name}: hashes have no names of items"
            raise ConfigError(self._key, rule, encoding.vocabulary)
        return encoding.values.texts

    def rank(self, predictions: Predictions, batch: Batch) -> Predictions:
        """Return ``predictions`` with new outputs: the rank of each sample's item among all items."""
        ranks_B = self._ranking.ranks(predictions.outputs, batch, self.vectors_ID)
        return predictions._replace(outputs=ranks_B)

    def search(self, outputs_BO: Tensor, k: int) -> dict[str, pa.Array]:
        """Return two columns of lists: the names of each sample's ``k`` best items, and their scores.

        Raise ConfigError if ``k`` is not in 1 to the number of items, or the model does not store names.

        Args:
            outputs_BO: outputs of the model, whose first half is the user vector.
        """
        if not 1 <= k <= len(self.names):
            raise ConfigError(self._key, f"must be at least 1 and at most the {len(self.names):,} items", k)
        users_BD = outputs_BO.chunk(2, dim=1)[0]
        ids_BK = top_items(users_BD, self.vectors_ID.__getitem__, len(self.names), k)
        scores_BK = (users_BD.unsqueeze(1) * self.vectors_ID[ids_BK]).sum(dim=2)
        ends = pa.array(range(0, ids_BK.numel() + 1, k), pa.int32())
        names = self.names.take(pa.array(ids_BK.flatten().numpy())).cast(pa.string())
        scores = pa.array(scores_BK.flatten().double().numpy())
        lists = [pa.ListArray.from_arrays(ends, values) for values in (names, scores)]
        return dict(zip(SEARCHED, lists, strict=True))

    def write(self, folder: Path) -> list[str]:
        """Write names and vectors to a Parquet file; return its name. ConfigError if names are not stored."""
        values = pa.array(self.vectors_ID.float().flatten().numpy())
        vectors = pa.FixedSizeListArray.from_arrays(values, self.vectors_ID.shape[1])
        pq.write_table(pa.table({"item": self.names, "vector": vectors}), folder / ITEMS_FILE)
        return [ITEMS_FILE]
