"""Replicas of a module: what they share, what they copy, and how their gradients add up."""

import io
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from support.replicas import CPUS, DEVICES, PAIRS, Calls, ConvNet, ScaleAndShift, Weighted, gradients
from support.seeded import random, seeded
from torch import Tensor, nn
from torch.autograd import gradcheck
from torch.testing import assert_close

from hybrid.dense.data_parallel.replicas import DataParallel, data_parallel, replicate

CONTIGUOUS, CHANNELS_LAST = torch.contiguous_format, torch.channels_last


class TestReplicate:
    @pytest.mark.parametrize("devices", DEVICES)
    @pytest.mark.parametrize("form", [list, tuple])
    def test_each_replica_computes_the_same_on_its_device(
        self, devices: list[str], form: Callable[[list[str]], Any]
    ) -> None:
        module = seeded(lambda: nn.Linear(10, 5)).to(devices[0])
        x = random(2, 10)
        expected = module(x.to(devices[0]))
        for replica, device in zip(replicate(module, form(devices)), devices, strict=True):
            assert {replica.weight.device, replica.bias.device} == {torch.device(device)}
            assert_close(replica(x.to(device)), expected, check_device=False)

    @pytest.mark.parametrize("devices", PAIRS)
    def test_buffers_are_on_the_replicas_device_and_the_first_are_the_modules_own(
        self, devices: list[str]
    ) -> None:
        module = nn.BatchNorm2d(10).to(devices[0])
        first, second = replicate(module, devices)
        for name, buffer in module.named_buffers():
            assert first.get_buffer(name).data_ptr() == buffer.data_ptr()
            assert second.get_buffer(name).device == torch.device(devices[1])
            assert second.get_buffer(name).data_ptr() != buffer.data_ptr()
        first(torch.ones(2, 10, 3, 3, device=devices[0]))
        assert module.num_batches_tracked == 1
        assert_close(module.running_mean, torch.full((10,), 0.1, device=devices[0]))
        second(torch.zeros(2, 10, 3, 3, device=devices[1]))
        assert module.num_batches_tracked == 1

    def test_there_may_be_no_devices(self) -> None:
        assert replicate(nn.Linear(1, 1), []) == []

    def test_replicas_list_no_parameters_and_compute_from_the_modules(self) -> None:
        module = nn.Linear(2, 2)
        for replica in replicate(module, CPUS):
            assert list(replica.parameters()) == []
            assert not replica.weight.is_leaf
        for replica in replicate(module, CPUS, detach=True):
            assert list(replica.parameters()) == []
            assert not replica.weight.requires_grad

    def test_a_frozen_parameter_is_constant_in_replicas_too(self) -> None:
        module = nn.Linear(2, 2).requires_grad_(False)
        module.bias.requires_grad_(True)
        for replica in replicate(module, CPUS):
            assert not replica.weight.requires_grad
            assert replica.bias.requires_grad

    def test_shared_and_missing_parts_stay_so(self) -> None:
        layer = nn.Linear(2, 2, bias=False)
        module = nn.ModuleDict({"a": layer, "b": nn.Sequential(layer)})
        module.add_module("none", None)
        replicas: list[Any] = replicate(module, CPUS)
        for replica in replicas:
            copy = replica.get_submodule("a")
            assert copy is replica.get_submodule("b.0")
            assert copy is not layer
            assert copy.bias is None
            assert replica.none is None

    def test_parameters_without_a_shape_are_refused(self) -> None:
        reason = (
            "^Modules with uninitialized parameters can't be used with `DataParallel`. "
            r"Run a dummy forward pass to correctly initialize the modules$"
        )
        module = nn.Sequential(nn.LazyLinear(10))
        with pytest.raises(RuntimeError, match=reason):
            replicate(module, CPUS)
        with pytest.raises(RuntimeError, match=r"^Modules with uninitialized parameters"):
            data_parallel(module, torch.rand(10, 10), CPUS)

    def test_zero_grad_of_a_replica_warns_that_it_does_nothing(self) -> None:
        net = DataParallel(Calls(lambda layer, x: layer.zero_grad(), nn.Linear(5, 5)), CPUS)
        reason = r"Calling \.zero_grad\(\) from a module created with nn\.DataParallel\(\) has no effect\."
        with pytest.warns(UserWarning, match=reason):
            net(torch.ones(4, 5))

    @pytest.mark.parametrize("detach", [False, True])
    def test_replicas_can_be_saved_and_loaded(self, detach: bool) -> None:
        module = nn.Linear(10, 5)
        file = io.BytesIO()
        torch.save(replicate(module, CPUS, detach), file)
        file.seek(0)
        for loaded in torch.load(file, weights_only=False):
            assert torch.equal(loaded.weight, module.weight)

    @pytest.mark.parametrize("kind", [nn.ParameterList, nn.ParameterDict])
    def test_lists_and_dicts_of_parameters_hold_those_of_the_replica(self, kind: type[Any]) -> None:
        values = [random(10), random(10, seed=1)]
        seen: list[Tensor] = []

        def see(held: Any, x: Tensor) -> None:
            seen.extend(held.values() if kind is nn.ParameterDict else held)

        held = kind(values if kind is nn.ParameterList else {"a": values[0], "b": values[1]})
        data_parallel(Calls(see, held), torch.ones(8, 8), CPUS)
        assert_close(seen, values * 2)
        assert all(parameter.grad_fn is not None for parameter in seen)


