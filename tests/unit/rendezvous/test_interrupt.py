"""An error of another thread ends the main thread's wait, or else the process."""

import subprocess
import sys

from support.commands import ROOT

from workers.exit_codes import ExitCode

SECONDS = 5.0
START = """
import atexit, signal, sys, threading, time
from hybrid.errors import ClusterError, ConfigError
from workers.rendezvous.interrupt import Interrupter, run_interruptibly
interrupter = Interrupter("hybrid worker 0", {seconds})
def interrupt():
    interrupter.interrupt(ClusterError("the master is frozen"))
def block_signals():
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # as in a call into torch
"""


def run(program: str, seconds: float = SECONDS) -> tuple[int, str, str]:
    """Return exit code and output of a process that can be interrupted."""
    command = [sys.executable, "-c", START.format(seconds=seconds) + program]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20)
    return ended.returncode, ended.stdout, ended.stderr


def test_an_interrupt_raises_the_error_in_the_main_thread() -> None:
    program = """
start = time.monotonic()
try:
    with interrupter.enabled():
        threading.Timer(0.05, interrupt).start()
        threading.Event().wait(20)
except ClusterError as error:
    print(error, time.monotonic() - start < 5)
sys.exit("ended")
"""
    assert run(program) == (ExitCode.AGAIN, "the master is frozen True\n", "ended\n")


def test_an_interrupt_ends_the_wait_for_a_blocked_call() -> None:
    program = """
def wait_in_torch():
    block_signals()
    threading.Timer(0.05, interrupt).start()
    time.sleep(20)
try:
    with interrupter.enabled():
        run_interruptibly(wait_in_torch)
except ClusterError as error:
    print(error)
"""
    assert run(program) == (ExitCode.AGAIN, "the master is frozen\n", "")


def test_a_process_with_a_blocked_main_thread_reports_and_ends() -> None:
    program = """
with interrupter.enabled():
    block_signals()
    interrupt()
    time.sleep(20)
"""
    assert run(program, seconds=0.3) == (ExitCode.AGAIN, "", "hybrid worker 0: the master is frozen\n")


def test_a_failed_process_ends_with_threads_running() -> None:
    program = """
threading.Thread(target=time.sleep, args=(20,)).start()
with interrupter.enabled():
    raise ValueError("own")
"""
    code, _, stderr = run(program, seconds=0.3)
    assert code == ExitCode.AGAIN
    assert stderr.endswith("ValueError: own\nhybrid worker 0: own\n")


def test_exit_handlers_are_skipped_after_an_error() -> None:
    program = """
atexit.register(print, "exit handler")
try:
    with interrupter.enabled():
        raise {error}
except BaseException:
    print("handled")
"""
    failed = run(program.format(error="ConfigError('a.b', 'is bad')"))
    assert failed == (ExitCode.FAILED, "handled\n", "")
    assert run(program.format(error="KeyboardInterrupt")) == (ExitCode.INTERRUPTED, "handled\n", "")


def test_only_the_first_error_is_raised() -> None:
    program = """
atexit.register(print, "exit handler")
with interrupter.enabled():
    try:
        threading.Thread(target=interrupt).start()
        threading.Event().wait(20)
    except ClusterError as error:
        second = threading.Thread(target=interrupter.interrupt, args=(ClusterError("second"),))
        second.start()
        second.join()
        time.sleep(0.05)
        print(error)
"""
    assert run(program) == (0, "the master is frozen\nexit handler\n", "")


def test_the_next_interrupter_takes_over_from_a_failed_one() -> None:
    program = """
try:
    with interrupter.enabled():
        raise ClusterError("first")
except ClusterError:
    with Interrupter("second", 5).enabled():
        time.sleep(0.5)
print("ended")
"""
    assert run(program, seconds=0.1) == (0, "ended\n", "")
