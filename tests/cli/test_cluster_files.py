"""The files under configs/cluster: the roles that they start, and when they restart them."""

import json
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from slurm_run.daemons import unavailable_reason
from support.commands import ROOT, eventually

from hybrid.config.loading import load_config
from workers.cli.arguments import parse
from workers.exit_codes import ExitCode

FOLDER = ROOT / "configs/cluster"
SECONDS = 10.0
SCHEMA = json.loads((ROOT / "tests/support/jobset_schema.json").read_text())


@pytest.fixture
def jobset() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((FOLDER / "jobset.yaml").read_text())
    return document


def jobs(jobset: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the specification of each replicated job."""
    return {each["name"]: each["template"]["spec"] for each in jobset["spec"]["replicatedJobs"]}


def container(job: dict[str, Any]) -> dict[str, Any]:
    (only,) = job["template"]["spec"]["containers"]
    found: dict[str, Any] = only
    return found


def test_jobset_is_valid_by_its_schema(jobset: dict[str, Any]) -> None:
    import jsonschema  # slow to import

    validator = jsonschema.validators.validator_for(SCHEMA)(SCHEMA)
    validator.validate(jobset)  # without a check of the schema itself, which takes longer


def test_jobset_starts_every_role(jobset: dict[str, Any]) -> None:
    found = jobs(jobset)
    for name, job in found.items():
        each = container(job)
        options = parse([*each["command"][1:], *each.get("args", [])])
        assert options.command == name
        if name != "master":
            host = jobset["metadata"]["name"]
            assert options.master == f"{host}-master-0-0.{host}"
            continue
        config = load_config(None, options.set)
        sizes = {f"{kind}s": found[kind]["completions"] for kind in ("trainer", "worker")}
        assert sizes == {"trainers": config.cluster.trainers, "workers": config.cluster.workers}
        assert (options.resume, config.train.update) == ("auto", "lookahead")


def test_pods_fail_by_exit_codes_of_this_project(jobset: dict[str, Any]) -> None:
    grace = load_config(None).cluster.timeout_seconds
    for job in jobs(jobset).values():
        assert (job["parallelism"], job["backoffLimit"]) == (job["completions"], 0)
        (rule,) = job["podFailurePolicy"]["rules"]
        assert rule["onExitCodes"]["values"] == [ExitCode.FAILED, ExitCode.USAGE]
        assert rule["onExitCodes"]["containerName"] == container(job)["name"]
        assert job["template"]["spec"]["terminationGracePeriodSeconds"] > grace
        assert job["template"]["spec"]["restartPolicy"] == "Never"


@pytest.fixture
def commands(tmp_path: Path) -> Callable[[str, str], None]:
    """Return a function that replaces a command by a script."""
    (tmp_path / "bin").mkdir()

    def put(name: str, script: str) -> None:
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)

    put("hybrid", '[ "$1" != secret ] || echo a-secret >"$2"')
    return put


def environment(folder: Path, **more: str) -> dict[str, str]:
    return {"PATH": f"{folder}/bin:/usr/bin:/bin", **more}


SLURM = {
    "SLURMD_NODENAME": "n1",
    "SLURM_JOB_ID": "7",
    "SLURM_NTASKS_HET_GROUP_1": "2",
    "SLURM_NTASKS_HET_GROUP_2": "3",
}
NODE = 'if [ "$1" = show ]; then echo "   NodeAddr=10.0.0.7 NodeHostName=n1"; else echo "$@" >>requeued; fi'


@pytest.mark.parametrize(
    ("code", "restarts", "is_requeued"),
    [(0, 0, False), (1, 0, False), (2, 0, False), (75, 0, True), (137, 3, True), (75, 10, False)],
)
def test_slurm_script_requeues_a_job_if_a_restart_may_help(
    code: int, restarts: int, is_requeued: bool, commands: Callable[[str, str], None], tmp_path: Path
) -> None:
    commands("scontrol", NODE)
    commands("sleep", "")
    commands("srun", f'echo "$@" >started; echo "$HYBRID_SECRET" >>started; exit {code}')
    variables = environment(tmp_path, SLURM_RESTART_COUNT=str(restarts), **SLURM)
    command = [str(FOLDER / "slurm.sh"), "--script", "a b.py", "--", "--lr"]
    ended = subprocess.run(
        command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=SECONDS
    )
    assert ended.returncode == code, ended.stderr
    assert (tmp_path / "requeued").exists() == is_requeued
    started, secret = (tmp_path / "started").read_text().splitlines()
    assert secret == "a-secret"
    role = started.partition(" hybrid ")[2]
    update = "--set train.update=lookahead"
    assert role == (
        f"role --master 10.0.0.7 --resume auto --trainers 2 --workers 3 {update} --script a b.py -- --lr"
    )
    options = parse(role.replace("a b", "a").split())
    assert (options.command, options.script, options.arguments) == ("role", "a.py", ["--lr"])


def test_slurm_script_passes_warnings_to_roles(commands: Callable[[str, str], None], tmp_path: Path) -> None:
    commands("scontrol", NODE)
    commands("srun", 'trap "exit 75" USR1; touch started; while :; do /bin/sleep 0.02; done')
    commands("sleep", "")
    variables = environment(tmp_path, **SLURM)
    with subprocess.Popen([str(FOLDER / "slurm.sh")], cwd=tmp_path, env=variables) as script:
        assert eventually((tmp_path / "started").exists, SECONDS)
        script.send_signal(signal.SIGUSR1)
        assert script.wait(SECONDS) == 75
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"


@pytest.mark.long
@pytest.mark.skipif(bool(unavailable_reason()), reason=f"no Slurm here: {unavailable_reason()}")
def test_restart_by_slurm_ends_with_the_bits_of_an_uninterrupted_run() -> None:
    command = [shutil.which("bash") or "bash", str(ROOT / "scripts/slurm")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=1150)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.endswith("\nthe result is bit-identical to that of an uninterrupted run\n")


# The role that hosts.sh starts: records its arguments, and waits for SIGTERM or for a file "end".
ROLE = """
case $1 in secret) echo a-secret >"$2"; exit;; esac
echo "$HYBRID_SECRET $@" >>"roles/$HOST-$1"
trap 'echo stopped >>"roles/$HOST-$1"; exit 143' TERM
until [ -e end ] || [ -e "end-$1" ]; do /bin/sleep 0.02; done
exit $(/bin/cat end "end-$1")
"""


@pytest.fixture
def hosts(commands: Callable[[str, str], None], tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run hosts.sh with a master and two trainers on n0, and a worker on n1."""
    (tmp_path / "roles").mkdir()
    commands("hybrid", ROLE)
    commands("ssh", 'HOST=$1; export HOST; shift; exec bash -c "$*"')
    commands("sleep", 'echo "$1" >>pauses')
    commands("cat", '/bin/sleep 0.2; exec /bin/cat "$@"')  # as on a busy machine: a signal may come first
    script = [str(FOLDER / "hosts.sh"), "n0", "n0 n0", "n1", "--script", "a b.py", "--", "--lr"]
    command = ["env", "--default-signal=INT", *script]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment(tmp_path), stderr=subprocess.DEVNULL
    ) as running:
        yield running
        running.kill()
        (tmp_path / "end").write_text("0")


