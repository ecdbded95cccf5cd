"""An error found by another thread ends the main thread's wait; where it cannot, it ends the process."""

import subprocess
import sys

from support.commands import ROOT

from workers.exit_codes import ExitCode

SECONDS = 5.0
START = """
import signal, sys, threading, time
from hybrid.errors import ClusterError, ConfigError
from workers.rendezvous.interrupt import Interrupter
interrupter = Interrupter("hybrid worker 0", {seconds})
ring = lambda: interrupter.interrupt(ClusterError("the master is frozen"))
"""


def run(program: str, seconds: float = 0.3) -> tuple[int, str, str]:
    """Exit code and output of a process that can be interrupted."""
    command = [sys.executable, "-c", START.format(seconds=seconds) + program]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20)
    return ended.returncode, ended.stdout, ended.stderr


def test_an_interrupt_raises_the_error_in_the_main_thread() -> None:
    # In a process of its own, since a process that was interrupted is to end.
    program = """
began = time.monotonic()
try:
    with interrupter.enabled():
        threading.Timer(0.05, ring).start()
        threading.Event().wait(20)
except ClusterError as error:
    print(error, time.monotonic() - began < 5)
sys.exit("told")
"""
    assert run(program, seconds=SECONDS) == (ExitCode.AGAIN, "the master is frozen True\n", "told\n")


def test_an_interrupt_ends_the_wait_for_a_blocked_call() -> None:
    program = """
from workers.rendezvous.interrupt import run_interruptibly
def deaf():
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # as in a call into torch
    threading.Timer(0.05, ring).start()
    time.sleep(20)
try:
    with interrupter.enabled():
        run_interruptibly(deaf)
except ClusterError as error:
    print(error)
sys.exit("told")
"""
    assert run(program, seconds=SECONDS) == (ExitCode.AGAIN, "the master is frozen\n", "told\n")


def test_a_process_with_a_blocked_main_thread_reports_and_ends() -> None:
    program = """
with interrupter.enabled():
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # as deaf as in a call into torch
    ring()
    time.sleep(20)
"""
    assert run(program) == (ExitCode.AGAIN, "", "hybrid worker 0: the master is frozen\n")


def test_a_failed_process_ends_with_threads_running() -> None:
    program = """
threading.Thread(target=time.sleep, args=(20,)).start()
with interrupter.enabled():
    raise ValueError("own")
"""
    code, _, told = run(program)
    assert code == ExitCode.AGAIN
    assert told.endswith("ValueError: own\nhybrid worker 0: own\n")


def test_a_process_ends_with_a_full_log() -> None:
    program = """
sys.stdout, sys.stderr = open("/dev/full", "w"), open("/dev/full", "w", buffering=1)
print("not written yet", end="")
with interrupter.enabled():
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    ring()
    time.sleep(20)
"""
    assert run(program) == (ExitCode.AGAIN, "", "")


def test_exit_handlers_are_skipped_after_an_error() -> None:
    program = """
import atexit
atexit.register(print, "the end of Python")
try:
    with interrupter.enabled():
        raise {error}
except BaseException:
    print("told")
"""
    assert run(program.format(error="ConfigError('a.b', 'is bad')"), SECONDS) == (
        ExitCode.FAILED,
        "told\n",
        "",
    )
    assert run(program.format(error="ValueError"), SECONDS) == (ExitCode.AGAIN, "told\n", "")
    assert run(program.format(error="KeyboardInterrupt"), SECONDS) == (ExitCode.INTERRUPTED, "told\n", "")
    in_peace = (
        "import atexit\natexit.register(print, 'the end of Python')\nwith interrupter.enabled(): pass\n"
    )
    assert run(in_peace) == (0, "the end of Python\n", "")


def test_only_the_first_error_is_raised() -> None:
    program = """
with interrupter.enabled():
    try:
        threading.Thread(target=ring).start()
        threading.Event().wait(20)
    except ClusterError as error:
        echo = threading.Thread(target=interrupter.interrupt, args=(ClusterError("an echo"),))
        echo.start()
        echo.join()
        time.sleep(0.05)
        print(error, "told in peace")
"""
    assert run(program, SECONDS) == (0, "the master is frozen told in peace\n", "")
