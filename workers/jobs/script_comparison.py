"""A script in this process, compared with the same script on a cluster."""

from pathlib import Path

import torch

from hybrid.checkpoint.checkpoint_manifest import DENSE_FILE
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.checkpoint.tensor_file import unpack_dense
from hybrid.config import RunConfig
from hybrid.custom_loop.backend import BACKEND, SingleProcess
from hybrid.errors import HybridError
from workers.console.terminal import TerminalView
from workers.controller.trainer_script import run_script
from workers.jobs.comparison import comparison_table, judge
from workers.jobs.snapshot import DifferenceError, Snapshot, TensorName, differences, stored_tables


def compare_script(config: RunConfig, path: str, arguments: tuple[str, ...], cluster: Path) -> None:
    """Run a script to ``train.max_steps`` in this process, and print the differences.

    Args:
        cluster: the checkpoint of a cluster after the same number of steps.

    Raises:
        DifferenceError: a difference is larger than rounding.
        HybridError: the script takes fewer steps, or has no optimizer.
    """
    alone = cluster.with_name("alone")
    before = BACKEND.set(SingleProcess(config, alone))
    try:
        torch.set_num_threads(config.cluster.threads)
        run_script(path, arguments)
    finally:
        BACKEND.reset(before)
    found = differences(_snapshot(cluster), _snapshot(alone))
    same = sum(each.largest == 0 for each in found)
    with TerminalView() as view:
        view.show(comparison_table(found), f"{same} of {len(found)} tensors are the same bit for bit")
    try:
        judge(found, config.train.dtype)
    except DifferenceError as error:
        if config.train.dtype != "float32":
            raise
        raise DifferenceError(
            f"{error}, with the script's module and inputs in float64 (.double())"
        ) from None


def _snapshot(folder: Path) -> Snapshot:
    if not folder.exists():
        raise HybridError("--steps: the script ends before so many; compare fewer")
    stored = Checkpoint.open(folder)
    net, states = unpack_dense(stored.tensors(DENSE_FILE))
    found = stored_tables(stored)
    found |= {TensorName(f"module: {name}"): tensor for name, tensor in net.items()}
    for number, state in states.items():
        found |= {TensorName(f"optimizer: parameter {number}", kind): each for kind, each in state.items()}
    return found
