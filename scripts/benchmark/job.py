"""The job of a measured system, in the environment variable ``BENCH_JOB``."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass

from benchmark.workloads import WORKLOADS, Workload

VARIABLE = "BENCH_JOB"


@dataclass(frozen=True)
class Job:
    """A workload, and its numbers of warm-up steps and timed steps.

    The text form is ``W1 10 60``; a variation of a workload is JSON instead of a name.
    """

    workload: Workload
    num_warm_up: int
    num_steps: int

    @classmethod
    def from_environment(cls) -> Job:
        """Return the job of this process."""
        return cls.from_text(os.environ[VARIABLE])

    @classmethod
    def from_text(cls, text: str) -> Job:
        workload, num_warm_up, num_steps = text.rsplit(maxsplit=2)
        known = WORKLOADS.get(workload)
        return cls(known or _read(workload), int(num_warm_up), int(num_steps))

    def to_text(self) -> str:
        workload = self.workload
        is_known = WORKLOADS.get(workload.name) == workload
        text = workload.name if is_known else json.dumps(dataclasses.asdict(workload))
        return f"{text} {self.num_warm_up} {self.num_steps}"

    @property
    def num_samples(self) -> int:
        """Samples of the timed steps, over all trainers."""
        return self.num_steps * self.workload.global_batch


def _read(text: str) -> Workload:
    fields = json.loads(text)
    fields["table_rows"] = tuple(fields["table_rows"])
    fields["dense"] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields["dense"].items()}
    return Workload(**fields)
