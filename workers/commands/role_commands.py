"""Commands that run one role of a cluster: master, trainer, worker, or the role of this process's rank."""

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
from hybrid.user_code.run_signature import load_cluster_section
from workers.arguments import AUTO
from workers.cluster_task import TrainTask
from workers.commands.run_commands import (
    importing_torch,
    overrides,
    read_config,
    report_saved_state,
    requested_run,
    script_task,
)
from workers.console.messages import print_line
from workers.exit_codes import ExitCode, ReportedError, exit_code
from workers.launching.fork_server import end_with_parent
from workers.launching.scheduler_rank import ends_with_starter, index_of, master_host, role_of
from workers.rendezvous.host_requirements import allow_open_files
from workers.rendezvous.master_address import MasterAddress
from workers.rendezvous.rendezvous_server import report_end
from workers.run_folder.run_access import hold_run


def master_role(options: argparse.Namespace, started_at: float) -> None:
    """Run the master of a cluster whose other roles are started by other commands."""
    _end_with_starter()
    config, folder, is_resumed, finished = requested_run(options)
    secret = _shared_secret(config.cluster)
    if finished:  # the other roles do not know yet
        report_end(config, secret, finished)
        return
    allow_open_files(config.cluster)
    with importing_torch():
        from workers.roles import master

    if options.script is not None:
        script = script_task(options.script, ())
        with _exit_code_of(master.exit_codes_of(script)):
            master.run(config, script, secret)
        return
    with hold_run(folder, is_resumed) as (local, _), report_saved_state(local, options.command):
        task = TrainTask(local, is_resumed, started_at)
        with _exit_code_of(master.exit_codes_of(task)):
            master.run(config, task, secret)


def role_by_rank(options: argparse.Namespace, started_at: float) -> None:
    """Run the role of this process's rank among the processes that the same command has started."""
    if None not in (options.trainers, options.workers):
        cluster = load_config(None, overrides(options)).cluster
    elif options.resume in (None, AUTO):
        cluster = read_config(options).cluster
    else:
        run_config = parse_path(options.resume) / CONFIG_FILE
        cluster = load_cluster_section(run_config, overrides(options), options.trust_code)
    role = role_of(os.environ, cluster.topology)
    address = _master_address(options)
    options.command, options.script = role.kind.value, None
    if role == MASTER:
        options.set += [f"cluster.master={address}"]
        master_role(options, started_at)
    else:
        options.index, options.master = role.index, str(address)
        options.set = [f"cluster.secret_file={cluster.secret_file}", *own_settings(options.set)]
        other_role(options, started_at)


def _master_address(options: argparse.Namespace) -> MasterAddress:
    """Return the master's address as given, or as torchrun reports it; torchrun's port is not used."""
    address: str = options.master or master_host(os.environ)
    if not address:
        raise ConfigError("--master", "must be given: HOST or HOST:PORT (torchrun's MASTER_ADDR will do)")
    return MasterAddress.parse(address)


def _end_with_starter() -> None:
    """End with the process that has started this one, if that is a scheduler's."""
    if ends_with_starter(os.environ):
        end_with_parent(os.getppid())


@contextmanager
def _exit_code_of(code_of: Callable[[BaseException], ExitCode]) -> Iterator[None]:
    """Give an error in the context the exit code that ``code_of`` returns."""
    try:
        yield
    except HybridError as error:
        raise ReportedError(str(error), code_of(error)) from error


def other_role(options: argparse.Namespace, started_at: float) -> None:
    """Run a trainer or a worker; ends the process with the exit code of the cluster."""
    _end_with_starter()
    kind = RoleKind(options.command)
    if options.index is None:
        options.index = index_of(os.environ, kind)
    address = _master_address(options)
    if options.index < 0:
        raise ConfigError("--index", "must be at least 0", options.index)
    secret = _shared_secret(with_own(RunConfig(), options.set).cluster)
    with importing_torch():
        from workers.roles.role_main import serve

    print_line(f"waiting for the master at {address}")
    with _exit_code_of(exit_code):
        code = serve(Role(kind, options.index), address, secret, options.set)
    sys.exit(code)


def _shared_secret(section: ClusterSection) -> Secret:
    """Return the secret of a cluster whose roles are started by hand."""
    secret = Secret.find(section.secret_file)
    if secret is None:
        rule = f"must be set, or {VARIABLE}, for roles started by hand; hybrid secret FILE makes one"
        raise ConfigError("cluster.secret_file", rule)
    return secret
