"""Inputs split over devices, outputs put together, in any nesting of containers."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from support.replicas import CPUS, NEEDS_CUDA, PAIRS, count_cycles
from support.seeded import random
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from hybrid.dense.data_parallel.replicas import gather, scatter, scatter_kwargs
from hybrid.dense.data_parallel.scatter_gather import Device

TARGETS = [
    "cpu",
    -1,
    torch.device("cpu"),
    pytest.param(0, marks=[pytest.mark.gpu, NEEDS_CUDA]),
    pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_CUDA]),
]
SOURCES = ["cpu", pytest.param("cuda:0", marks=[pytest.mark.gpu, NEEDS_CUDA])]


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
        assert isinstance(pieces, tuple)
        assert [piece.device for piece in pieces] == [torch.device(device) for device in devices]
        assert torch.equal(pieces[0].to(source), x[:2])
        assert torch.equal(pieces[1].to(source), x[2:])
        pieces[0].backward(torch.full_like(pieces[0], 2))
        assert x.grad is not None
        assert x.grad.tolist() == [[2.0] * 4] * 2 + [[0.0] * 4] * 2
        assert gradcheck(lambda x: scatter(x, devices), (x,))
        assert gradgradcheck(lambda x: scatter(x, devices), (x,))

    def test_chunk_on_the_same_device_is_a_view(self) -> None:
        x = random(5, 2)
        first, second = scatter(x, CPUS)
        assert (first.data_ptr(), second.data_ptr()) == (x.data_ptr(), x[3:].data_ptr())

    @pytest.mark.parametrize(
        ("size", "num_devices", "sizes"),
        [(5, 2, [3, 2]), (10, 3, [4, 4, 2]), (9, 4, [3, 3, 3]), (2, 3, [1, 1]), (1, 2, [1]), (0, 2, [0])],
    )
    def test_chunk_sizes(self, size: int, num_devices: int, sizes: list[int]) -> None:
        pieces = scatter(random(size, 3), ["cpu"] * num_devices)
        assert [len(piece) for piece in pieces] == sizes

    def test_along_another_dimension(self) -> None:
        x = random(2, 3)
        assert [piece.tolist() for piece in scatter(x, CPUS, dim=1)] == [x[:, :2].tolist(), x[:, 2:].tolist()]

    def test_complex_stays_complex(self) -> None:
        x = torch.complex(random(4), random(4, seed=1))
        assert torch.equal(torch.cat(list(scatter(x, CPUS))), x)

    def test_nested_containers_keep_their_types(self) -> None:
        x: Any = torch.arange(4)
        inputs = [Sample(x, (x, "a")), Named(b={"c": x}, d=[x]), defaultdict(list, {"e": x})]
        first, second = scatter(inputs, CPUS)
        half = x[:2]
        expected = [Sample(half, (half, "a")), Named(b={"c": half}, d=[half]), defaultdict(list, {"e": half})]
        assert str(first) == str(expected)
        assert [type(part) for part in second] == [Sample, Named, defaultdict]
        assert second[0].features.tolist() == second[1]["b"]["c"].tolist() == [2, 3]

    def test_other_values_are_sent_to_every_device(self) -> None:
        marker = object()
        inputs: tuple[Any, ...] = ((), [], {}, torch.arange(2))
        assert scatter((marker, 3), CPUS) == [(marker, 3), (marker, 3)]
        assert scatter("text", CPUS) == ["text", "text"]
        assert [piece[:3] for piece in scatter(inputs, CPUS)] == [((), [], {})] * 2

    def test_other_values_are_sent_only_to_devices_with_samples(self) -> None:
        assert scatter((torch.ones(1), "text"), CPUS) == [(torch.ones(1), "text")]

    def test_tensors_of_different_sizes_raise_an_error(self) -> None:
        with pytest.raises(ValueError, match=r"tensors of \[1, 4\] samples have different numbers of chunks"):
            scatter((torch.ones(1), torch.ones(4)), CPUS)

    def test_missing_device_is_named_by_scatter(self) -> None:
        with pytest.raises(ValueError, match=r"^there is no device cuda:64: this machine has \d+ CUDA"):
            scatter(torch.ones(2), ["cpu", 64])


class TestScatterKwargs:
    def test_positional_and_keyword_arguments(self) -> None:
        args, kwargs = scatter_kwargs((torch.arange(4), 1), {"y": torch.arange(4, 8)}, CPUS)
        assert [(x.tolist(), one) for x, one in args] == [([0, 1], 1), ([2, 3], 1)]
        assert [each["y"].tolist() for each in kwargs] == [[4, 5], [6, 7]]

    @pytest.mark.parametrize("kwargs", [None, {}])
    def test_no_arguments_give_no_chunks(self, kwargs: dict[str, Any] | None) -> None:
        assert scatter_kwargs((), kwargs, CPUS) == ((), ())

    def test_missing_arguments_are_empty(self) -> None:
        args, kwargs = scatter_kwargs((torch.arange(2),), None, CPUS)
        assert (len(args), kwargs) == (2, ({}, {}))
        args, kwargs = scatter_kwargs((), {"x": torch.arange(2)}, CPUS)
        assert (args, len(kwargs)) == (((), ()), 2)

    def test_shorter_arguments_are_padded(self) -> None:
        # torch compares with the number of arguments, and would leave one piece of kwargs for two of args.
        args, kwargs = scatter_kwargs((torch.arange(2),), {"x": torch.ones(1)}, CPUS)
        assert (len(args), kwargs) == (2, ({"x": torch.ones(1)}, {}))
        args, kwargs = scatter_kwargs((torch.ones(1),), {"x": torch.arange(2)}, CPUS)
        assert (args, len(kwargs)) == (((torch.ones(1),), ()), 2)

    def test_arguments_without_tensors_are_repeated(self) -> None:
        assert scatter_kwargs(("text",), {"x": torch.ones(1)}, CPUS)[0] == (("text",),)
        assert scatter_kwargs((torch.ones(1),), {"x": "text"}, CPUS)[1] == ({"x": "text"},)


class TestGather:
    @pytest.mark.filterwarnings("ignore:Was asked to gather along dimension 0:UserWarning")
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

    def test_scalars_become_a_vector_with_a_warning(self) -> None:
        reason = (
            "^Was asked to gather along dimension 0, but all input tensors were scalars; "
            r"will instead unsqueeze and return a vector\.$"
        )
        with pytest.warns(UserWarning, match=reason):
            gather([torch.tensor(1.0)], "cpu")

    def test_scalars_have_no_other_dimension(self) -> None:
        with pytest.raises(RuntimeError, match="zero-dimensional"):
            gather([torch.tensor(1.0)], "cpu", dim=1)

    def test_along_another_dimension(self) -> None:
        assert gather([torch.ones(2, 1), torch.ones(2, 2)], "cpu", dim=1).shape == (2, 3)

    def test_complex_stays_complex(self) -> None:
        x = torch.complex(random(4), random(4, seed=1))
        assert torch.equal(gather([x[:1], x[1:]], "cpu"), x)

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
        with pytest.raises(ValueError, match=r"^All dicts must have the same number of keys$"):
            gather([{"a": one}, {"a": one, "b": one}], "cpu")

    def test_lists_of_different_length_raise_an_error(self) -> None:
        with pytest.raises(ValueError, match="shorter"):
            gather([[torch.ones(1)] * 2, [torch.ones(1)]], "cpu")

    def test_gather_of_another_type_raises_an_error(self) -> None:
        with pytest.raises(TypeError, match=r"^cannot gather a str; replicas must return tensors$"):
            gather(["text", "text"], "cpu")


def test_scatter_and_gather_leave_no_reference_cycles() -> None:
    inputs = [{"a": torch.ones(2)}, (torch.ones(2, requires_grad=True),)]
    assert count_cycles(lambda: gather(scatter(inputs, CPUS), "cpu")) == 0
