"""The command line: a command is chosen, run, stopped by signals, and ends with a line and a code."""

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hybrid.errors import HybridError
from hybrid.topology import RoleKind
from workers.arguments import parse
from workers.commands import offline_commands, role_commands, run_commands
from workers.compile_cache import choose_torch_cache
from workers.console.messages import logging_to_stderr, print_line, visible
from workers.console.output_stream import tolerate_lost_output
from workers.exit_codes import ExitCode, Interrupt, exit_code
from workers.module_search_path import search_here_last
from workers.signals import ASK_SIGNAL, HEARD


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; exits with a code of :class:`workers.exit_codes.ExitCode`, and a line on stderr."""
    started_at = time.time()
    # torch's C++ side logs every broken connection with a stack; the roles say it in one line.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    search_here_last()  # where a user's own net (dense.net = module:function) is
    options = parse(arguments)
    if options.command not in _WITHOUT_TORCH:
        choose_torch_cache()
    is_run = options.command in _RUNS
    try:
        with (
            tolerate_lost_output(_name(options), run_continues=is_run) as lost,
            logging_to_stderr(options.verbosity),
        ):
            _run_interruptibly(options, started_at)
        if lost.any and not is_run:
            sys.exit(ExitCode.FAILED)
    except HybridError as error:
        code = exit_code(error, has_stepped=False)
        if code is ExitCode.FAILED:
            sys.exit(_line(options, error))
        print_line(_line(options, error), to_stderr=code is not ExitCode.DONE)
        sys.exit(code)


def _run_interruptibly(options: argparse.Namespace, started_at: float) -> None:
    try:
        with _interruptible():
            _COMMANDS[options.command](options, started_at)
    except KeyboardInterrupt as interrupt:
        print_line(f"{_name(options)}: {str(interrupt) or 'interrupted'}", to_stderr=True)
        sys.exit(exit_code(interrupt))


def _line(options: argparse.Namespace, error: HybridError) -> str:
    return f"{_name(options)}: {visible(' '.join(str(error).split()))}"


def _name(options: argparse.Namespace) -> str:
    """What speaks in an error message, such as ``hybrid trainer 1``."""
    index = getattr(options, "index", None)
    return f"hybrid {options.command}" + ("" if index is None else f" {index}")


@contextmanager
def _interruptible() -> Iterator[None]:
    """Make SIGTERM and the like stop the command as Ctrl-C does, once: the way out is not interrupted."""

    def interrupt(signum: int, frame: object) -> None:
        for each in previous:
            signal.signal(each, signal.SIG_IGN)
        raise Interrupt(ExitCode.TERMINATED if signum == ASK_SIGNAL else ExitCode.of_signal(signum))

    # What is ignored already, as SIGHUP is under nohup, stays so.
    previous = {
        each: handler
        for each in (*HEARD, ASK_SIGNAL)
        if (handler := signal.getsignal(each)) != signal.SIG_IGN
    }
    for each in previous:
        signal.signal(each, interrupt)
    try:
        yield
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)


_WITHOUT_TORCH = ("config", "secret")
_RUNS = ("launch", "compare", "run", "role", *(kind.value for kind in RoleKind))
_COMMANDS = {
    "launch": run_commands.launch_run,
    "compare": run_commands.compare,
    "run": run_commands.run,
    RoleKind.MASTER: role_commands.master_role,
    RoleKind.TRAINER: role_commands.other_role,
    RoleKind.WORKER: role_commands.other_role,
    "role": role_commands.role_by_rank,
    "plan": offline_commands.plan,
    "evaluate": offline_commands.evaluate,
    "predict": offline_commands.predict,
    "export": offline_commands.export,
    "import": offline_commands.import_,
    "config": offline_commands.config,
    "secret": offline_commands.secret,
}
