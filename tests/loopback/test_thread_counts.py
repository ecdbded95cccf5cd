"""Threads of RPC compute with the number of cores that the process has set."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.futures import Future

from hybrid import transport
from hybrid.topology import MASTER
from hybrid.updates.ticket import Ticket


class Product:
    """A product whose last bits depend on the number of cores that compute it."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(1)
        self.factors = [torch.randn(n, 64, dtype=torch.float64, generator=draw) for n in (33, 32)]

    def compute(self) -> Tensor:
        return nn.functional.linear(*self.factors)

    def lookup(self, *_: object) -> Future[list[Tensor]]:
        """Return the product as the vectors of a lookup."""
        product = Future[list[Tensor]]()
        product.set_result([self.compute()])
        return product


@pytest.fixture(scope="module")
def two_threads() -> Iterator[None]:
    """Two threads, in a process whose other threads begin with one (OMP_NUM_THREADS)."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.mark.usefixtures("two_threads", "loopback")
def test_calls_have_the_bits_of_the_main_thread() -> None:
    product = transport.create(MASTER, Product, timeout_seconds=5.0).wait()
    tables = transport.RemoteTables(MASTER, product.number)
    for _ in range(16):  # in several threads, which keep the number of their first call
        assert torch.equal(product.call(Product.compute).wait(), Product().compute())
        assert torch.equal(tables.lookup(Ticket(0, 0, 0), []).wait()[0], Product().compute())
