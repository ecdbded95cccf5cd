"""Inputs scattered over devices, modules called concurrently, outputs gathered."""

import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from support.seeded import random, seeded
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from unit.dense.replicas import CPUS, DEVICES, FAILING, PAIRS, Calls

from hybrid.dense.data_parallel import Device, gather, parallel_apply, scatter

TARGETS = [
    "cpu",
    -1,
    torch.device("cpu"),
    pytest.param(0, marks=pytest.mark.gpu),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
SOURCES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]


class Sample(NamedTuple):
    features: Tensor
    label: Any


class Named(OrderedDict[str, Any]):
    """A dict of another type."""


def leaf(*shape: int, seed: int = 0, device: str = "cpu") -> Tensor:
    return random(*shape, seed=seed, dtype=torch.float64).to(device).requires_grad_()


class TestScatter:
    @pytest.mark.parametrize("devices", PAIRS)
    @pytest.mark.parametrize("source", SOURCES)
    def test_scatter_and_its_gradients(self, source: str, devices: list[str]) -> None:
        x = leaf(4, 4, device=source)
        pieces = scatter(x, devices)
        assert [piece.device for piece in pieces] == [torch.device(device) for device in devices]
        assert torch.equal(pieces[0].to(source), x[:2])
        assert torch.equal(pieces[1].to(source), x[2:])
        pieces[0].backward(torch.full_like(pieces[0], 2))
        assert x.grad is not None
        assert x.grad.tolist() == [[2.0] * 4] * 2 + [[0.0] * 4] * 2
        assert gradcheck(lambda x: tuple(scatter(x, devices)), (x,))
        assert gradgradcheck(lambda x: tuple(scatter(x, devices)), (x,))

    @pytest.mark.parametrize(
        ("size", "num_devices", "sizes"),
        [(5, 2, [3, 2]), (10, 3, [4, 4, 2]), (9, 4, [3, 3, 3]), (2, 3, [1, 1]), (1, 2, [1]), (0, 2, [0])],
    )
    def test_chunk_sizes(self, size: int, num_devices: int, sizes: list[int]) -> None:
        pieces = scatter(random(size, 3), ["cpu"] * num_devices)
        assert [len(piece) for piece in pieces] == sizes

    def test_nested_containers_keep_their_types(self) -> None:
        x: Any = torch.arange(4)
        inputs = [Sample(x, (x, "a")), Named(b={"c": x}, d=[x]), defaultdict(list, {"e": x})]
        first, second = scatter(inputs, CPUS)
        half = x[:2]
        expected = [Sample(half, (half, "a")), Named(b={"c": half}, d=[half]), defaultdict(list, {"e": half})]
        assert str(first) == str(expected)
        assert [type(part) for part in second] == [Sample, Named, defaultdict]
        assert second[0].features.tolist() == second[1]["b"]["c"].tolist() == [2, 3]

    def test_other_values_are_sent_to_every_device_with_samples(self) -> None:
        inputs: tuple[Any, ...] = ((), [], {}, torch.arange(2))
        assert scatter(("text", 3), CPUS) == [("text", 3), ("text", 3)]
        assert [piece[:3] for piece in scatter(inputs, CPUS)] == [((), [], {})] * 2
        assert scatter((torch.ones(1), "text"), CPUS) == [(torch.ones(1), "text")]

    def test_tensors_of_different_sizes_raise_an_error(self) -> None:
        with pytest.raises(ValueError, match=r"\[1, 4\] samples"):
            scatter((torch.ones(1), torch.ones(4)), CPUS)


class TestGather:
    @pytest.mark.parametrize("device", TARGETS)
    @pytest.mark.parametrize("devices", PAIRS)
    @pytest.mark.parametrize(("shape", "joined"), [((2, 4), torch.cat), ((), torch.stack)])
    def test_gather_and_its_gradients(
        self, shape: tuple[int, ...], joined: Callable[..., Tensor], devices: list[str], device: Device
    ) -> None:
        parts = tuple(leaf(*shape, seed=seed, device=device) for seed, device in enumerate(devices))
        gathered = gather(parts, device)
        assert gathered.device.type == ("cuda" if device in (0, "cuda") else "cpu")
        assert torch.equal(gathered.cpu(), joined([part.cpu() for part in parts]))
        grad = random(*gathered.shape, seed=2, dtype=torch.float64).to(gathered.device)
        grads = torch.autograd.grad(gathered, parts, grad)
        assert torch.equal(joined([each.cpu() for each in grads]), grad.cpu())
        assert gradcheck(lambda *outputs: gather(outputs, device), parts)
        assert gradgradcheck(lambda *outputs: gather(outputs, device), parts)

    def test_nested_containers_keep_their_types(self) -> None:
        outputs = [Named(a=[Sample(torch.full((1,), place), None)]) for place in range(2)]
        gathered = gather(outputs, "cpu")
        assert type(gathered) is Named
        (sample,) = gathered["a"]
        assert type(sample) is Sample
        assert (sample.features.tolist(), sample.label) == ([0, 1], None)

    def test_none_and_empty_containers(self) -> None:
        assert gather([None, None], "cpu") is None
        assert gather([[], []], "cpu") == []

    def test_dicts_of_different_length_raise_an_error(self) -> None:
        one = torch.ones(1, 2)
        with pytest.raises(ValueError, match="dicts"):
            gather([{"a": one}, {"a": one, "b": one}], "cpu")

    def test_gather_of_another_type_raises_an_error(self) -> None:
        with pytest.raises(TypeError, match="str"):
            gather(["text", "text"], "cpu")