def lines(folder: Path) -> dict[str, list[str]]:
    return {path.name: path.read_text().splitlines() for path in (folder / "roles").iterdir()}


def test_hosts_receive_their_roles_and_the_secret(hosts: subprocess.Popen[bytes], tmp_path: Path) -> None:
    assert eventually(lambda: sum(map(len, lines(tmp_path).values())) == 4, SECONDS)
    sizes = "--set cluster.master=n0 --set cluster.trainers=2 --set cluster.workers=1"
    started = {name: sorted(each) for name, each in lines(tmp_path).items()}
    assert started == {
        "n0-master": [
            f"a-secret master --resume auto --set train.update=lookahead {sizes} --script a b.py -- --lr"
        ],
        "n0-trainer": [f"a-secret trainer --index {index} --master n0" for index in (0, 1)],
        "n1-worker": ["a-secret worker --index 0 --master n0"],
    }
    (tmp_path / "end").write_text("0")
    assert hosts.wait(SECONDS) == 0


def test_unreachable_host_is_an_error_at_start(commands: Callable[[str, str], None], tmp_path: Path) -> None:
    commands("ssh", "exit 255")
    command = [str(FOLDER / "hosts.sh"), "n0", "n0", "n1"]
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=SECONDS
    )
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith("hosts.sh: n0 cannot be entered")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_hosts_sh_ends_roles(number: signal.Signals, hosts: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """Roles receive SIGTERM, on which they save the run."""
    assert eventually(lambda: sum(map(len, lines(tmp_path).values())) == 4, SECONDS)
    hosts.send_signal(number)
    assert hosts.wait(SECONDS) == (143 if number is signal.SIGINT else -number)
    assert eventually(lambda: sum(each.count("stopped") for each in lines(tmp_path).values()) == 4, SECONDS)


@pytest.mark.parametrize("code", [75, 137, 255])
def test_hosts_sh_restarts_roles_if_useful(code: int, hosts: subprocess.Popen[bytes], tmp_path: Path) -> None:
    assert eventually(lambda: sum(map(len, lines(tmp_path).values())) == 4, SECONDS)
    (tmp_path / "next").write_text(str(code))
    (tmp_path / "next").rename(tmp_path / "end")
    assert eventually(lambda: len(lines(tmp_path)["n1-worker"]) > 1, SECONDS)
    (tmp_path / "next").write_text("1")
    (tmp_path / "next").rename(tmp_path / "end")
    assert hosts.wait(SECONDS) == 1
    pauses = [int(line) for line in (tmp_path / "pauses").read_text().split()]
    assert pauses == ([5, 10, 20, 40, 80, 80, 80, 80, 80, 80] if code == 255 else [0] * 10)[: len(pauses)]


def test_hosts_sh_ends_if_a_master_fails_at_start(hosts: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """The other roles would wait for a master, and a restart would fail in the same way."""
    assert eventually(lambda: sum(map(len, lines(tmp_path).values())) == 4, SECONDS)
    (tmp_path / "next").write_text("2")
    (tmp_path / "next").rename(tmp_path / "end-master")
    assert hosts.wait(SECONDS) == 2
    assert sum(each.count("stopped") for each in lines(tmp_path).values()) == 3
