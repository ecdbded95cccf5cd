"""Rules of [embedding] and [tables.NAME]: which tables can have all of their rows take every step."""

from typing import Any

import pytest

from hybrid.config import EmbeddingSection, RunConfig, TableSection, TrainSection
from hybrid.config.loading import validate
from hybrid.config.table_sections import OPTIMIZERS_OF_ALL_ROWS
from hybrid.errors import ConfigError


def config(update: str = "sync", table: TableSection | None = None, **embedding: Any) -> RunConfig:
    tables = {} if table is None else {"user": table}
    return RunConfig(
        train=TrainSection(update=update), embedding=EmbeddingSection(**embedding), tables=tables
    )


@pytest.mark.parametrize("optimizer", OPTIMIZERS_OF_ALL_ROWS)
@pytest.mark.parametrize("update", ["sync", "pipelined"])
def test_all_rows_take_every_step_of_what_torch_has(optimizer: str, update: str) -> None:
    validate(config(update, optimizer=optimizer, all_rows=True))
    validate(config(update, TableSection(optimizer=optimizer, all_rows=True), optimizer="ftrl"))


def test_a_table_without_them_may_have_any_optimizer_and_one_that_is_frozen_has_none() -> None:
    validate(config(table=TableSection(optimizer="ftrl", all_rows=False), all_rows=True))
    validate(config(table=TableSection(frozen=True), all_rows=True))
    validate(config("async", TableSection(all_rows=False)))


ONE_OF = "or the optimizer one of sgd, momentum, adagrad, adam, adamw"


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (config(optimizer="ftrl", all_rows=True),
         f"embedding.all_rows = True: must be false with ftrl, {ONE_OF}"),
        (config(table=TableSection(all_rows=True), optimizer="rowwise_adagrad"),
         f"tables.user.all_rows = True: must be false with rowwise_adagrad, {ONE_OF}"),
        (config(table=TableSection(optimizer="ftrl"), all_rows=True),
         f"tables.user.all_rows = True: must be false with ftrl, {ONE_OF}"),
        (config("async", all_rows=True),
         "embedding.all_rows = True: needs train.update = sync or pipelined, whose steps all trainers take"),
        (config("async", TableSection(all_rows=True)), "tables.user.all_rows = True: needs train.update = "),
        (config(table=TableSection(frozen=True, all_rows=True)),
         "tables.user.all_rows = True: is not read of a table that is frozen"),
    ],
)  # fmt: skip
def test_what_has_no_such_steps_is_refused(refused: RunConfig, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(refused)
    assert str(caught.value).startswith(message)
