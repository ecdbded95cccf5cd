"""Modules called at the same time, in threads that see the caller's settings."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from support.replicas import DEVICES, NEEDS_CUDA, PAIRS, Calls, Failing, NotRecorded, random, seeded
from torch import nn

from hybrid.dense.replicas.replica import parallel_apply

CPUS = ["cpu", "cpu"]


def linears(devices: list[str]) -> tuple[list[nn.Module], list[torch.Tensor]]:
    """A module for each device, each with other weights, and its input."""
    modules = [seeded(lambda: nn.Linear(10, 5), seed).to(d) for seed, d in enumerate(devices)]
    return modules, [random(2, 10, seed=seed).to(device) for seed, device in enumerate(devices)]


def check(modules: list[nn.Module], inputs: list[torch.Tensor], devices: list[str] | None) -> None:
    expected = [module(x) for module, x in zip(modules, inputs, strict=True)]
    for form in (inputs, tuple(inputs), [(x,) for x in inputs], tuple([x] for x in inputs)):
        outputs = parallel_apply(modules, form, devices=devices)
        assert [output.dtype for output in outputs] == [output.dtype for output in expected]
        assert all(map(torch.equal, outputs, expected))


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.upstream("data_parallel/test_parallel_apply")
def test_each_module_gets_its_own_input(devices: list[str]) -> None:
    check(*linears(devices), devices)
    check(*linears(devices), None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.half])
@pytest.mark.upstream("data_parallel/test_parallel_apply_autocast")
def test_autocast_of_the_caller_holds_in_the_threads(dtype: torch.dtype) -> None:
    with torch.autocast("cpu", dtype):
        check(*linears(CPUS), CPUS)


@pytest.mark.gpu
@NEEDS_CUDA
@pytest.mark.upstream("data_parallel/test_parallel_apply_autocast")
def test_autocast_of_each_device_type_holds_in_the_threads() -> None:
    with torch.autocast("cuda", torch.half), torch.autocast("cpu", torch.bfloat16):
        check(*linears(["cuda:0", "cpu"]), ["cuda:0", "cpu"])


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
def test_the_threads_take_over_what_torch_keeps_for_each_thread(
    setting: AbstractContextManager[None], num_modules: int
) -> None:
    modules = [Calls(settings)] * num_modules
    with setting:
        assert parallel_apply(modules, [()] * num_modules) == [settings()] * num_modules
    assert parallel_apply(modules, [()] * num_modules) == [settings()] * num_modules


@pytest.mark.upstream("data_parallel/Layer")
def test_recording_is_off_in_the_threads_only_if_it_is_off_in_the_caller() -> None:
    inputs = [torch.ones(1), torch.ones(1)]
    with torch.no_grad():
        parallel_apply([NotRecorded()] * 2, inputs)
    with pytest.raises(AssertionError, match="autograd records here"):
        parallel_apply([NotRecorded()] * 2, inputs)


@pytest.mark.gpu
@NEEDS_CUDA
def test_each_thread_is_on_its_device_and_on_the_stream_of_the_caller() -> None:
    stream = torch.cuda.Stream("cuda:0")
    modules = [Calls(lambda: (torch.cuda.current_device(), torch.cuda.current_stream()))] * 2
    with torch.cuda.stream(stream):
        assert parallel_apply(modules, [(), ()], devices=["cuda:0", 0]) == [(0, stream)] * 2


def test_modules_run_at_the_same_time() -> None:
    both = threading.Barrier(2, timeout=10.0)
    parallel_apply([Calls(both.wait)] * 2, [(), ()])


def test_a_single_module_runs_in_the_callers_thread() -> None:
    assert parallel_apply([Calls(threading.current_thread)], [()]) == [threading.current_thread()]


class TestFailures:
    @pytest.mark.parametrize(
        ("device", "name"), [("cpu", "cpu"), pytest.param("cuda:0", "0", marks=[pytest.mark.gpu, NEEDS_CUDA])]
    )
    @pytest.mark.parametrize("num_modules", [1, 2])
    @pytest.mark.upstream("data_parallel/test_parallel_apply_passes_exception", "data_parallel/TestModule")
    def test_an_exception_is_raised_in_the_caller_and_says_where_it_comes_from(
        self, device: str, name: str, num_modules: int
    ) -> None:
        where = rf"^Caught KeyError in replica 0 on device {name}.\nOriginal Traceback[\s\S]+wonderful"
        with pytest.raises(KeyError) as raised:
            parallel_apply([Failing()] * num_modules, [None] * num_modules, devices=[device] * num_modules)
        assert raised.match(where)

    @pytest.mark.parametrize("devices", PAIRS)
    def test_the_failing_replica_is_named(self, devices: list[str]) -> None:
        names = {"cpu": "cpu", "cuda:0": "0"}
        with pytest.raises(KeyError) as raised:
            parallel_apply([Calls(lambda _: None), Failing()], [None, None], devices=devices)
        assert raised.match(rf"^Caught KeyError in replica 1 on device {names[devices[1]]}\.")

    def test_without_devices_that_of_the_first_tensor_is_taken(self) -> None:
        inputs = [("text", {"x": [torch.ones(1, device="meta"), torch.ones(1)]})]
        with pytest.raises(KeyError) as raised:
            parallel_apply([Failing()], inputs)
        assert raised.match(r"^Caught KeyError in replica 0 on device meta\.")

    def test_without_devices_and_tensors_the_current_device_is_taken(self) -> None:
        name = "0" if torch.cuda.is_available() else "cpu"
        with pytest.raises(KeyError) as raised:
            parallel_apply([Failing(), Failing()], [None, None])
        assert raised.match(rf"^Caught KeyError in replica \d on device {name}\.")

    def test_all_modules_have_ended_before_an_exception_is_raised(self) -> None:
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
    def test_there_must_be_as_many_of_everything(self, name: str) -> None:
        arguments: dict[str, Any] = {"inputs": [1], "kwargs_tup": [{}], "devices": ["cpu"]} | {name: []}
        with pytest.raises(
            ValueError, match=f"The number of modules 1 is not equal to the number of {name} 0"
        ):
            parallel_apply([Failing()], **arguments)
