"""The command line: runs a command, stops it on signals, and ends with an exit code."""

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
from workers.compile_cache import choose_compile_cache
from workers.console.messages import logging_to_stderr, print_line, visible
from workers.console.output_stream import tolerate_lost_output
from workers.exit_codes import ExitCode, Interrupt, exit_code
from workers.module_imports import search_working_directory_last
from workers.signals import HANDLED_SIGNALS, STOP_REQUEST


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; exit with a code of :class:`workers.exit_codes.ExitCode`, and a line on stderr."""
    started_at = time.time()
    # torch's C++ code logs each broken connection with a stack; the roles report it in one line.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    search_working_directory_last()  # for modules of the user (dense.net = module:function)
    options = parse(arguments)
    if options.command not in _WITHOUT_TORCH:
        choose_compile_cache()
    is_run = options.command in _RUNS
    try:
        with (
            tolerate_lost_output(_name(options), run_continues=is_run) as lost,
            logging_to_stderr(options.verbosity),
        ):
            try:
                with _interruptible():
                    _COMMANDS[options.command](options, started_at)
            except KeyboardInterrupt as interrupt:
                print_line(f"{_name(options)}: {str(interrupt) or 'interrupted'}", to_stderr=True)
                sys.exit(exit_code(interrupt))
        if lost.any and not is_run:
            sys.exit(ExitCode.FAILED)
    except HybridError as error:
        code = exit_code(error, has_stepped=False)
        line = f"{_name(options)}: {visible(' '.join(str(error).split()))}"
        if code is ExitCode.FAILED:
            sys.exit(line)
        print_line(line, to_stderr=code is not ExitCode.DONE)
        sys.exit(code)


def _name(options: argparse.Namespace) -> str:
    """Return the start of an error message, such as ``hybrid trainer 1``; ``hybrid role`` finds its index."""
    index = getattr(options, "index", None)
    return f"hybrid {options.command}" + ("" if index is None else f" {index}")


@contextmanager
def _interruptible() -> Iterator[None]:
    """Make SIGTERM and the like stop the command as Ctrl-C does; the cleanup is not interrupted again."""

    def interrupt(signum: int, frame: object) -> None:
        for each in previous:
            signal.signal(each, signal.SIG_IGN)
        raise Interrupt(ExitCode.TERMINATED if signum == STOP_REQUEST else ExitCode.of_signal(signum))

    # Ignored signals stay ignored, such as SIGHUP under nohup.
    previous = {
        each: handler
        for each in (*HANDLED_SIGNALS, STOP_REQUEST)
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
