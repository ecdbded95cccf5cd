"""On which devices a data-parallel module computes, and which lists of them are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.replicas import CALLS, NEEDS_CUDA, PAIRS, linear, random
from torch import nn
from torch.testing import assert_close

from hybrid.dense.replica import DataParallel, data_parallel

CPUS = ["cpu", "cpu"]


@pytest.mark.parametrize("devices", [*PAIRS, [torch.device("cpu"), -1]])
@pytest.mark.upstream("data_parallel/test_data_parallel_device_args")
def test_may_be_strings_or_devices(devices: list[Any]) -> None:
    module, x = linear(devices[0]), random(20, 10).to(devices[0]).requires_grad_()
    forms = [devices, tuple(devices), [torch.device(d) if isinstance(d, str) else d for d in devices]]
    for form in forms:
        for output_device in (None, *form):
            output = data_parallel(module, x, form, output_device)
            wanted = torch.device("cpu" if output_device == -1 else output_device or devices[0])
            assert output.device == wanted
            assert_close(output, module(x), check_device=False)


@pytest.mark.gpu
@NEEDS_CUDA
@pytest.mark.upstream("data_parallel/test_data_parallel_device_args")
def test_may_be_the_index_of_a_gpu() -> None:
    module, x = linear("cuda:0"), random(20, 10)
    for output_device, wanted in ((None, "cuda:0"), (0, "cuda:0"), (-1, "cpu"), ("cuda", "cuda:0")):
        output = data_parallel(module, x, [0, 0], output_device)
        assert output.device == torch.device(wanted)
        assert_close(output, module(x.cuda()), check_device=False)


@pytest.mark.parametrize("devices", [["cpu"], CPUS])
@pytest.mark.upstream("data_parallel/test_data_parallel_device_args")
def test_the_output_may_be_elsewhere(devices: list[str]) -> None:
    assert DataParallel(linear(), devices, "meta")(random(2, 10)).device.type == "meta"
    assert data_parallel(linear(), random(2, 10), devices, "meta").device.type == "meta"


@pytest.mark.parametrize("device", ["cuda:64", 64])
def test_one_that_is_not_there_is_named(device: str | int) -> None:
    reason = rf"^there is no device cuda:64: this machine has {torch.cuda.device_count()} CUDA device\(s\)$"
    with pytest.raises(ValueError, match=reason):
        DataParallel(linear(), ["cpu", device])
    with pytest.raises(ValueError, match=reason):
        DataParallel(linear(), CPUS, output_device=device)


def test_there_must_be_one() -> None:
    with pytest.raises(ValueError, match="there must be a device"):
        DataParallel(linear(), [])


@pytest.mark.parametrize(
    ("placed", "devices", "is_refused"),
    [
        (("cpu", "cpu"), ["cpu"], False),
        (("cpu", "cpu"), ["cpu", "cpu"], False),
        (("meta", "meta"), ["meta", "meta"], False),
        (("meta", "meta"), ["cpu"], True),
        (("meta", "meta"), ["cpu", "meta"], True),
        (("cpu", "cpu"), ["meta", "cpu"], True),
        (("cpu", "meta"), ["cpu", "meta"], True),
        (("cpu", "meta"), ["meta", "cpu"], True),
        *(
            pytest.param(*case, marks=[pytest.mark.gpu, NEEDS_CUDA])
            for case in [
                (("cuda:0", "cuda:0"), ["cuda:0"], False),
                (("cuda:0", "cuda:0"), ["cuda:0", "cpu"], False),
                (("cpu", "cpu"), ["cpu", "cuda:0"], False),
                (("cpu", "cpu"), ["cuda:0"], True),
                (("cpu", "cpu"), ["cuda:0", "cpu"], True),
                (("cuda:0", "cuda:0"), ["cpu", "cuda:0"], True),
                (("cuda:0", "cpu"), ["cuda:0", "cpu"], True),
                (("cuda:0", "cpu"), ["cpu", "cuda:0"], True),
            ]
        ),
    ],
)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.upstream(
    "data_parallel/test_data_parallel_model_device",
    "data_parallel/test",
    "data_parallel/assert_correct",
    "data_parallel/dummy_ctx_manager",
)
def test_a_module_must_be_on_the_first_one(
    placed: tuple[str, str], devices: list[str], is_refused: bool, call: Callable[..., Any]
) -> None:
    module = nn.Sequential(nn.Linear(10, 5).to(placed[0]), nn.BatchNorm1d(5, affine=False).to(placed[1]))
    x = random(20, 10).to(devices[0])
    if not is_refused:
        assert call(module, (x,), devices).shape == (20, 5)
        return
    reason = (
        rf"^module must have its parameters and buffers on device {devices[0]} \(devices\[0\]\) but found"
    )
    with pytest.raises(RuntimeError, match=reason):
        call(module, (x,), devices)
