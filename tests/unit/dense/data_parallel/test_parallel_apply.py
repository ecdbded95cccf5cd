"""Modules called at the same time, in threads that see the caller's settings."""

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from support.replicas import CPUS, DEVICES, FAILING, NEEDS_CUDA, Calls
from support.seeded import random, seeded
from torch import nn

from hybrid.dense.data_parallel.replicas import parallel_apply


def linears(devices: list[str]) -> tuple[list[nn.Module], list[torch.Tensor]]:
    """A module for each device, each with other weights, and its input."""
    modules = [seeded(lambda: nn.Linear(10, 5), seed).to(d) for seed, d in enumerate(devices)]
    return [*modules], [random(2, 10, seed=seed).to(device) for seed, device in enumerate(devices)]


def check(modules: list[nn.Module], inputs: list[torch.Tensor], devices: list[str] | None) -> None:
    expected = [module(x) for module, x in zip(modules, inputs, strict=True)]
    for form in (inputs, tuple(inputs), [(x,) for x in inputs], tuple([x] for x in inputs)):
        outputs = parallel_apply(modules, form, devices=devices)
        assert [output.dtype for output in outputs] == [output.dtype for output in expected]
        assert all(map(torch.equal, outputs, expected))


@pytest.mark.parametrize("devices", DEVICES)
def test_each_module_gets_its_own_input(devices: list[str]) -> None:
    check(*linears(devices), devices)
    check(*linears(devices), None)


@pytest.mark.parametrize(
    ("devices", "cpu_dtype"),
    [
        (CPUS, torch.bfloat16),
        (CPUS, torch.half),
        pytest.param(["cuda:0", "cpu"], torch.bfloat16, marks=[pytest.mark.gpu, NEEDS_CUDA]),
    ],
)
def test_threads_inherit_autocast(devices: list[str], cpu_dtype: torch.dtype) -> None:
    on_gpu = torch.autocast("cuda", torch.half, enabled="cuda:0" in devices)
    with on_gpu, torch.autocast("cpu", cpu_dtype):
        check(*linears(devices), devices)


def test_keyword_arguments_go_to_their_module() -> None:
    echo = Calls(lambda *args, **kwargs: (args, kwargs))
    assert parallel_apply([echo, echo], [1, [2, 3]], [{"a": 4}, {}], CPUS) == [((1,), {"a": 4}), ((2, 3), {})]


def settings() -> list[Any]:
    return [
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
    ]


@pytest.mark.parametrize(
    "setting",
    [
        nullcontext(),
        torch.no_grad(),
        torch.inference_mode(),
        torch.autocast("cpu", torch.half),
        torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
    ],
)
@pytest.mark.parametrize("num_modules", [1, 2])
def test_threads_inherit_settings(setting: AbstractContextManager[None], num_modules: int) -> None:
    modules = [Calls(settings)] * num_modules
    with setting:
        assert parallel_apply(modules, [()] * num_modules) == [settings()] * num_modules
    assert parallel_apply(modules, [()] * num_modules) == [settings()] * num_modules


@pytest.mark.gpu
@NEEDS_CUDA
def test_threads_inherit_device_and_stream() -> None:
    stream = torch.cuda.Stream("cuda:0")
    modules = [Calls(lambda: (torch.cuda.current_device(), torch.cuda.current_stream()))] * 2
    with torch.cuda.stream(stream):
        assert parallel_apply(modules, [(), ()], devices=["cuda:0", 0]) == [(0, stream)] * 2


def test_modules_run_concurrently() -> None:
    both = threading.Barrier(2, timeout=10.0)
    parallel_apply([Calls(both.wait)] * 2, [(), ()])


def test_single_module_runs_in_the_thread_of_the_caller() -> None:
    assert parallel_apply([Calls(threading.current_thread)], [()]) == [threading.current_thread()]


class TestFailures:
    @pytest.mark.parametrize("devices", DEVICES)
    def test_exception_names_the_replica_and_its_device(self, devices: list[str]) -> None:
        *others, device = devices
        where = rf"replica {len(others)} on device {'cpu' if device == 'cpu' else '0'}"
        modules = [*[Calls(lambda _: None)] * len(others), FAILING]
        with pytest.raises(KeyError) as raised:
            parallel_apply(modules, [None] * len(devices), devices=devices)
        assert raised.match(rf"^Caught KeyError in {where}\.\nOriginal Traceback[\s\S]+wonderful")

    @pytest.mark.parametrize(
        ("inputs", "name"),
        [
            ([("text", {"x": [torch.ones(1, device="meta"), torch.ones(1)]})], "meta"),
            ([None, None], "0" if torch.cuda.is_available() else "cpu"),
        ],
    )
    def test_default_device_is_that_of_the_first_tensor(self, inputs: list[Any], name: str) -> None:
        with pytest.raises(KeyError) as raised:
            parallel_apply([FAILING] * len(inputs), inputs)
        assert raised.match(rf"^Caught KeyError in replica 0 on device {name}\.")

    def test_exception_is_raised_after_all_modules_end(self) -> None:
        failed, returned = threading.Event(), threading.Event()
        returned_first: list[bool] = []

        def fail() -> None:
            failed.set()
            raise OSError("the disk is full")

        def outlast() -> None:
            assert failed.wait(10.0)
            returned_first.append(returned.wait(0.05))

        with pytest.raises(OSError, match="the disk is full"):
            parallel_apply([Calls(fail), Calls(outlast)], [(), ()])
        returned.set()
        assert returned_first == [False]

    @pytest.mark.parametrize("name", ["inputs", "kwargs_tup", "devices"])
    def test_sequences_of_different_length_raise_an_error(self, name: str) -> None:
        arguments: dict[str, Any] = {"inputs": [1], "kwargs_tup": [{}], "devices": ["cpu"]} | {name: []}
        with pytest.raises(
            ValueError, match=f"The number of modules 1 is not equal to the number of {name} 0"
        ):
            parallel_apply([FAILING], **arguments)