def linears(devices: list[str]) -> tuple[list[nn.Module], list[Tensor]]:
    """Return a module with its own weights for each device, and its input."""
    modules = [seeded(lambda: nn.Linear(10, 5), seed).to(d) for seed, d in enumerate(devices)]
    return [*modules], [random(2, 10, seed=seed).to(device) for seed, device in enumerate(devices)]


def check(modules: list[nn.Module], inputs: list[Tensor], devices: list[str] | None) -> None:
    expected = [module(x) for module, x in zip(modules, inputs, strict=True)]
    for form in (inputs, tuple(inputs), [(x,) for x in inputs], tuple([x] for x in inputs)):
        outputs = parallel_apply(modules, form, devices=devices)
        assert [output.dtype for output in outputs] == [output.dtype for output in expected]
        assert all(map(torch.equal, outputs, expected))


def settings() -> list[Any]:
    return [
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        *((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")),
        torch.is_autocast_cache_enabled(),
    ]


class TestParallelApply:
    @pytest.mark.parametrize("devices", DEVICES)
    def test_each_module_gets_its_own_input(self, devices: list[str]) -> None:
        check(*linears(devices), devices)
        check(*linears(devices), None)

    @pytest.mark.parametrize(
        "setting",
        [
            nullcontext(),
            torch.no_grad(),
            torch.inference_mode(),
            torch.autocast("cpu", torch.half),
            torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
            pytest.param(
                torch.autocast("cuda", torch.bfloat16, enabled=torch.cuda.is_available()),
                marks=pytest.mark.gpu,
            ),
        ],
    )
    def test_threads_inherit_settings(self, setting: AbstractContextManager[None]) -> None:
        with setting:
            assert parallel_apply([Calls(settings)] * 2, [(), ()]) == [settings()] * 2

    @pytest.mark.gpu
    def test_threads_inherit_device_and_stream(self) -> None:
        stream = torch.cuda.Stream("cuda:0")
        modules = [Calls(lambda: (torch.cuda.current_device(), torch.cuda.current_stream()))] * 2
        with torch.cuda.stream(stream):
            assert parallel_apply(modules, [(), ()], devices=["cuda:0", 0]) == [(0, stream)] * 2

    def test_several_modules_run_concurrently_and_one_in_the_thread_of_the_caller(self) -> None:
        parallel_apply([Calls(threading.Barrier(2, timeout=10.0).wait)] * 2, [(), ()])
        assert parallel_apply([Calls(threading.current_thread)], [()]) == [threading.current_thread()]

    @pytest.mark.parametrize("devices", DEVICES)
    def test_exception_names_the_replica_and_its_device(self, devices: list[str]) -> None:
        *others, device = devices
        where = rf"replica {len(others)} on device {'cpu' if device == 'cpu' else '0'}"
        modules = [*[Calls(lambda _: None)] * len(others), FAILING]
        with pytest.raises(KeyError) as raised:
            parallel_apply(modules, [None] * len(devices), devices=devices)
        assert raised.match(rf"^Caught KeyError in {where}\.\nOriginal Traceback[\s\S]+wonderful")

    def test_default_device_is_that_of_the_first_tensor(self) -> None:
        inputs = ("text", {"x": [torch.ones(1, device="meta"), torch.ones(1)]})
        with pytest.raises(KeyError, match=r"replica 0 .* meta\."):
            parallel_apply([FAILING], [inputs])

    def test_exception_is_raised_after_all_modules_end(self) -> None:
        failed, ended = threading.Event(), threading.Event()

        def fail() -> None:
            failed.set()
            raise OSError("the disk is full")

        def outlast() -> None:
            assert failed.wait(10.0)
            time.sleep(0.05)
            ended.set()

        with pytest.raises(OSError, match="disk"):
            parallel_apply([Calls(fail), Calls(outlast)], [(), ()])
        assert ended.is_set()

    @pytest.mark.parametrize("name", ["inputs", "kwargs_tup", "devices"])
    def test_sequences_of_different_length_raise_an_error(self, name: str) -> None:
        arguments: dict[str, Any] = {"inputs": [1], "kwargs_tup": [{}], "devices": ["cpu"]} | {name: []}
        with pytest.raises(ValueError, match=r"zip\(\) argument"):
            parallel_apply([FAILING], **arguments)
