"""The command line: runs a command, stops it on signals, and ends with an exit code."""

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hybrid.errors import HybridError
from hybrid.module_imports import exclude_working_directory
from hybrid.storage.private_files import choose_compile_cache
from hybrid.topology import RoleKind
from workers.cli import commands
from workers.cli.arguments import parse
from workers.console import logging_to_stderr, print_line, tolerate_lost_output, visible
from workers.exit_codes import HANDLED_SIGNALS, STOP_REQUEST, ExitCode, Interrupt, exit_code, handling

# Numba reads this file in the working directory. The file can name a folder of compiled code to load.
_NUMBA_FILE = ".numba_config.yaml"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command. After a HybridError or a stop, print a message, and exit with an :class:`ExitCode`."""
    started_at = time.time()
    # torch's C++ code logs each broken connection with a stack; the roles report the connection in one line.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    exclude_working_directory()
    options = parse(arguments)
    options.started_at = started_at
    uses_torch = options.command not in _WITHOUT_TORCH
    if uses_torch:
        choose_compile_cache()
    is_run = options.command in _RUNS
    try:
        with (
            tolerate_lost_output(_name(options), run_continues=is_run) as lost,
            logging_to_stderr(options.verbosity),
        ):
            if uses_torch and os.path.exists(_NUMBA_FILE):
                rule = "in the working directory would configure numba; remove it, or set NUMBA_... variables"
                raise HybridError(f"{_NUMBA_FILE} {rule}")
            try:
                with _interruptible():
                    getattr(commands, f"{options.command}_command")(options)
            except KeyboardInterrupt as interrupt:
                print_line(f"{_name(options)}: {str(interrupt) or 'interrupted'}", to_stderr=True)
                sys.exit(exit_code(interrupt))
        if lost and not is_run:
            sys.exit(ExitCode.FAILED)
    except HybridError as error:
        code = exit_code(error, has_stepped=False)
        line = f"{_name(options)}: {visible(' '.join(str(error).split()))}"
        if code is ExitCode.FAILED:
            sys.exit(line)
        print_line(line, to_stderr=code is not ExitCode.DONE)
        sys.exit(code)


def _name(options: argparse.Namespace) -> str:
    """Return the start of an error message, such as ``hybrid trainer 1``."""
    index = getattr(options, "index", None)
    return f"hybrid {options.command}" + ("" if index is None else f" {index}")


@contextmanager
def _interruptible() -> Iterator[None]:
    """Raise Interrupt at the first stop signal that this process does not ignore; ignore later signals."""

    def interrupt(number: int, _: object) -> None:
        for each in handled:
            signal.signal(each, signal.SIG_IGN)
        raise Interrupt(ExitCode.TERMINATED if number == STOP_REQUEST else ExitCode.of_signal(number))

    with handling((*HANDLED_SIGNALS, STOP_REQUEST), interrupt) as handled:
        yield


_WITHOUT_TORCH = ("config", "report", "secret")
_RUNS = ("launch", "compare", "run", "role", *(kind.value for kind in RoleKind))
