"""What calls of tables of a module of one's own ask workers for."""

from collections.abc import Sequence

import pytest
import torch
from support.shards import LocalTables, evaluate, hosting
from torch import Tensor
from torch.futures import Future

from hybrid.embedding.bags import Item
from hybrid.embedding.placement import place
from hybrid.embedding.table_spec import OptimizerSpec, Pooling, TableSpec
from hybrid.embedding.trainer.module_lookups import ModuleTables, TableRequest
from hybrid.primitives.step_timings import StepClock
from hybrid.protocol.ticket import Ticket
from hybrid.protocol.update_rules import UpdateRules


class Heard(LocalTables):
    """Tables that keep what they are asked for."""

    items: Sequence[Item] = ()

    def lookup(self, ticket: Ticket, items: Sequence[Item]) -> Future[list[Tensor]]:
        self.items = items
        return super().lookup(ticket, items)


@pytest.mark.parametrize(
    ("pooled_by", "rows"),
    [("workers", [1, 3, 1, 3, 3, 1]), ("trainers", [1, 3])],
    ids=["workers", "trainers"],
)
def test_bags_are_pooled_by_whom_their_table_says(pooled_by: str, rows: list[int]) -> None:
    table = TableSpec("t", 6, 2, Pooling.SUM, ("t",), OptimizerSpec("sgd", 1.0), 1.0, pooled_by=pooled_by)
    ids, offsets = torch.tensor([1, 3, 1, 3, 3, 1]), torch.tensor([0, 2, 2, 6])
    with hosting(UpdateRules(1)) as host:
        tables = Heard(host)
        asker = ModuleTables([table], place([table], 1), {0: tables}, StepClock())
        pooled_BD, _ = asker.lookup([TableRequest("t", ids, offsets)], evaluate(0)).outputs()
        ((_, bags),) = tables.items
        assert bags.ids_L.tolist() == rows
        rows_RD = host.groups[0].weight_RD
        expected_BD = torch.stack([rows_RD[[1, 3]].sum(0), torch.zeros(2), rows_RD[[1, 3, 3, 1]].sum(0)])
        torch.testing.assert_close(pooled_BD, expected_BD)
