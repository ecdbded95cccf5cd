"""Train on a Ray cluster, and restart after failures until the run has finished.

    python configs/cluster/hybrid_ray.py --trainers 2 --trainer CPU=4,GPU=1 --workers 4 \\
        --worker CPU=4,memory=64e9 --config clicks.toml
    python configs/cluster/hybrid_ray.py --script train.py -- ARGUMENT    # a custom loop

Further arguments are passed to hybrid master. Ray selects the nodes, starts an actor for each role there, and
ends the actors if this program ends. Ctrl-C saves the run and stops all roles. docs/clusters.md has details.
"""

# If this file were named ray.py, "import ray" would import this file.
import argparse
import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import ray
from ray.exceptions import RayActorError
from ray.util import get_node_ip_address, placement_group
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

MOST_RESTARTS = 10
END_SECONDS = 90  # for the other roles, after the first one has failed
AGAIN, TERMINATED, LOST = 75, 143, 255  # docs/failures.md; 255: an actor or its node was lost
STOPPED = (129, 130, 143)
_PR_SET_PDEATHSIG = 1


@ray.remote(max_concurrency=2, max_restarts=-1)
class RoleActor:
    """The process of one role. A second thread can signal it while the first one reads its output.

    Ray restarts an actor that it loses before the role has started, but calls ``run`` only once.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._process: subprocess.Popen[str] | None = None

    def __repr__(self) -> str:
        """Return the name of the actor in Ray's logs and dashboard."""
        return self._name

    @ray.method(max_task_retries=-1)
    def free_address(self) -> str:
        """Return an address of this node on which a master can listen."""
        ip = get_node_ip_address()
        family, host = (socket.AF_INET6, f"[{ip}]") if ":" in ip else (socket.AF_INET, ip)
        with socket.create_server((ip, 0), family=family) as server:
            return f"{host}:{server.getsockname()[1]}"

    def run(self, arguments: list[str], secret: str, folder: str | None) -> Iterator[str | int]:
        """Run the role; yield the lines that it prints, and at the end its exit code.

        The secret is an argument of this method, because Ray shows no arguments of methods.
        """
        # Ray sets OMP_NUM_THREADS for its actors; a role uses cluster.threads.
        environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
        actor, prctl = os.getpid(), ctypes.CDLL(None).prctl

        def prepare_role() -> None:
            """End with the actor, and unblock the signals that Ray blocks."""
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            if os.getppid() != actor:
                os._exit(1)

        self._process = subprocess.Popen(
            [sys.executable, "-m", "hybrid", *arguments],
            cwd=folder,
            env=environment | {"HYBRID_SECRET": secret, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=prepare_role,
        )
        for line in self._process.stdout or ():
            print(line, end="", flush=True)  # to Ray's logs
            yield line
        code = self._process.wait()
        yield 128 - code if code < 0 else code

    def send_signal(self, number: int) -> None:
        """Send a signal to the role."""
        if self._process is not None:
            self._process.send_signal(number)


class Cluster:
    """One start of all roles, each in its bundle of a placement group.

    Args:
        commands: arguments of ``hybrid`` by the name of the role, in the order of the bundles.
    """

    def __init__(self, group: PlacementGroup, commands: dict[str, list[str]]) -> None:
        self._commands = commands
        self._outputs: dict[ray.ObjectRefGenerator, str] = {}  # of the roles that have not ended
        self._actors = {
            name: RoleActor.options(
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
            ).remote(name)
            for index, (name, bundle) in enumerate(zip(commands, group.bundle_specs, strict=True))
        }

    def start(self) -> None:
        """Start the roles as soon as all actors run."""
        addresses = [actor.free_address.remote() for actor in self._actors.values()]
        if ray.wait(addresses, num_returns=len(addresses), timeout=10)[1]:
            report("waiting until Ray has started all actors ('ray status' shows the missing resources)")
        address, secret = ray.get(addresses)[0], secrets.token_hex(32)
        # Actors of a job with a working directory have a copy of it. Otherwise, the nodes share this folder.
        folder = None if ray.get_runtime_context().runtime_env.get("working_dir") else os.getcwd()
        for name, command in self._commands.items():
            to_master = ["--set", f"cluster.master={address}"] if name == "master" else ["--master", address]
            run = self._actors[name].run.options(num_returns="streaming")
            self._outputs[run.remote([command[0], *to_master, *command[1:]], secret, folder)] = name

    def wait(self) -> int:
        """Print the output of the roles until all have ended; return the exit code of the cluster."""
        code = 0
        while self._outputs:
            ready, _ = ray.wait(list(self._outputs), timeout=END_SECONDS if code else None)
            if not ready:
                report(f"did not end: {', '.join(self._outputs.values())}")
                break
            name = self._outputs[ready[0]]
            try:
                output = ray.get(next(ready[0]))
            except RayActorError as error:
                report(f"{name} is lost: {error}")
                return LOST
            if isinstance(output, str):
                print("" if name == "master" else f"({name}) ", output, sep="", end="", flush=True)
                continue
            del self._outputs[ready[0]]
            if output and not code and output not in STOPPED:
                report(f"{name} ended with {output}")
            # 1 and 2 permit no restart, even if roles that miss the failed one end earlier, with 75.
            final = [each for each in (code, output) if 0 < each < AGAIN]
            code = final[0] if final else max(code, output)
        return code

    def stop(self) -> None:
        """Ask the master to save the run and to stop all roles."""
        self._actors["master"].send_signal.remote(signal.SIGTERM)

    def kill(self) -> None:
        """End all actors and their roles at once."""
        for actor in self._actors.values():
            ray.kill(actor)


def report(text: str) -> None:
    print(f"hybrid_ray.py: {text}", file=sys.stderr, flush=True)


def parse_bundle(text: str) -> dict[str, float]:
    """Parse resources such as CPU=4,GPU=1,memory=64e9."""
    return {key: float(value) for key, _, value in (each.partition("=") for each in text.split(","))}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    for kind in ("trainers", "workers"):
        parser.add_argument(f"--{kind}", type=int, default=2, metavar="N")
    for kind in ("master", "trainer", "worker"):
        parser.add_argument(f"--{kind}", type=parse_bundle, default="CPU=1", metavar="CPU=N,GPU=N,memory=N")
    parser.add_argument("--strategy", default="SPREAD", help="of the placement group (default: SPREAD)")
    options, further = parser.parse_known_args()
    # lookahead has the results of sync, and is faster: it waits for fewer round trips per step.
    master = ["master", "--resume", "auto", "--set", "train.update=lookahead"]
    master += ["--set", f"cluster.trainers={options.trainers}", "--set", f"cluster.workers={options.workers}"]
    commands, bundles = {"master": master + further}, [options.master]
    for kind, number in (("trainer", options.trainers), ("worker", options.workers)):
        commands |= {f"{kind} {index}": [kind, "--index", str(index)] for index in range(number)}
        bundles += [getattr(options, kind)] * number

    ray.init(address="auto", log_to_driver=False)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    group = placement_group(bundles, strategy=options.strategy)  # Ray replaces lost bundles
    for restart in range(MOST_RESTARTS + 1):
        cluster = Cluster(group, commands)
        try:
            cluster.start()
            code = cluster.wait()
        except KeyboardInterrupt:
            report("saving the run; Ctrl-C again stops all roles at once")
            cluster.stop()
            cluster.wait()
            return TERMINATED
        finally:
            cluster.kill()
        if code < AGAIN or code in STOPPED or restart == MOST_RESTARTS:
            break
        report(f"ended with {code}; restarting")
    return code


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(TERMINATED)
