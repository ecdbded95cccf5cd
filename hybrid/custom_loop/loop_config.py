"""What of a configuration holds for a loop of the user's own."""

from collections.abc import Sequence

from hybrid.config import RunConfig
from hybrid.config.validation import SCHEDULES_THAT_END
from hybrid.embedding.table_spec import TableSpec
from hybrid.errors import ConfigError
from hybrid.protocol.learning_rate_schedule import Schedule
from hybrid.protocol.update_rules import UpdateRules


def own_rules(config: RunConfig, num_trainers: int) -> UpdateRules:
    """How gradients become updates.

    Raises:
        ConfigError: a key is not for loops of one's own.
    """
    if config.train.micro_batches != 1:
        rule = "must be 1: a loop of one's own takes each batch in one piece"
        raise ConfigError("train.micro_batches", rule, config.train.micro_batches)
    if config.dense.ddp == "inside":
        raise ConfigError(
            "dense.ddp", "must be outside or none: a module of one's own has no stages", "inside"
        )
    section = config.schedule
    if section.call.name in SCHEDULES_THAT_END and not section.steps:
        rule = f'needs its steps, which only your loop knows, as in "{section.call.name}(steps = 1000)"'
        raise ConfigError("schedule.kind", rule, section.kind)
    return UpdateRules.of(config, Schedule.of(section, section.steps), num_trainers)


def check_tables(config: RunConfig, tables: Sequence[TableSpec]) -> None:
    """ConfigError where all rows of a table take every step, and trainers have no steps together."""
    for table in tables:
        if table.optimizer.all_rows and config.train.update == "async":
            rule = f"must be sync or pipelined, since all rows of table {table.name} take every step"
            raise ConfigError("train.update", rule, "async")
