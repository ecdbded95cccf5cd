"""Commands that are one role of a cluster: master, trainer, worker, or the one of this process's rank."""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hybrid.config import ClusterSection, RunConfig
from hybrid.config.loading import CONFIG_FILE, load_config, own_settings, with_own
from hybrid.errors import ConfigError, HybridError
from hybrid.security.secret import VARIABLE, Secret
from hybrid.storage.remote_path import parse_path
from hybrid.topology import MASTER, Role, RoleKind
from workers.arguments import AUTO
from workers.cluster_task import TrainTask
from workers.commands.run_commands import script_task
from workers.commands.run_request import (
    importing_torch,
    overrides,
    read_config,
    report_saved_state,
    requested_run,
)
from workers.console.messages import print_line
from workers.exit_codes import ExitCode, ReportedError, exit_code
from workers.launching.forked_roles import end_with_parent
from workers.launching.scheduler_rank import ends_with_starter, index_of, master_host, role_of
from workers.rendezvous.host_requirements import allow_open_files
from workers.rendezvous.master_address import MasterAddress
from workers.rendezvous.rendezvous_server import report_end
from workers.run_folder.remote_run import hold_run


def master_role(options: argparse.Namespace, started_at: float) -> None:
    """Be the master of a cluster whose other roles are started elsewhere."""
    _end_with_starter()
    config, folder, is_resumed, over = requested_run(options)
    secret = _shared_secret(config.cluster)
    if over:  # the others do not know yet
        report_end(config, secret, over)
        return
    allow_open_files(config.cluster)
    with importing_torch():
        from workers.roles import master

    if options.script is not None:
        script = script_task(options.script, ())
        with _coded(master.codes_of(script)):
            master.run(config, script, secret)
        return
    with hold_run(folder, is_resumed) as (here, _), report_saved_state(here, options.command):
        task = TrainTask(here, is_resumed, started_at)
        with _coded(master.codes_of(task)):
            master.run(config, task, secret)


def role_by_rank(options: argparse.Namespace, started_at: float) -> None:
    """Be what the rank of this process says, of all that the same command has started."""
    both_given = None not in (options.trainers, options.workers)
    config = RunConfig() if both_given else _wanted_config(options)
    counts = load_config(None, overrides(options)).cluster if both_given else config.cluster
    role = role_of(os.environ, counts.topology)
    address = MasterAddress.parse(_master_of(options))
    options.command, options.script = role.kind.value, None
    if role == MASTER:
        options.set += [f"cluster.master_address={address.host}", f"cluster.master_port={address.port}"]
        master_role(options, started_at)
    else:
        options.index, options.master = role.index, str(address)
        options.set = [f"cluster.secret_file={config.cluster.secret_file}", *own_settings(options.set)]
        other_role(options, started_at)


def _wanted_config(options: argparse.Namespace) -> RunConfig:
    """The configuration of the run that is to be, as far as it is known without a look at its folder."""
    if options.resume in (None, AUTO):
        return read_config(options)
    return load_config(parse_path(options.resume) / CONFIG_FILE, overrides(options), is_stored=True)


def _master_of(options: argparse.Namespace) -> str:
    """Where the master is, as it is given, or as torchrun says it; the port is ours all the same."""
    where: str = options.master or master_host(os.environ)
    if not where:
        raise ConfigError("--master", "must be given: HOST or HOST:PORT (torchrun's MASTER_ADDR will do)")
    return where


def _end_with_starter() -> None:
    """Where this process is one of a scheduler's, end with what has started it."""
    if ends_with_starter(os.environ):
        end_with_parent(os.getppid())


@contextmanager
def _coded(code_of: Callable[[BaseException], ExitCode]) -> Iterator[None]:
    """Have an error in here end the process with the right code."""
    try:
        yield
    except HybridError as error:
        raise ReportedError(str(error), code_of(error)) from error


def other_role(options: argparse.Namespace, started_at: float) -> None:
    """Be a trainer or a worker; ends the process with the code of the cluster."""
    _end_with_starter()
    kind = RoleKind(options.command)
    if options.index is None:
        options.index = index_of(os.environ, kind)
    address = MasterAddress.parse(_master_of(options))
    if options.index < 0:
        raise ConfigError("--index", "must be at least 0", options.index)
    secret = _shared_secret(with_own(RunConfig(), options.set).cluster)
    with importing_torch():
        from workers.roles.role_main import serve

    print_line(f"waiting for the master at {address}")
    with _coded(exit_code):
        code = serve(Role(kind, options.index), address, secret, options.set)
    sys.exit(code)


def _shared_secret(section: ClusterSection) -> Secret:
    """That which the roles of a cluster have, where they are started by hand."""
    secret = Secret.find(section.secret_file)
    if secret is None:
        rule = f"must be set, or {VARIABLE}, for roles started by hand; hybrid secret FILE makes one"
        raise ConfigError("cluster.secret_file", rule)
    return secret
