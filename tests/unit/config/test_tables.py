"""Rules of [embedding] and [tables.NAME]."""

from typing import Any

import pytest

from hybrid.config import EmbeddingSection, RunConfig, TableSection, TrainSection
from hybrid.config.loading import validate
from hybrid.errors import ConfigError


def config(update: str = "sync", table: TableSection | None = None, **embedding: Any) -> RunConfig:
    tables = {} if table is None else {"user": table}
    return RunConfig(
        train=TrainSection(update=update), embedding=EmbeddingSection(**embedding), tables=tables
    )


ALL_ROWS = "adam(all_rows = true)"


@pytest.mark.parametrize("update", ["sync", "lookahead"])
def test_trainers_that_step_together_may_step_all_rows(update: str) -> None:
    validate(config(update, optimizer=ALL_ROWS))
    validate(config(update, TableSection(optimizer=ALL_ROWS)))


@pytest.mark.parametrize(
    ("refused", "key"),
    [
        (config(optimizer="ftrl(all_rows = true)"), "embedding.optimizer"),
        (config(table=TableSection(optimizer="rowwise_adagrad(all_rows = true)")), "tables.user.optimizer"),
        (config("async", optimizer=ALL_ROWS), "embedding.optimizer"),
        (config("async", TableSection(optimizer=ALL_ROWS)), "tables.user.optimizer"),
        (config(table=TableSection(frozen=True, optimizer=ALL_ROWS)), "tables.user.optimizer"),
        (config(optimizer="adam(betas = [0.9])"), "embedding.optimizer"),
        (config(optimizer="adam(eps = 0)"), "embedding.optimizer"),
        (config(table=TableSection(init="zeros(1)")), "tables.user.init"),
    ],
)
def test_optimizers_and_initializers_that_are_refused(refused: RunConfig, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(refused)
    assert caught.value.key == key
