"""Comparison of the results of two runs, bit for bit."""

from pathlib import Path
from typing import Any

from hybrid.checkpoint.checkpoint_folders import CUSTOM_LOOP, MANIFEST_FILE, Manifest
from hybrid.errors import HybridError
from hybrid.loggers.record_file import METRICS_FILE, read_records
from workers.run_folder.run_access import RunState

_TIMES = ("time", "samples_per_second", "phase_seconds")


def differences(uninterrupted: Path, killed: Path) -> list[str]:
    """Return what differs in the last checkpoints and metrics.jsonl; HybridError without a checkpoint."""
    differing = []
    ours, theirs = (_final_tensors(run) for run in (killed, uninterrupted))
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            differing.append(f"{name} of the last checkpoint")
    for kind in ("train", "test"):
        if _lines(uninterrupted, kind) != _lines(killed, kind):
            differing.append(f"{kind} lines of metrics.jsonl")
    return differing


def _final_tensors(run: Path) -> dict[str, bytes]:
    step = RunState.of(run).checkpoint_step
    if step is None:
        raise HybridError(f"{run}: has no checkpoint")
    folder = run / f"checkpoints/step-{step:08d}"
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.safetensors")}
    progress = Manifest.read(folder / MANIFEST_FILE).progress
    state = {"the step": step, "the state of the loop": progress if CUSTOM_LOOP in progress else None}
    return {**{name: str(value).encode() for name, value in state.items()}, **files}


def _lines(run: Path, kind: str) -> list[dict[str, Any]]:
    records = read_records(run / METRICS_FILE)  # a script writes no such file
    return [{k: v for k, v in r.items() if k not in _TIMES} for r in records if r["kind"] == kind]
