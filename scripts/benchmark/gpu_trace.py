"""What a trainer's GPU does in a step: kernels, and copies from and to the CPU, from a trace of torch."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch.profiler import ProfilerActivity, profile

from hybrid.batch import Batch


class GpuStep(TypedDict):
    """Means of the traced steps; times in milliseconds, sizes in megabytes."""

    kernels: float
    kernel_ms: float
    to_gpu_mb: float
    to_gpu_ms: float
    from_gpu_mb: float
    from_gpu_ms: float
    pageable: float  # copies from or to memory that is not pinned, which are not asynchronous


def traced(batches: list[Batch], num_ahead: int, file: Path) -> Iterator[Batch]:
    """Yield batches of a trainer; write the :class:`GpuStep` of their steps to a JSON file.

    Args:
        num_ahead: how many steps ahead of training the batches are read. The trace ends with the last batch,
            so it lacks the last ``num_ahead`` steps.
    """
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        yield from batches
        torch.cuda.synchronize()
    trace = Path(f"{file}.trace")
    profiler.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    file.write_text(json.dumps(_summary(events, len(batches) - num_ahead)), encoding="utf-8")


def _summary(events: list[dict[str, Any]], num_steps: int) -> GpuStep:
    durations = [each["dur"] for each in events if each.get("cat") == "kernel"]
    copies = [each for each in events if each.get("cat") == "gpu_memcpy"]
    to_gpu = [each for each in copies if "HtoD" in each["name"]]
    from_gpu = [each for each in copies if "DtoH" in each["name"]]

    def megabytes(selected: list[dict[str, Any]]) -> float:
        return float(sum(each["args"]["bytes"] for each in selected)) / num_steps / 1e6

    def milliseconds(selected: list[dict[str, Any]]) -> float:
        return float(sum(each["dur"] for each in selected)) / num_steps / 1e3

    return GpuStep(
        kernels=len(durations) / num_steps,
        kernel_ms=sum(durations) / num_steps / 1e3,
        to_gpu_mb=megabytes(to_gpu),
        to_gpu_ms=milliseconds(to_gpu),
        from_gpu_mb=megabytes(from_gpu),
        from_gpu_ms=milliseconds(from_gpu),
        pageable=sum("Pageable" in each["name"] for each in copies) / num_steps,
    )
