"""torch's own RPC beside the signed one, for tests that compare with what torch does by itself."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.distributed.nn.api import remote_module
from torch.distributed.rpc import internal

from hybrid import transport
from hybrid.errors import ClusterError
from hybrid.security import signed_pickler
from hybrid.topology import Topology

_MARK = b"unsigned: "
_SECONDS = 10.0


class _Both(internal._InternalRPCPickler):
    """Signs what the project sends, and lets pass what it does not."""

    def __init__(self, signed: signed_pickler.SignedPickler) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._signed = signed
        self._stock = remote_module._internal_rpc_pickler

    def serialize(self, obj: Any) -> tuple[bytes, list[Tensor]]:
        try:
            return self._signed.serialize(obj)
        except ClusterError:
            pickled, tensors = self._stock.serialize(obj)
            return _MARK + pickled, tensors

    def deserialize(self, binary_data: bytes, tensor_table: Sequence[Tensor]) -> Any:
        if binary_data.startswith(_MARK):
            return self._stock.deserialize(binary_data[len(_MARK) :], tensor_table)
        return self._signed.deserialize(binary_data, tensor_table)


class StockRpc:
    """Lets this process take part in both, until it is closed."""

    def __init__(self) -> None:
        before = internal._internal_rpc_pickler
        assert isinstance(before, signed_pickler.SignedPickler)
        self._signed = before
        signed_pickler.install(_Both(self._signed))

    def close(self) -> None:
        signed_pickler.install(self._signed)


@contextmanager
def stock_rpc(topology: Topology) -> Iterator[None]:
    """While it is entered, every role of a cluster takes part in torch's own RPC, too."""
    made = transport.gather(
        [transport.create(role, StockRpc, timeout_seconds=_SECONDS) for role in topology.roles]
    )
    try:
        yield
    finally:
        transport.gather([each.call(StockRpc.close) for each in made])
