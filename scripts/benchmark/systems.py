"""The systems that are compared."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OWN_PYTHON = sys.executable
BENCH_PYTHON = str(ROOT / ".venv-bench/bin/python")  # with FBGEMM and TorchRec
REFERENCE = "one-process"  # the simplest system, which has the right losses


@dataclass(frozen=True)
class System:
    """A system that trains the :class:`benchmark.job.Job` of its environment.

    Attributes:
        title: name in tables.
        python: interpreter of its environment.
        arguments: arguments of Python. The working directory has the configuration of the run, config.toml.
        is_synchronous: whether its losses must equal those of one process.
    """

    title: str
    python: str
    arguments: tuple[str, ...]
    is_synchronous: bool = True


def _ours(update: str, is_synchronous: bool = True, title: str = "", settings: Sequence[str] = ()) -> System:
    arguments = ("-c", "from benchmark.ours import main; main()", f"train.update={update}", *settings)
    return System(f"ours, {update}{title}", OWN_PYTHON, arguments, is_synchronous)


SYSTEMS = {
    "ours-sync": _ours("sync"),
    "ours-lookahead": _ours("lookahead"),
    "ours-async": _ours("async", is_synchronous=False),
    REFERENCE: System("one process, torch", OWN_PYTHON, ("-m", "benchmark.one_process")),
    "one-process-fbgemm": System(
        "one process, FBGEMM", BENCH_PYTHON, ("-m", "benchmark.one_process", "--fbgemm")
    ),
    "torchrec": System("TorchRec, pipelined", BENCH_PYTHON, ("-m", "benchmark.torchrec_job")),
}
ON_CPU = tuple(SYSTEMS)
for _update in ("sync", "lookahead"):
    _gpu = "dense.device=cuda"
    _one = ("cluster.trainers=1", _gpu)
    SYSTEMS[f"gpu-{_update}"] = _ours(_update, title=", one trainer on a GPU", settings=_one)
    SYSTEMS[f"shared-gpu-{_update}"] = _ours(_update, title=", all trainers on one GPU", settings=[_gpu])
ON_GPU = tuple(name for name in SYSTEMS if name not in ON_CPU)
