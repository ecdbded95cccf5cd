"""Commands that need no cluster: plan, evaluate, predict, export, import, secret, config."""

import argparse
import math
import os

import psutil

from hybrid.config.loading import describe, to_toml
from hybrid.errors import ConfigError
from hybrid.security.secret import VARIABLE, Secret
from workers.arguments import EXPORTS, STREAM
from workers.commands.run_commands import importing_torch, read_config
from workers.console.messages import print_text


def plan(options: argparse.Namespace, started_at: float) -> None:
    """Print the placement of tables, and the cost of a step."""
    config = read_config(options)
    for name in ("hosts", "cores", "memory", "network", "ids"):
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"--{name}", "must be more than 0, and finite", value)
    with importing_torch():
        from hybrid.data.prepare.preparation import cache_folder
        from workers.planning.plan_report import print_plan
        from workers.planning.step_model import Hosts

    hosts = Hosts(
        options.hosts,
        options.cores or len(os.sched_getaffinity(0)),
        options.memory * 2**30 if options.memory else psutil.virtual_memory().total,
        options.network * 1e9 / 8,
    )
    print_plan(config, cache_folder(config), hosts, options.ids)


def evaluate(options: argparse.Namespace, started_at: float) -> None:
    """Print the metrics of a run's model."""
    with importing_torch():
        from workers.model_commands.prediction_commands import evaluate

    evaluate(options.run_folder, options.input, options.trust_code)


def predict(options: argparse.Namespace, started_at: float) -> None:
    """Write the predictions of a run's model."""
    if STREAM in options.input and len(options.input) > 1:
        rule = "names standard input beside files; name it alone, or only files"
        raise ConfigError("--input", rule, STREAM)
    with importing_torch():
        from workers.model_commands.prediction_commands import predict

    keep = [name for names in options.keep for name in names.split(",")]
    predict(options.run_folder, options.input, options.output, keep, options.trust_code)


def export(options: argparse.Namespace, started_at: float) -> None:
    """Write a run's model as files for other programs."""
    with importing_torch():
        from hybrid.export.name_map import NameMap
        from workers.model_commands.model_exchange import export_run

    formats = options.format or EXPORTS[:1]
    if options.map and "tables" not in formats:
        raise ConfigError("--map", "needs --format tables: it names the tables in that file")
    names = NameMap.parse(options.map)
    export_run(options.run_folder, options.output, formats, options.dtype, names, options.trust_code)


def import_(options: argparse.Namespace, started_at: float) -> None:
    """Write a run with tables from other programs."""
    with importing_torch():
        from hybrid.export.name_map import NameMap
        from workers.model_commands.model_exchange import import_tables

    import_tables(options.source, options.into, options.output, NameMap.parse(options.map))


def secret(options: argparse.Namespace, started_at: float) -> None:
    """Write a new secret to a file."""
    Secret.fresh().write(options.file)
    print_text(
        f"{options.file} holds a new secret. Start every role of the cluster with\n"
        f"    --set cluster.secret_file={options.file}\n"
        "or, if a host cannot read the file, after\n"
        f'    export {VARIABLE}="$(cat {options.file})"\n'
        "Protect it like a password: anybody who has it can run programs as you.\n"
    )


def config(options: argparse.Namespace, started_at: float) -> None:
    """Print the effective configuration, or a description of each key."""
    print_text(describe() if options.describe else to_toml(read_config(options)))
