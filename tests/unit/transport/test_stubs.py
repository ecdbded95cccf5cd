from typing import Any

import pytest
import torch
from torch.distributed import rpc

from hybrid.topology import Role, RoleKind
from hybrid.transport import ModuleRef, RemoteTables


def test_what_rpc_sends_some_time_later_may_be_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(rpc, "rpc_async", lambda *_, args, **__: sent.extend(args))
    tables = RemoteTables(Role(RoleKind.WORKER, 0), ModuleRef(None, 0))  # type: ignore[arg-type]
    tables.carry_parts([], [lent := torch.ones(3)])
    lent.zero_()
    assert sent[1][0].tolist() == [1.0] * 3
