"""What DTensor has found out in a thread of torch's own is there when the thread comes back."""

import threading
from collections import Counter

import pytest
import torch
from torch import nn
from torch.distributed import autograd as dist_autograd
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._op_schema import OpSchema

from hybrid.dense.tensor_parallel.sharded_module import TensorParallel, trainer_mesh
from hybrid.dense.tensor_parallel.sharding_plan import automatic_plan

pytestmark = pytest.mark.usefixtures("loopback")

STEPS = 2 * torch.get_num_interop_threads() + 4


def test_each_thread_finds_out_once_how_an_operation_is_sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    found_out: Counter[tuple[int, str]] = Counter()
    propagator = DTensor._op_dispatcher.sharding_propagator
    find_out = propagator.propagate_op_sharding_non_cached

    def noted(schema: OpSchema) -> object:
        found_out[threading.get_ident(), repr(schema)] += 1
        return find_out(schema)

    monkeypatch.setattr(propagator, "propagate_op_sharding_non_cached", noted)
    # Of sizes that no other test has shown to any thread.
    net = nn.Sequential(nn.Linear(4, 61), nn.ReLU(), nn.Linear(61, 3))
    split = TensorParallel(net, trainer_mesh(1, "cpu")["tensor"], automatic_plan(net))
    for _ in range(STEPS):
        with dist_autograd.context() as context:
            dist_autograd.backward(context, [split(torch.ones(5, 4)).sum()])
    threads = {thread for thread, _ in found_out}
    assert threads > {threading.get_ident()}  # backward passes have threads of their own
    assert len(threads) - 1 < STEPS, "too few steps for so many threads"
    assert set(found_out.values()) == {1}
