"""``scripts/bench forms``: the forms of the dense net beside plain DDP, on as many samples a step.

Losses of all forms with as many trainers must agree, as those of synchronous systems must.
"""

import argparse
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from benchmark import report
from benchmark.durations import WARM_UP_STEPS
from benchmark.job import Job
from benchmark.machine import origin
from benchmark.results import disagreements, split, summarise
from benchmark.rounds import Task, measured
from benchmark.systems import OURS_SYNC, OWN_PYTHON, System
from benchmark.workloads import WORKLOADS, Workload
from hybrid.config import RunConfig

_PLAIN = "plain DDP"


@dataclass(frozen=True)
class Form:
    """A form in which trainers compute the dense net.

    Attributes:
        dense: keys of ``[dense]`` that make it.
    """

    name: str
    trainers: int
    dense: Mapping[str, Any] = field(default_factory=dict)

    def workload(self, batch_size: int) -> Workload:
        """W1 with this many samples a step; forms with as many trainers have the same batches."""
        name = f"{self.trainers} trainers"
        trainer_batch = batch_size // self.trainers
        return dataclasses.replace(
            WORKLOADS["W1"], name=name, trainers=self.trainers, trainer_batch=trainer_batch
        )

    def config(self, workload: Workload) -> RunConfig:
        config = workload.config()
        return config.replace(dense=dataclasses.replace(config.dense, **self.dense))

    def __str__(self) -> str:
        return f"{self.name}, {self.trainers} trainers"

    @property
    def system(self) -> System:
        """This project, by the name of the form."""
        return dataclasses.replace(OURS_SYNC, name=self.name, title=self.name)


_REPLICAS = {"parallel": "replicas", "devices": ("cpu", "cpu"), "device": "auto"}
FORMS = (
    Form(_PLAIN, 2),
    Form("2 replicas in each", 2, _REPLICAS),
    Form("script", 2, {"compile": "script"}),
    Form("inductor", 2, {"compile": "inductor"}),
    Form(_PLAIN, 4),
    Form("2 x 2 mesh", 4, {"parallel": "tensor", "tensor_size": 2}),
)
_WIDE = {"top_mlp": (8192, 4096), "optimizer": "Adam", "learning_rate": 1e-4}
WIDE_FORMS = (
    Form(_PLAIN, 4, _WIDE),
    Form("2 x 2 mesh", 4, {**_WIDE, "parallel": "tensor", "tensor_size": 2}),
    Form("1 x 4 mesh", 4, {**_WIDE, "parallel": "tensor", "tensor_size": 4}),
)


def run(options: argparse.Namespace, console: Console) -> int:
    """Measure all forms, round by round; the exit code is 1 where one failed or its loss is wrong."""
    forms = [f for f in (WIDE_FORMS if options.wide else FORMS) if options.only in str(f)]
    folder = report.new_folder(options.output, "bench-forms")
    came_from = origin([OWN_PYTHON])
    tasks = [_task(form, options, number) for number in range(1, options.rounds + 1) for form in forms]
    measurements, failures = split(measured(tasks, console))
    names = list(dict.fromkeys(form.name for form in forms))
    summaries = summarise(measurements, [_PLAIN])
    found = disagreements(measurements, names, _PLAIN)
    note = (
        f"{options.rounds} round(s) through all forms, {options.steps} timed steps of {options.batch_size} "
        "samples each; ratios are medians of those within each round."
    )
    notes = [note, *report.error_lines(failures, found)]
    titles = {name: name for name in names}
    baselines = {_PLAIN: f"x {_PLAIN}"}
    tables = []
    for workload in dict.fromkeys(task.job.workload.name for task in tasks):
        tables.append(report.speed_table(workload, summaries, failures, titles, baselines, "trainer"))
        tables.append(report.loss_table(workload, summaries, found, titles, names))
    raw = report.raw_results(measurements, failures, summaries, found)
    report.write(folder, "Forms of the dense net", came_from, raw, notes, tables)
    report.show(console, notes, tables, folder)
    return 1 if failures or found else 0


def _task(form: Form, options: argparse.Namespace, number: int) -> Task:
    workload = form.workload(options.batch_size)
    return Task(form.system, Job(workload, WARM_UP_STEPS, options.steps), form.config(workload), number)
