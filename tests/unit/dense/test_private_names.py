"""The private names of torch that nets and loops rely on exist; each occurs in one module."""

import pkgutil
from pathlib import Path

import pytest

import hybrid

PRIVATE_NAMES = {
    "torch._dynamo:maybe_mark_dynamic": "dense/compilation.py",
    "torch._inductor.exc:InvalidCxxCompiler": "dense/compilation.py",
    "torch._dynamo.eval_frame:OptimizedModule": "dense/parameter_substitution.py",
    "torch.nn:Module._replicate_for_data_parallel": "dense/parameter_substitution.py",
    "torch._utils:ExceptionWrapper": "dense/data_parallel.py",
    "torch._C:_AutoDispatchBelowAutograd": "dense/matmul.py",
    "torch.distributed.distributed_c10d:_get_default_store": "dense/tensor_parallel.py",
    "torch.distributed._functional_collectives:AsyncCollectiveTensor": ("dense/tensor_parallel.py"),
    "torch.distributed.tensor._dtensor_spec:DTensorSpec": "dense/tensor_parallel.py",
    "torch.autograd.graph:Node._input_metadata": "custom_loop/loop_warnings.py",
    "torch.utils._pytree:tree_map": "dense/tensor_parallel.py",
}


@pytest.mark.parametrize(("name", "module"), PRIVATE_NAMES.items())
def test_one_module_uses_the_private_name(name: str, module: str) -> None:
    assert pkgutil.resolve_name(name) is not None
    package = Path(hybrid.__file__).parent
    last = name.rpartition(":")[2].rpartition(".")[2]
    users = [path for path in package.rglob("*.py") if last in path.read_text(encoding="utf-8")]
    assert [str(path.relative_to(package)) for path in users] == [module]