class TestGradients:
    @pytest.mark.parametrize("devices", PAIRS)
    def test_buffers_that_require_one_get_theirs(self, devices: list[str]) -> None:
        module = ScaleAndShift(random(4, dtype=torch.float64).to(devices[0]).requires_grad_())
        x = random(2, 4, seed=1, dtype=torch.float64)

        def fn(_: Tensor) -> Any:
            return data_parallel(module, x, devices)

        assert gradcheck(fn, (module.scale,), check_batched_grad=False)

    def test_they_add_up_in_the_order_of_replicas(self) -> None:
        # In float32, 1e8 + 1 is 1e8: any other order gives 1.
        module = Weighted(torch.ones(1))
        data_parallel(module, torch.tensor([[1e8], [1.0], [-1e8]]), ["cpu"] * 3).sum().backward()
        assert module.weight.grad == 0.0

    @pytest.mark.parametrize("devices", PAIRS)
    def test_a_second_derivative_goes_through_replicas_and_zeros_stand_for_what_is_unused(
        self, devices: list[str]
    ) -> None:
        net = DataParallel(nn.Linear(4, 1).to(devices[0]), devices)
        x = torch.ones(2, 4, device=devices[0], requires_grad=True)
        output = net(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True, retain_graph=True)
        slope.mean().backward()
        weight_grad, bias_grad = (parameter.grad for parameter in net.parameters())
        assert_close(weight_grad, torch.full((1, 4), 0.25, device=devices[0]))
        assert_close(bias_grad, torch.zeros(1, device=devices[0]))

    @pytest.mark.parametrize("devices", PAIRS)
    def test_a_second_derivative_with_respect_to_the_weights(self, devices: list[str]) -> None:
        weight = random(3, dtype=torch.float64).to(devices[0])
        module, x = Weighted(weight), random(2, 3, seed=1, dtype=torch.float64).to(devices[0])
        output = data_parallel(module, x, devices).pow(3).sum()
        (first,) = torch.autograd.grad(output, module.weight, create_graph=True)
        assert_close(first, (3 * x.pow(3) * weight.pow(2)).sum(0))
        (second,) = torch.autograd.grad(first.sum(), module.weight)
        assert_close(second, (6 * x.pow(3) * weight).sum(0))

    @pytest.mark.parametrize("devices", DEVICES)
    def test_sparse_ones_stay_sparse_and_exact(self, devices: list[str]) -> None:
        module = seeded(lambda: nn.Embedding(10, 5, sparse=True, dtype=torch.float64)).to(devices[0])
        ids = torch.randint(10, (20, 5), generator=torch.Generator().manual_seed(1)).to(devices[-1])
        expected = module(ids.to(devices[0]))
        (expected_grad,) = torch.autograd.grad(expected.sum(), module.weight)
        assert torch.equal(data_parallel(module, ids.to(devices[0])), expected)
        output = data_parallel(module, ids, devices)
        assert torch.equal(output, expected)
        (grad,) = torch.autograd.grad(output.sum(), module.weight)
        assert grad.is_sparse
        assert torch.equal(grad.coalesce().indices(), expected_grad.coalesce().indices())
        assert torch.equal(grad.coalesce().values(), expected_grad.coalesce().values())

    @pytest.mark.parametrize("dense_first", [False, True])
    def test_a_sparse_and_a_dense_one_add_up(self, dense_first: bool) -> None:
        module = nn.Embedding(3, 2, sparse=True)
        sparse, dense = replicate(module, CPUS)[:: -1 if dense_first else 1]
        (sparse(torch.tensor([1, 1])).sum() + dense.weight.sum()).backward()
        assert module.weight.grad is not None
        assert module.weight.grad.tolist() == [[1.0, 1.0], [3.0, 3.0], [1.0, 1.0]]

    def test_a_sparse_one_of_a_single_replica_stays_sparse(self) -> None:
        module = nn.Embedding(3, 2, sparse=True)
        replicate(module, CPUS)[1](torch.tensor([1])).sum().backward()
        assert module.weight.grad is not None
        assert module.weight.grad.is_sparse

    @pytest.mark.parametrize("devices", PAIRS)
    def test_complex_parameters_stay_complex(self, devices: list[str]) -> None:
        x, weight = (torch.complex(random(2, 10, seed=s), random(2, 10, seed=s + 1)) for s in (0, 2))
        module, x = Weighted(weight[:1]).to(devices[0]), x.to(devices[0])
        output = data_parallel(module, x, devices)
        assert torch.equal(output, module(x))
        (output * output.conj()).real.sum().backward()
        assert module.weight.grad is not None
        assert_close(module.weight.grad, 2 * (x * x.conj()).sum(0, keepdim=True) * module.weight.detach())

    @pytest.mark.parametrize("devices", PAIRS)
    @pytest.mark.parametrize(
        ("formats", "dtypes"),
        list(
            product(
                ([CONTIGUOUS] * 4, [CHANNELS_LAST] * 2 + [CONTIGUOUS] * 2, [CHANNELS_LAST] * 4),
                ([torch.float] * 4, [torch.float] * 2 + [torch.half] * 2, [torch.half] * 4),
            )
        ),
    )
    def test_they_keep_the_layout_of_their_parameter(
        self,
        formats: list[torch.memory_format],
        dtypes: list[torch.dtype],
        devices: list[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # has too few digits for this
        plain, inner = (seeded(lambda: ConvNet(formats, dtypes)).to(devices[0]) for _ in range(2))
        net = DataParallel(inner, devices)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, net)]
        x = random(8 * len(devices), 8, 8, 8).to(devices[0])
        target = random(8 * len(devices), 8, 4, 4, seed=1).to(devices[0], dtypes[-1])
        tolerance = 3e-3 if torch.half in dtypes else 1e-5
        for _ in range(2):
            for each, optimizer in zip((plain, net), optimizers, strict=True):
                optimizer.zero_grad()
                nn.functional.mse_loss(each(x), target).backward()
            for ours, theirs, memory_format in zip(inner.layers, plain.layers, formats, strict=True):
                of_weight, expected = gradients(ours)[0], gradients(theirs)[0]
                assert of_weight.is_contiguous(memory_format=memory_format)
                assert expected.is_contiguous(memory_format=memory_format)
                assert_close(gradients(ours), gradients(theirs), rtol=tolerance, atol=tolerance)
            for optimizer in optimizers:
                optimizer.step()

    def test_a_parameter_may_change_before_the_backward_pass_if_that_does_not_need_it(self) -> None:
        module = nn.Linear(2, 2)
        output = data_parallel(module, torch.ones(2, 2), CPUS)
        with torch.no_grad():
            module.bias.add_(1)
        output.sum().backward()
        assert module.bias.grad is not None
        assert module.bias.grad.tolist() == [2.0, 2.0]
