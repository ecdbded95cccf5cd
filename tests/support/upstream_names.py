"""The tests, classes and functions of torch's own suite that this project answers to."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """Names that belong together.

    Attributes:
        sources: the files of the pytorch repository that define them.
        names: classes first, then helper functions, then tests.
    """

    sources: tuple[str, ...]
    names: tuple[str, ...]


_DATA_PARALLEL = """
    TestDataParallel TestDataParallelDeviceType TestModule Layer Net Model Cplx ConvNet MyMod
    __init__ forward _test_scatter _test_gather assert_correct dummy_ctx_manager check_fn fn
    gradient_penalty local_test step test test_helper
    test_data_parallel_buffers_requiring_grad
    test_data_parallel_rnn
    test_data_parallel_lazy_linear
    test_parallel_apply
    test_parallel_apply_autocast
    test_parallel_apply_passes_exception
    test_data_parallel_multiple_input
    test_data_parallel_small_back
    test_data_parallel_model_device
    test_data_parallel_model_no_refcycles
    test_data_parallel_no_grad
    test_data_parallel
    test_data_parallel_sparse
    test_data_parallel_nested_output
    test_data_parallel_nested_input
    test_data_parallel_module_zero_inputs
    test_data_parallel_device_args
    test_data_parallel_function_deletion
    test_scatter_cpu
    test_scatter_gpu
    test_data_parallel_complex
    test_gather_cpu
    test_gather_gpu
    test_gather_different_len_dicts
    test_replicate
    test_replicate_buffers
    test_zero_grad
    test_autocast
    test_save_replica_module
    test_strided_grad_layout
    test_parameter_list_dict_replica
    test_data_parallel_module
    test_data_parallel_module_kwargs_only
    test_data_parallel_module_kwargs_only_empty_list
    test_data_parallel_module_kwargs_only_empty_dict
    test_data_parallel_module_kwargs_only_empty_tuple
"""

_JIT = """
    TestDataParallel Mpy Mpy1 Mpy2 Msm Msm1
    __init__ forward check_replicas assert_share_data
    test_python_submodule_script
    test_shared_module
    test_traced_module
    test_tensor_sharing
    test_tensor_sharing_with_forward
"""

_DIST_AUTOGRAD = """
    DdpMode FeatureSet RemoteEM RemoteNet HybridModel Trainer
    DdpUnderDistAutogradTest CommonDdpComparisonTest DdpComparisonTest CudaDdpComparisonTest
    init_logger _call_method _remote_method _remote_method_async getLinear get_training_examples
    set_shutdown_signal world_size trainer_name remote_worker_name
    _remote_worker_process _trainer_process _master_process do_test_on_master train_batch destroy_pg
    _do_test _run_test_ddp_comparision get_remote_grads
    test_backward_no_ddp
    test_backward_ddp_outside
    test_backward_ddp_outside_uneven_inputs
    test_backward_ddp_inside
    test_ddp_comparison
    test_ddp_comparison_uneven_inputs
    test_ddp_dist_autograd_sparse_grads
    test_ddp_dist_autograd_local_vs_remote
    test_ddp_dist_autograd_local_vs_remote_gpu
"""

_TENSOR_UTILS = "sync_grad_hook _flatten_tensor _unflatten_tensor"

_TENSOR_DDP = """
    parallelize_module DistributedDataParallel
    _get_submodule_n_params _update_module_param _reconstruct_dtensor _localize_dtensor
    _pre_dp_module_transform
    test_2d_ddp_integration_functionality
"""

# Spelled as in torch, mistakes included.
UPSTREAM = {
    "data_parallel": Group(("test/distributed/test_data_parallel.py",), tuple(_DATA_PARALLEL.split())),
    "jit": Group(("test/jit/test_data_parallel.py",), tuple(_JIT.split())),
    "dist_autograd": Group(
        ("torch/testing/_internal/distributed/ddp_under_dist_autograd_test.py",),
        tuple(_DIST_AUTOGRAD.split()),
    ),
    "tensor_utils": Group(
        ("torch/distributed/tensor/parallel/_data_parallel_utils.py",), tuple(_TENSOR_UTILS.split())
    ),
    "tensor_ddp": Group(
        (
            "torch/distributed/tensor/parallel/ddp.py",
            "test/distributed/tensor/parallel/test_ddp_2d_parallel.py",
        ),
        tuple(_TENSOR_DDP.split()),
    ),
}

# What no test of ours can show, and why.
NOT_APPLICABLE = {
    "dist_autograd/init_logger": "no logger is set up: what a role prints, warnings and torch's own messages "
    "included, is its log",
}

ALL_NAMES = [f"{group}/{name}" for group, of_group in UPSTREAM.items() for name in of_group.names]
