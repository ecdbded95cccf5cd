"""Replicas of eager and TorchScript modules, on CPUs and GPUs; modules over other tensors."""

# No postponed annotations here: TorchScript reads the annotations of script methods.

import io
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.seeded import random, seeded
from torch import Tensor, nn
from torch.autograd import gradcheck
from torch.testing import assert_close
from unit.dense.replicas import (
    CALLS,
    CPUS,
    DEVICES,
    PAIRS,
    Calls,
    ScaleAndShift,
    Weighted,
    count_cycles,
    gradients,
    linear,
)

from hybrid.dense.data_parallel import DataParallel, data_parallel, replicate, shadow

CONTIGUOUS, CHANNELS_LAST = torch.contiguous_format, torch.channels_last
GPU = pytest.mark.gpu
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


class TestOutputs:
    @pytest.mark.parametrize("devices", DEVICES)
    @pytest.mark.parametrize("call", CALLS)
    def test_replicas_compute_as_the_module(self, devices: list[str], call: Callable[..., Any]) -> None:
        module, x = linear(devices[0]), random(20, 10).to(devices[-1]).requires_grad_()
        expected = module(x.to(devices[0]))
        output = call(module, (x,), devices)
        assert output.device == torch.device(devices[0])
        assert_close(output, expected)
        weights, sources = random(20, 5, seed=1).to(devices[0]), [x, *module.parameters()]
        expected_grads = torch.autograd.grad(expected, sources, weights)
        assert_close(torch.autograd.grad(output, sources, weights), expected_grads)

    def test_default_devices_are_all_gpus_or_the_cpu(self) -> None:
        count = torch.cuda.device_count()
        devices = [torch.device("cuda", place) for place in range(count)] or [torch.device("cpu")]
        module, x = linear(devices[0]), random(20, 10).to(devices[0])
        net = DataParallel(module)
        assert net.devices == devices
        assert_close(net(x), module(x))
        assert_close(data_parallel(module, x), module(x))

    @pytest.mark.parametrize("devices", DEVICES)
    @pytest.mark.parametrize("with_third", [False, True])
    @pytest.mark.parametrize("by_keyword", [False, True])
    @pytest.mark.parametrize("call", CALLS)
    def test_several_inputs(
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
    def test_nested_inputs_and_outputs(self, devices: list[str], call: Callable[..., Any]) -> None:
        def nested(t: Tensor) -> list[Any]:
            return [t, (t.sin(), t.cos(), [t + 1]), t, OrderedDict(a=t, b=[t.sin()])]

        x = random(20, 3).to(devices[0])
        inputs = (x.cos(), (x, x.sin()), x.sin())
        output, expected = call(Calls(lambda *inputs: nested(inputs[1][0])), inputs, devices), nested(x)
        assert [type(part) for part in output] == [type(part) for part in expected]
        assert type(output[1][2]) is list
        assert list(output[3]) == ["a", "b"]
        assert output[0].device == output[1][2][0].device == torch.device(devices[0])
        assert_close(output, expected)


class TestBatches:
    @pytest.mark.parametrize("size", [0, 1, 2])
    def test_unused_parameter_has_a_zero_gradient(self, size: int) -> None:
        net = nn.Sequential(nn.Linear(1, 1))
        net.register_parameter("unused", nn.Parameter(torch.ones(1)))
        DataParallel(net, CPUS)(torch.ones(size, 1)).sum().backward()
        assert net.unused.grad == 0.0
        assert net[0].bias.grad == size

    def test_samples_along_another_dimension(self) -> None:
        module, x = nn.Tanh(), random(3, 4)
        assert_close(DataParallel(module, CPUS, dim=1)(x), module(x))
        assert_close(data_parallel(module, x, CPUS, dim=1), module(x))

    @pytest.mark.parametrize("devices", DEVICES)
    @pytest.mark.parametrize("inputs", [None, ()])
    def test_call_without_arguments_runs_once(self, devices: list[str], inputs: tuple[()] | None) -> None:
        module = Calls(lambda: torch.ones(2, 3))
        for output in (DataParallel(module, devices)(), data_parallel(module, inputs, devices)):
            assert output.device == torch.device(devices[0])
            assert torch.equal(output, torch.ones(2, 3, device=devices[0]))

    def test_replicas_inherit_the_grad_mode(self) -> None:
        records: list[bool] = []
        net = DataParallel(Calls(lambda x: records.append(torch.is_grad_enabled())), CPUS)
        with torch.no_grad():
            net(random(20, 10))
        net(random(20, 10))
        assert records == [False, False, True, True]

    def test_call_leaves_no_reference_cycles(self) -> None:
        net, x = DataParallel(nn.Linear(1, 1), CPUS), torch.ones(2, 1)
        net(x)  # torch itself leaves some at its first call
        assert count_cycles(lambda: net(x)) == 0

    def test_parameter_names_begin_with_module(self) -> None:
        module = linear()
        net = DataParallel(module, CPUS)
        assert dict(net.named_parameters()) == {"module.weight": module.weight, "module.bias": module.bias}
        net(random(4, 10)).sum().backward()
        assert [name for name, _ in net.named_parameters()] == ["module.weight", "module.bias"]
        assert len(gradients(net)) == 2


class TestDevices:
    @pytest.mark.parametrize("devices", [*PAIRS, [torch.device("cpu"), -1]])
    def test_devices_as_strings_or_objects(self, devices: list[Any]) -> None:
        module, x = linear(devices[0]), random(20, 10).to(devices[0]).requires_grad_()
        forms = [devices, tuple(devices), [torch.device(d) if isinstance(d, str) else d for d in devices]]
        for form in forms:
            for output_device in (None, *form):
                output = data_parallel(module, x, form, output_device)
                wanted = torch.device("cpu" if output_device == -1 else output_device or devices[0])
                assert output.device == wanted
                assert_close(output, module(x), check_device=False)

    @pytest.mark.gpu
    def test_devices_as_indices_of_gpus(self) -> None:
        module, x = linear("cuda:0"), random(20, 10)
        for output_device, wanted in ((None, "cuda:0"), (0, "cuda:0"), (-1, "cpu"), ("cuda", "cuda:0")):
            output = data_parallel(module, x, [0, 0], output_device)
            assert output.device == torch.device(wanted)
            assert_close(output, module(x.cuda()), check_device=False)

    @pytest.mark.parametrize("devices", [["cpu"], CPUS])
    def test_output_on_another_device(self, devices: list[str]) -> None:
        assert DataParallel(linear(), devices, "meta")(random(2, 10)).device.type == "meta"
        assert data_parallel(linear(), random(2, 10), devices, "meta").device.type == "meta"

    @pytest.mark.parametrize("device", ["cuda:64", 64])
    def test_missing_device_is_named(self, device: str | int) -> None:
        with pytest.raises(ValueError, match="cuda:64"):
            DataParallel(linear(), ["cpu", device])

    @pytest.mark.parametrize(
        ("first", "second"),
        [
            ("cpu", "meta"),
            ("meta", "cpu"),
            pytest.param("cuda:0", "cpu", marks=GPU),
            pytest.param("cuda:0", "cuda:1", marks=TWO_GPUS),
        ],
    )
    @pytest.mark.parametrize("num_devices", [1, 2])
    @pytest.mark.parametrize("kind", [lambda: nn.Linear(2, 2), lambda: nn.BatchNorm1d(2, affine=False)])
    @pytest.mark.parametrize("call", CALLS)
    def test_module_on_another_device_raises_an_error(
        self,
        num_devices: int,
        first: str,
        second: str,
        kind: Callable[[], nn.Module],
        call: Callable[..., Any],
    ) -> None:
        module = nn.Sequential(kind().to(first), kind().to(second))
        with pytest.raises(RuntimeError, match=rf"device {first} .* {second}$"):
            call(module, (random(2, 2),), [first, second][:num_devices])


class TestReplicate:
    @pytest.mark.parametrize("devices", PAIRS)
    def test_first_replica_shares_buffers_with_the_module(self, devices: list[str]) -> None:
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

    def test_replicas_have_no_parameters_of_their_own(self) -> None:
        module = nn.Linear(2, 2)
        module.bias.requires_grad_(False)
        for replica in replicate(module, CPUS):
            assert list(replica.parameters()) == []
            assert not replica.weight.is_leaf
            assert not replica.bias.requires_grad
        for replica in replicate(module, CPUS, detach=True):
            assert list(replica.parameters()) == []
            assert not replica.weight.requires_grad

    def test_shared_and_missing_submodules_stay_so(self) -> None:
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

    def test_lazy_parameters_raise_an_error(self) -> None:
        module = nn.Sequential(nn.LazyLinear(10))
        with pytest.raises(RuntimeError, match="uninitialized parameters"):
            replicate(module, CPUS)
        with pytest.raises(RuntimeError, match="uninitialized parameters"):
            data_parallel(module, torch.rand(10, 10), CPUS)

    def test_zero_grad_of_a_replica_warns(self) -> None:
        net = DataParallel(Calls(lambda layer, x: layer.zero_grad(), nn.Linear(5, 5)), CPUS)
        with pytest.warns(UserWarning, match="zero_grad"):
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
    def test_parameter_lists_and_dicts_hold_the_replicas_tensors(self, kind: type[Any]) -> None:
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
    def test_buffers_get_gradients(self, devices: list[str]) -> None:
        module = ScaleAndShift(random(4, dtype=torch.float64).to(devices[0]).requires_grad_())
        x = random(2, 4, seed=1, dtype=torch.float64)

        def fn(_: Tensor) -> Any:
            return data_parallel(module, x, devices)

        assert gradcheck(fn, (module.scale,), check_batched_grad=False)

    def test_gradients_add_up_in_replica_order(self) -> None:
        # In float32, 1e8 + 1 is 1e8: any other order gives 1.
        module = Weighted(torch.ones(1))
        data_parallel(module, torch.tensor([[1e8], [1.0], [-1e8]]), ["cpu"] * 3).sum().backward()
        assert module.weight.grad == 0.0

    @pytest.mark.parametrize("devices", PAIRS)
    def test_second_derivative_by_inputs(self, devices: list[str]) -> None:
        net = DataParallel(nn.Linear(4, 1).to(devices[0]), devices)
        x = torch.ones(2, 4, device=devices[0], requires_grad=True)
        output = net(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True, retain_graph=True)
        slope.mean().backward()
        weight_grad, bias_grad = (parameter.grad for parameter in net.parameters())
        assert_close(weight_grad, torch.full((1, 4), 0.25, device=devices[0]))
        assert_close(bias_grad, torch.zeros(1, device=devices[0]))

    @pytest.mark.parametrize("devices", DEVICES)
    def test_sparse_gradients_stay_sparse_and_exact(self, devices: list[str]) -> None:
        module = seeded(lambda: nn.Embedding(10, 5, sparse=True, dtype=torch.float64)).to(devices[0])
        ids = torch.randint(10, (20, 5), generator=torch.Generator().manual_seed(1)).to(devices[-1])
        expected = module(ids.to(devices[0]))
        (expected_grad,) = torch.autograd.grad(expected.sum(), module.weight)
        output = data_parallel(module, ids, devices)
        assert torch.equal(output, expected)
        (grad,) = torch.autograd.grad(output.sum(), module.weight)
        assert grad.is_sparse
        assert torch.equal(grad.coalesce().indices(), expected_grad.coalesce().indices())
        assert torch.equal(grad.coalesce().values(), expected_grad.coalesce().values())

    @pytest.mark.parametrize("dense_first", [False, True])
    def test_sparse_and_dense_gradients_add_up(self, dense_first: bool) -> None:
        module = nn.Embedding(3, 2, sparse=True)
        sparse, dense = replicate(module, CPUS)[:: -1 if dense_first else 1]
        (sparse(torch.tensor([1, 1])).sum() + dense.weight.sum()).backward()
        assert module.weight.grad is not None
        assert module.weight.grad.tolist() == [[1.0, 1.0], [3.0, 3.0], [1.0, 1.0]]

    def test_sparse_gradient_of_one_replica_stays_sparse(self) -> None:
        module = nn.Embedding(3, 2, sparse=True)
        replicate(module, CPUS)[1](torch.tensor([1])).sum().backward()
        assert module.weight.grad is not None
        assert module.weight.grad.is_sparse

    @pytest.mark.parametrize("devices", PAIRS)
    def test_complex_parameters_stay_complex(self, devices: list[str]) -> None:
        x, weight = (torch.complex(random(2, 10, seed=s), random(2, 10, seed=s + 1)) for s in (0, 2))
        module, x = Weighted(weight[:1]).to(devices[0]), x.to(devices[0])
        output = data_parallel(module, x, devices)
        assert_close(output, module(x))
        (output * output.conj()).real.sum().backward()
        assert module.weight.grad is not None
        assert_close(module.weight.grad, 2 * (x * x.conj()).sum(0, keepdim=True) * module.weight.detach())

    @pytest.mark.parametrize("devices", PAIRS)
    @pytest.mark.parametrize("formats", [[CONTIGUOUS] * 2, [CHANNELS_LAST, CONTIGUOUS], [CHANNELS_LAST] * 2])
    @pytest.mark.parametrize("dtypes", [[torch.float] * 2, [torch.float, torch.half], [torch.half] * 2])
    def test_gradients_keep_the_memory_format(
        self, formats: list[torch.memory_format], dtypes: list[torch.dtype], devices: list[str]
    ) -> None:
        def net() -> Calls:
            layers = [nn.Conv2d(8, 8, 2, dtype=dtype) for dtype in dtypes]
            for layer, memory_format in zip(layers, formats, strict=True):
                layer.to(memory_format=memory_format)  # type: ignore[call-overload]
            return Calls(lambda one, two, x: two(one(x.to(dtypes[0])).to(dtypes[1])), *layers).to(devices[0])

        plain, inner = (seeded(net) for _ in range(2))
        x = random(4 * len(devices), 8, 4, 4).to(devices[0])
        for each in (plain, DataParallel(inner, devices)):
            each(x).square().mean().backward()
        for ours, theirs, memory_format in zip(inner.held, plain.held, formats, strict=True):
            assert gradients(ours)[0].is_contiguous(memory_format=memory_format)
            assert_close(gradients(ours), gradients(theirs), rtol=3e-3, atol=3e-3)

    def test_parameter_may_change_before_the_backward_pass(self) -> None:
        module = nn.Linear(2, 2)
        output = data_parallel(module, torch.ones(2, 2), CPUS)
        with torch.no_grad():
            module.bias.add_(1)
        output.sum().backward()
        assert module.bias.grad is not None
        assert module.bias.grad.tolist() == [2.0, 2.0]


def test_other_tensors_are_shared() -> None:
    module = nn.BatchNorm1d(3)
    weight = torch.full((3,), 2.0)
    other = shadow(module, {module.weight: weight})
    assert other.weight is weight
    assert other.bias is module.bias
    assert other.running_mean is module.running_mean
    assert [name for name, _ in module.named_parameters()] == ["weight", "bias"]
    assert [name for name, _ in other.named_parameters()] == ["bias"]


@pytest.mark.parametrize("kind", ["parametrized", "traced by torch.fx", "recurrent"])
def test_modules_with_derived_weights_use_the_substitutes(kind: str) -> None:
    make: dict[str, Callable[[], nn.Module]] = {
        "parametrized": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
        "traced by torch.fx": lambda: torch.fx.symbolic_trace(Weighted(torch.ones(3))),
        "recurrent": lambda: nn.LSTM(3, 3),
    }
    module, like = seeded(make[kind]), seeded(make[kind], seed=1)
    like_tensors = [*like.parameters(), *like.buffers()]
    tensors = dict(zip([*module.parameters(), *module.buffers()], like_tensors, strict=True))
    x = random(2, 3)
    plain = {key: value.detach() * 2 for key, value in tensors.items()}
    with torch.no_grad():
        for tensor in like_tensors:
            tensor.mul_(2)
        assert_close(shadow(module, plain)(x), like(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.norm(self.layer(x).relu())
        return output


def test_hooks_of_the_module_run_in_replicas() -> None:
    module, seen = Net(), list[Tensor]()
    module.register_forward_hook(lambda module, args, output: seen.append(output))
    outputs = [replica(random(4, 3)) for replica in replicate(module, CPUS)]
    assert list(map(id, seen)) == list(map(id, outputs))


@pytest.mark.parametrize("is_in_place", [True, False])
def test_compiled_module_raises_an_error(is_in_place: bool) -> None:
    inner: Any = Net()
    if is_in_place:
        inner.compile(backend="aot_eager")
    else:
        inner = torch.compile(inner, backend="aot_eager")
    module = nn.Sequential(inner)
    with pytest.raises(RuntimeError, match=r"^Net is compiled"):
        replicate(module, CPUS)
    assert len([*module.parameters()]) == 4


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.ReLU(), nn.Linear(2, 2))


class ScriptBlock(torch.jit.ScriptModule):
    """A script module around another module."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.m = block

    @torch.jit.script_method  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.m(x)
        return output


def script_net() -> nn.Module:
    return ScriptBlock(layers())


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, in replicas of eager modules too, which list no parameters."""
    return {
        f"{path}.{name}": tensor
        for path, submodule in module.named_modules(remove_duplicate=False)
        for held in (vars(submodule), submodule._parameters, submodule._buffers)
        for name, tensor in held.items()
        if isinstance(tensor, Tensor)
    }


def check_replicas(module: nn.Module, replicas: list[Any], devices: list[str]) -> None:
    """Each replica lies on its device, computes what the module does, and has its gradients."""
    x = random(3, 2)
    for replica, device in zip(replicas, devices, strict=True):
        assert tensors_of(replica).keys() == tensors_of(module).keys()
        assert {tensor.device for tensor in tensors_of(replica).values()} == {torch.device(device)}
        assert_close(replica(x.to(device)), module(x.to(devices[0])), check_device=False)
        grads = [
            torch.autograd.grad(each(x.to(on)).square().sum(), list(module.parameters()))
            for each, on in ((module, devices[0]), (replica, device))
        ]
        assert_close(grads[1], grads[0])


class TestScriptModules:
    @pytest.mark.parametrize("devices", PAIRS)
    def test_shared_script_module_is_replicated_once(self, devices: list[str]) -> None:
        shared = seeded(script_net)
        module = nn.Sequential(shared, ScriptBlock(shared)).to(devices[0])
        replicas: list[Any] = replicate(module, devices)
        check_replicas(module, replicas, devices)
        for replica in replicas:
            assert replica[0] is replica[1].m

    @pytest.mark.parametrize("devices", PAIRS)
    def test_traced_module(self, devices: list[str]) -> None:
        # Tracing warns of the check of the batch's size in training.
        net = seeded(lambda: nn.Sequential(nn.Sequential(layers()), layers())).to(devices[0]).eval()
        traced = torch.jit.trace(net, torch.ones(3, 2, device=devices[0]))
        check_replicas(traced, replicate(traced, devices), devices)

    @pytest.mark.parametrize("devices", PAIRS)
    def test_only_the_first_replica_shares_memory(self, devices: list[str]) -> None:
        module = nn.Sequential(ScriptBlock(seeded(script_net)), nn.Linear(2, 2)).to(devices[0])
        own = {name: tensor.data_ptr() for name, tensor in tensors_of(module).items()}
        first, second = (tensors_of(replica) for replica in replicate(module, devices))
        assert {name: tensor.data_ptr() for name, tensor in first.items()} == own
        assert not {tensor.data_ptr() for tensor in second.values()} & set(own.values())
