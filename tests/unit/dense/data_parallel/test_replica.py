"""A module called with a share of the batch on each of several devices gives what it gives by itself."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.replicas import (
    CALLS,
    CPUS,
    DEVICES,
    NEEDS_CUDA,
    PAIRS,
    Calls,
    count_cycles,
    gradients,
    linear,
)
from support.seeded import random, seeded
from torch import Tensor, nn
from torch.testing import assert_close

from hybrid.dense.data_parallel.replicas import DataParallel, data_parallel

# By type, how close sums in another order are.
TOLERANCES = {torch.float: 1e-5, torch.double: 1e-5, torch.half: 1e-2, torch.bfloat16: 1e-1}


class TestOutputsAndGradients:
    @pytest.mark.parametrize("devices", DEVICES)
    @pytest.mark.parametrize("call", CALLS)
    def test_are_those_of_the_module(self, devices: list[str], call: Callable[..., Any]) -> None:
        module, x = linear(devices[0]), random(20, 10).to(devices[-1])
        expected = module(x.to(devices[0]))
        expected.sum().backward()
        expected_grads = [grad.clone() for grad in gradients(module)]
        module.zero_grad()
        output = call(module, (x,), devices)
        assert output.device == torch.device(devices[0])
        output.sum().backward()
        assert_close(output, expected)
        assert_close(gradients(module), expected_grads)

    def test_without_devices_all_there_are_take_part(self) -> None:
        count = torch.cuda.device_count()
        devices = [torch.device("cuda", place) for place in range(count)] or [torch.device("cpu")]
        module, x = linear(devices[0]), random(20, 10).to(devices[0])
        net = DataParallel(module)
        assert net.devices == devices
        assert_close(net(x), module(x))
        assert_close(data_parallel(module, x), module(x))

    @pytest.mark.parametrize("devices", DEVICES)
    def test_are_taken_back_through_the_replicas(self, devices: list[str]) -> None:
        module, x = linear(devices[0]), random(20, 10).to(devices[0]).requires_grad_()
        output = data_parallel(module, x, devices)
        assert_close(output, module(x))
        weights = random(20, 5, seed=1).to(devices[0])
        assert_close(torch.autograd.grad(output, x, weights), torch.autograd.grad(module(x), x, weights))

    @pytest.mark.parametrize("devices", DEVICES)
    @pytest.mark.parametrize("with_third", [False, True])
    @pytest.mark.parametrize("by_keyword", [False, True])
    @pytest.mark.parametrize("call", CALLS)
    def test_of_several_inputs(
        self, devices: list[str], with_third: bool, by_keyword: bool, call: Callable[..., Any]
    ) -> None:
        module = Calls(lambda a, b, scale, c=None: scale * (a * b if c is None else a * b + c))
        a, b = (random(5, 5, seed=seed).to(devices[0]).requires_grad_() for seed in (0, 1))
        c = random(5, 5, seed=2).to(devices[0]) if with_third else None
        expected = module(a, b, 3.14, c)
        args, kwargs = ((a, b, 3.14), {"c": c}) if by_keyword else ((a, b, 3.14, c), {})
        output = call(module, args, devices, kwargs)
        assert_close(output, expected)
        assert_close(torch.autograd.grad(output.sum(), (a, b)), torch.autograd.grad(expected.sum(), (a, b)))

    @pytest.mark.parametrize("devices", PAIRS)
    @pytest.mark.parametrize("call", CALLS)
    def test_in_nested_outputs(self, devices: list[str], call: Callable[..., Any]) -> None:
        def nested(t: Tensor) -> list[Any]:
            return [t, (t.sin(), t.cos(), [t + 1]), t, OrderedDict(a=t, b=[t.sin()])]

        x = random(2, 2).to(devices[0])
        output, expected = call(Calls(nested), (x,), devices), nested(x)
        assert [type(part) for part in output] == [type(part) for part in expected]
        assert type(output[1][2]) is list
        assert list(output[3]) == ["a", "b"]
        assert output[0].device == output[1][2][0].device == torch.device(devices[0])
        assert_close(output, expected)

    @pytest.mark.parametrize("devices", PAIRS)
    @pytest.mark.parametrize("call", CALLS)
    def test_of_nested_inputs(self, devices: list[str], call: Callable[..., Any]) -> None:
        x = random(20, 3).to(devices[0])
        inputs = (x.cos(), (x.sin(), x), x.sin())
        output = call(Calls(lambda *inputs: inputs[1][0]), inputs, devices)
        assert_close(output, x.sin())

    @pytest.mark.parametrize("devices", DEVICES)
    def test_of_a_recurrent_net_give_the_same_step(self, devices: list[str]) -> None:
        x = torch.ones(4, 4, 30, dtype=torch.double, device=devices[0])

        def run(rnn: nn.LSTM, x: Tensor) -> Any:
            rnn.flatten_parameters()
            return rnn(x)

        def recurrent() -> nn.Module:
            return Calls(run, nn.LSTM(30, 16, batch_first=True, bidirectional=True))

        def step(model: nn.Module) -> list[Tensor]:
            optimizer = torch.optim.SGD(model.parameters(), lr=10.0)
            output, _ = model(x)
            nn.functional.mse_loss(output, torch.zeros_like(output)).backward()
            optimizer.step()
            return [parameter.detach().clone() for parameter in model.parameters()]

        plain, inner = (seeded(recurrent).to(devices[0], torch.double) for _ in range(2))
        net, before = DataParallel(inner, devices), [p.detach().clone() for p in inner.parameters()]
        with torch.no_grad():
            output, states = net(x[:2])
            assert_close(output, plain(x[:2])[0])
            assert [len(state) for state in states] == [2 * min(2, len(devices))] * 2  # a pair a replica
        after = step(net)
        assert_close(after, step(plain), rtol=1e-5, atol=1e-8)
        assert not any(torch.equal(now, then) for now, then in zip(after, before, strict=True))

    @pytest.mark.parametrize("dtype", [torch.float, torch.double, torch.half, torch.bfloat16])
    @pytest.mark.parametrize("devices", DEVICES)
    @pytest.mark.parametrize("call", CALLS)
    def test_of_every_type_of_numbers(
        self, devices: list[str], dtype: torch.dtype, call: Callable[..., Any]
    ) -> None:
        module, x = linear(devices[0]).to(dtype), random(20, 10, dtype=dtype).to(devices[0])
        output = call(module, (x,), devices)
        assert output.device == torch.device(devices[0])
        assert_close(output, module(x), rtol=0.0, atol=TOLERANCES[dtype])

    @pytest.mark.parametrize("dtype", [torch.float, torch.double, torch.half, torch.bfloat16])
    @pytest.mark.parametrize("devices", DEVICES)
    @pytest.mark.parametrize("extra", [{}, {"unused": []}, {"unused": {}}, {"unused": ()}])
    def test_of_keywords_only_where_empty_containers_drop_nothing(
        self, devices: list[str], dtype: torch.dtype, extra: dict[str, Any]
    ) -> None:
        layer, x = linear(devices[0]).to(dtype), random(20, 10, dtype=dtype).to(devices[0])
        module = Calls(lambda layer, input: layer(input["data"]), layer)
        output = DataParallel(module, devices)(input={"data": x, **extra})
        assert output.device == torch.device(devices[0])
        assert_close(output, layer(x), rtol=0.0, atol=TOLERANCES[dtype])

    @pytest.mark.parametrize(
        ("device", "dtype"),
        [
            ("cpu", torch.bfloat16),
            pytest.param("cuda:0", torch.half, marks=[pytest.mark.gpu, NEEDS_CUDA]),
        ],
    )
    def test_have_the_type_of_the_modules_own_autocast(self, device: str, dtype: torch.dtype) -> None:
        def run(layer: nn.Linear, x: Tensor) -> Any:
            with torch.autocast(torch.device(device).type, dtype):
                return layer(x)

        net = DataParallel(Calls(run, linear(device)), [device, device])
        assert net(torch.ones(4, 10)).dtype == dtype


class TestBatches:
    def test_a_batch_smaller_than_the_devices_uses_fewer(self) -> None:
        sizes: list[int] = []

        def identity(x: Tensor) -> Tensor:
            sizes.append(len(x))
            return x

        net = DataParallel(Calls(identity), ["cpu"] * 3)
        assert torch.equal(net(torch.ones(2, 1)), torch.ones(2, 1))
        assert sizes == [1, 1]

    @pytest.mark.parametrize("devices", DEVICES)
    def test_an_empty_batch_has_gradients_of_zero(self, devices: list[str]) -> None:
        module = linear(devices[0])
        output = DataParallel(module, devices)(torch.zeros(0, 10))
        assert output.shape == (0, 5)
        output.sum().backward()
        assert_close(gradients(module), [torch.zeros_like(parameter) for parameter in module.parameters()])

    @pytest.mark.parametrize("size", [0, 1, 2])
    def test_a_parameter_that_no_sample_uses_has_a_gradient_of_zero_whatever_the_batch(
        self, size: int
    ) -> None:
        net = nn.Sequential(nn.Linear(1, 1))
        net.register_parameter("unused", nn.Parameter(torch.ones(1)))
        DataParallel(net, CPUS)(torch.ones(size, 1)).sum().backward()
        assert net.unused.grad == 0.0

    def test_samples_may_be_along_another_dimension(self) -> None:
        module, x = nn.Tanh(), random(3, 4)
        assert_close(DataParallel(module, CPUS, dim=1)(x), module(x))
        assert_close(data_parallel(module, x, CPUS, dim=1), module(x))

    @pytest.mark.parametrize("devices", DEVICES)
    @pytest.mark.parametrize("inputs", [None, ()])
    def test_without_arguments_the_module_runs_once(
        self, devices: list[str], inputs: tuple[()] | None
    ) -> None:
        module = Calls(lambda: torch.ones(2, 3))
        for output in (DataParallel(module, devices)(), data_parallel(module, inputs, devices)):
            assert output.device == torch.device(devices[0])
            assert torch.equal(output, torch.ones(2, 3, device=devices[0]))

    def test_autograd_records_in_replicas_only_if_it_does_in_the_caller(self) -> None:
        records: list[bool] = []
        net = DataParallel(Calls(lambda x: records.append(torch.is_grad_enabled())), CPUS)
        with torch.no_grad():
            net(random(20, 10))
        net(random(20, 10))
        assert records == [False, False, True, True]

    def test_without_recording_replicas_are_apart_from_the_module(self) -> None:
        with torch.no_grad():
            assert not DataParallel(linear(), CPUS)(random(4, 10)).requires_grad
        with torch.inference_mode():
            assert DataParallel(linear(), CPUS)(random(4, 10)).is_inference()

    def test_on_a_single_device_it_is_the_modules_own_call(self) -> None:
        module, x = Calls(lambda x: (threading.current_thread(), x)), random(4, 3)
        thread, same = DataParallel(module, ["cpu"])(x)
        assert thread is threading.current_thread()
        assert same is x

    def test_a_call_leaves_no_cycles_of_references(self) -> None:
        net, x = DataParallel(nn.Linear(1, 1), CPUS), torch.ones(2, 1)
        net(x)  # torch itself leaves some at its first call
        assert count_cycles(lambda: net(x)) == 0


def test_the_wrapped_module_keeps_its_parameters_under_module() -> None:
    module = linear()
    net = DataParallel(module, CPUS)
    assert dict(net.named_parameters()) == {"module.weight": module.weight, "module.bias": module.bias}
    net(random(4, 10)).sum().backward()
    assert [name for name, _ in net.named_parameters()] == ["module.weight", "module.bias"]
    assert len(gradients(net)) == 2
