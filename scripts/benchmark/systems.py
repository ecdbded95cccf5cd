"""The systems that are compared. Does not import torch."""

import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OWN_PYTHON = sys.executable
BENCH_PYTHON = str(ROOT / ".venv-bench/bin/python")  # with FBGEMM and TorchRec
_FBGEMM_OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad")  # Adam is for GPUs only
CONFIG = "{config}"  # in a command: the configuration file


@dataclass(frozen=True)
class System:
    """A system and its command.

    Attributes:
        name: name in the command line and in results.json.
        title: name in tables.
        interpreter: Python of its environment.
        command: arguments of Python. The system reports by ``benchmark.mark``.
        is_synchronous: whether its losses must equal those of one process.
        is_one_process: whether one process computes the samples of all trainers.
        table_optimizers: supported optimizers of tables.
    """

    name: str
    title: str
    interpreter: str
    command: tuple[str, ...]
    is_synchronous: bool = True
    is_one_process: bool = False
    table_optimizers: tuple[str, ...] = ("sgd", "adagrad", "rowwise_adagrad", "adam")

    @property
    def arguments(self) -> tuple[str, ...]:
        """Return the command line."""
        return (self.interpreter, "-P", *self.command)


def _ours(update: str, is_synchronous: bool) -> System:
    options = ("--config", CONFIG, "--set", f"train.update={update}")
    command = ("-m", "workers", "run", "benchmark.ours:measure", *options)
    return System(f"ours-{update}", f"ours, {update}", OWN_PYTHON, command, is_synchronous)


OURS_SYNC = _ours("sync", True)
OURS_LOOKAHEAD = _ours("lookahead", True)
_ALL = (
    OURS_SYNC,
    OURS_LOOKAHEAD,
    _ours("async", False),
    System(
        "one-process",
        "one process, torch",
        OWN_PYTHON,
        ("-m", "benchmark.one_process"),
        is_one_process=True,
        table_optimizers=("sgd", "adagrad", "adam"),  # torch has no row-wise Adagrad
    ),
    System(
        "one-process-fbgemm",
        "one process, FBGEMM",
        BENCH_PYTHON,
        ("-m", "benchmark.one_process", "--kernels", "fbgemm"),
        is_one_process=True,
        table_optimizers=_FBGEMM_OPTIMIZERS,
    ),
    System(
        "tutorial",
        "tutorial",
        OWN_PYTHON,
        ("-m", "benchmark.tutorial"),
        is_synchronous=False,
        table_optimizers=("sgd",),
    ),
    System(
        "tutorial-tcp",
        "tutorial, TCP alone",
        OWN_PYTHON,
        ("-m", "benchmark.tutorial", "--tcp"),
        is_synchronous=False,
        table_optimizers=("sgd",),
    ),
    System(
        "torchrec",
        "TorchRec",
        BENCH_PYTHON,
        ("-m", "benchmark.torchrec_job"),
        table_optimizers=_FBGEMM_OPTIMIZERS,
    ),
    System(
        "torchrec-pipelined",
        "TorchRec, pipelined",
        BENCH_PYTHON,
        ("-m", "benchmark.torchrec_job", "--pipelined"),
        table_optimizers=_FBGEMM_OPTIMIZERS,
    ),
)
SYSTEMS = {system.name: system for system in _ALL}
