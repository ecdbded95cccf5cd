"""What a role finds out once it is welcome, and tells its master before torch starts."""

import dataclasses
import re
import resource
from collections.abc import Sequence
from multiprocessing.connection import Connection

import pytest
from support.commands import eventually
from support.fork_context import fork_context
from support.rendezvous import ACCEPTANCE, ADDRESS, SECONDS, WORKER, meeting

from hybrid.config import RunConfig
from hybrid.config.loading import to_toml
from hybrid.errors import HybridError
from hybrid.security.secret import Secret
from hybrid.transport.shared_memory.lent_blocks import own_network
from workers.rendezvous.bootstrap import join
from workers.rendezvous.interrupt import end_now
from workers.rendezvous.master_address import MasterAddress

START_SECONDS = 60.0
LOCAL_ACCEPTANCE = dataclasses.replace(ACCEPTANCE, config=to_toml(RunConfig()), network=own_network())


def _join(
    address: MasterAddress, secret: Secret, settings: Sequence[str], files: int, told: Connection
) -> None:
    if files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    try:
        with join(WORKER, address, secret, settings):
            told.send("joined")
    except HybridError as error:
        told.send(str(error))
        end_now(1)


@pytest.mark.parametrize(
    ("settings", "network", "files", "words"),
    [
        (["cluster.interface=none0"], own_network(), 0, "cluster.interface = 'none0': this host has .*"),
        (
            ["dense.device=cuda", "cluster.interface=lo"],
            "of another host",
            0,
            r"cluster.interface = 'lo': worker 0 on host \S+ would be reached by lo, which no other .*",
        ),
        ([], own_network(), 90, r"a role of .* needs about 156 open files, and 90 are allowed \(ulimit .*"),
        (["train.epochs=2"], own_network(), 0, "train.epochs: is decided by the master; set it there"),
    ],
    ids=["no such interface", "loopback between hosts", "too few files", "a key of the master's"],
)
def test_a_requirement_of_the_host_is_reported_on_both_sides(
    settings: list[str], network: str, files: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = fork_context()
    told, theirs = context.Pipe(duplex=False)
    with meeting(acceptance=dataclasses.replace(LOCAL_ACCEPTANCE, network=network)) as opened:
        address = MasterAddress(ADDRESS, opened.port)
        process = context.Process(target=_join, args=(address, opened.secret, settings, files, theirs))
        process.start()
        theirs.close()
        assert told.poll(START_SECONDS)
        said = told.recv()
        process.join(SECONDS)
        assert re.fullmatch(words, said)
        if "decided by the master" not in said:  # it does not even connect
            assert eventually(lambda: opened.lost, SECONDS)
            who = rf"worker 0 \(host \S+, pid {process.pid}\)"
            assert re.fullmatch(f"{who} has ended: {words}", str(opened.lost[0]))
