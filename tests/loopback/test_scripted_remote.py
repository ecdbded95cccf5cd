"""TorchScript modules across RPC, in torch's own ways; ``test_remote_net.py`` has one that is hosted."""

# No postponed annotations here: TorchScript reads those of an interface, as types.

from typing import Any

import pytest
import torch
from support.seeded import random
from torch import Tensor, nn
from torch.distributed import autograd as dist_autograd, rpc
from torch.distributed.nn import RemoteModule
from torch.distributed.nn.api.remote_module import _RemoteModule

from hybrid.dense.compilation import compiled
from hybrid.topology import MASTER

pytestmark = pytest.mark.usefixtures("loopback", "unsigned")

WIDTH, STEPS = 3, 4
NAME = MASTER.rpc_name


def filled(net: nn.Module, seed: int) -> None:
    """With a generator of its own: a remote module may be in the making in another thread."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in net.parameters():
        nn.init.normal_(parameter, generator=generator)


def layers() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(WIDTH, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    filled(net, seed=4)
    return net


def scripted() -> nn.Module:
    """Made where it will live."""
    return compiled(layers(), "script", [rows(0)])


def rows(seed: int) -> Tensor:
    return random(5, WIDTH, seed=seed, dtype=torch.float64).requires_grad_()


@torch.jit.interface
class Layer:
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[empty-body]
        pass


class ScriptedLayers(nn.Module):
    """A class that a remote module may make a script of."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layers(x)
        return output


class Local(nn.Module):
    """A local layer after a remote one."""

    def __init__(self, remote: nn.Module) -> None:
        super().__init__()
        self.remote = remote
        self.last = nn.Linear(2, 1).double()
        filled(self.last, seed=5)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.remote(x))
        return output


def assert_gradients(output: Tensor, context: int, x: Tensor, plain: nn.Module) -> None:
    """The context holds the gradients of ``x`` and of all parameters, those of a plain net."""
    dist_autograd.backward(context, [output.square().sum()])
    found = dist_autograd.get_gradients(context)
    sources = [x.detach().requires_grad_(), *plain.parameters()]
    expected = plain(sources[0])
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-13)
    assert len(found) == len(sources)
    for source, wanted in zip(sources, torch.autograd.grad(expected.square().sum(), sources), strict=True):
        (ours,) = (tensor for tensor in found if torch.equal(tensor, source))
        torch.testing.assert_close(found[ours], wanted, rtol=1e-12, atol=1e-13)


def test_a_reference_to_a_script_made_at_the_worker_gives_its_exact_gradients() -> None:
    rref = rpc.remote(NAME, scripted)
    for step in range(STEPS):
        x = rows(step)
        with dist_autograd.context() as context:
            output = rref.rpc_sync().forward(x)
            assert_gradients(output, context, x, layers())


def owned_by(rref: rpc.RRef[nn.Module]) -> nn.Module:
    module: nn.Module = rref.local_value()
    return module


def test_a_script_can_be_fetched_from_the_worker() -> None:
    """As ``to_here`` does, which in a group of one takes a short cut."""
    rref = rpc.remote(NAME, scripted)
    fetched = rpc.rpc_sync(NAME, owned_by, args=(rref,))
    assert isinstance(fetched, torch.jit.ScriptModule)
    for copy, original in zip(fetched.parameters(), rref.local_value().parameters(), strict=True):
        assert torch.equal(copy, original)
        assert copy.data_ptr() != original.data_ptr()
    torch.testing.assert_close(fetched(rows(1)), layers()(rows(1)), rtol=1e-12, atol=1e-13)


@pytest.fixture
def remote_script() -> Any:
    """A remote module that TorchScript can call."""
    return _RemoteModule(f"{NAME}/cpu", ScriptedLayers, _module_interface_cls=Layer)


def test_a_remote_module_with_an_interface_is_a_script_and_gives_exact_gradients(remote_script: Any) -> None:
    assert remote_script.is_scriptable
    assert not RemoteModule(f"{NAME}/cpu", ScriptedLayers).is_scriptable
    held = remote_script.get_module_rref().local_value()
    assert isinstance(held, torch.ScriptObject)
    for step in range(STEPS):
        x = rows(step)
        with dist_autograd.context() as context:
            assert_gradients(remote_script(x), context, x, layers())


def test_a_scripted_model_calls_a_scripted_remote_module(remote_script: Any) -> None:
    model = torch.jit.script(Local(remote_script))
    plain = Local(layers())
    for step in range(STEPS):
        x = rows(step)
        with dist_autograd.context() as context:
            assert_gradients(model(x), context, x, plain)
