from typing import Any

import torch
from torch import Tensor, nn

import hybrid


class Net(nn.Module):
    """Tables in a list, one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([hybrid.Embedding(70_000, 2), hybrid.Embedding(9, 2, padding_idx=3)])
        self.again = self.tables[1]
        self.bag = hybrid.EmbeddingBag(5, 2, mode="sum", padding_idx=0)
        self.linear = nn.Linear(2, 1)

    def forward(self, ids_N2: Tensor, bags: Tensor) -> Tensor:
        out: Tensor = self.linear(self.tables[0](ids_N2[:, 0]) + self.again(ids_N2[:, 1]) * self.bag(bags))
        return out.squeeze(1)


def test_the_copy_is_plain_and_gives_what_the_module_gives() -> None:
    cluster = hybrid.connect()
    model = cluster.distribute(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids, bags = (
        torch.tensor([[0, 3], [3, 2], [69_999, 8], [12, 3]]),
        torch.tensor([[1, 0], [4, 4], [0, 0], [2, 3]]),
    )
    for batch in cluster.batches({"ids": ids, "bags": bags}):
        cluster.backward(model(batch["ids"], batch["bags"]).square())
        optimizer.step()
    plain: Any = cluster.plain_module()
    assert not any(type(module).__module__.startswith("hybrid") for module in list(plain.modules())[1:])
    assert plain.tables[1] is plain.again
    assert torch.equal(plain.tables[1].weight[3], torch.zeros(2))
    with torch.no_grad():
        assert torch.allclose(plain(ids, bags), model(ids, bags), atol=1e-7)
    exported = torch.export.export(
        plain.eval(), (ids, bags), dynamic_shapes=({0: torch.export.Dim("n")},) * 2
    )
    assert torch.allclose(exported.module()(ids[:3], bags[:3]), plain(ids[:3], bags[:3]))
    # The module itself goes on as it was.
    assert isinstance(model.bag, hybrid.EmbeddingBag)
