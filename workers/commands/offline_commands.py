"""Commands that need no cluster: plans, predictions, exports and imports, a secret, the configuration."""

import argparse
import math
import os

import psutil

from hybrid.config.loading import to_toml
from hybrid.config.reference_page import describe
from hybrid.errors import ConfigError
from hybrid.security.secret import VARIABLE, Secret
from workers.arguments import EXPORTS, STREAM
from workers.commands.run_request import importing_torch, read_config
from workers.console.messages import print_text


def plan(options: argparse.Namespace, started_at: float) -> None:
    """Print where tables would lie, and what a step would cost."""
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
    """Print how good a run's model is."""
    with importing_torch():
        from workers.model_commands.prediction_commands import evaluate

    evaluate(options.run_folder, options.input, options.trust_code)


def predict(options: argparse.Namespace, started_at: float) -> None:
    """Write what a run's model says of rows."""
    if STREAM in options.input and len(options.input) > 1:
        rule = "names standard input, which cannot be read among files; name it alone, or files"
        raise ConfigError("--input", rule, STREAM)
    with importing_torch():
        from workers.model_commands.prediction_commands import predict

    keep = [name for names in options.keep for name in names.split(",")]
    predict(options.run_folder, options.input, options.output, keep, options.trust_code)


def export(options: argparse.Namespace, started_at: float) -> None:
    """Write a run's model as files for others."""
    with importing_torch():
        from hybrid.export.name_map import NameMap
        from workers.model_commands.run_export import export_run

    formats = options.format or EXPORTS[:1]
    if options.map and "tables" not in formats:
        raise ConfigError("--map", "names tables in their file; ask for it by --format tables")
    names = NameMap.parse(options.map)
    export_run(options.run_folder, options.output, formats, options.dtype, names, options.trust_code)


def import_(options: argparse.Namespace, started_at: float) -> None:
    """Write a run with tables of others."""
    with importing_torch():
        from hybrid.export.name_map import NameMap
        from workers.model_commands.run_import import import_tables

    import_tables(options.source, options.into, options.output, NameMap.parse(options.map))


def secret(options: argparse.Namespace, started_at: float) -> None:
    """Write a new secret into a file."""
    Secret.fresh().write(options.file)
    print_text(
        f"{options.file} holds a new secret. Start every role of the cluster with\n"
        f"    --set cluster.secret_file={options.file}\n"
        "or, where it cannot see the file, after\n"
        f'    export {VARIABLE}="$(cat {options.file})"\n'
        "Keep it as you keep a password: whoever has it can run programs as you.\n"
    )


def config(options: argparse.Namespace, started_at: float) -> None:
    """Print the effective configuration, or what each key means."""
    print_text(describe() if options.describe else to_toml(read_config(options)))
