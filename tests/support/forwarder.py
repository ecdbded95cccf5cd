"""A switch whose cables are long and narrow: a program that passes frames on, each later than it came.

``python forwarder.py SECONDS BITS PORT...`` makes a TAP device for each port, says "ready", and forwards:
what a host sends takes its time by ``BITS`` a second to leave it, waits where the other's cable is busy, and
is there ``SECONDS`` later. Not every kernel has netem, which does the same. Frames come as large as the
kernel makes them (64 KiB), so that a link of 1 Gbit/s costs a few hundred wake-ups a second. Needs nothing
but Python.
"""

import fcntl
import heapq
import itertools
import os
import select
import struct
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0  # linux/if_tun.h
_TAP, _NO_INFORMATION, _OFFLOAD_HEADER = 0x0002, 0x1000, 0x4000
_CHECKSUMS_AND_LARGE_FRAMES = 0x01 | 0x02 | 0x04
_HEADER_BYTES = 10  # struct virtio_net_hdr: what is left to do of checksums and cutting, told on
_LAST_OF_RECEIVER = _HEADER_BYTES + 5
_LARGEST = 1 << 17
_MANY = 0x01  # of the first byte of an address: for all, or for several


class Forwarder:
    """Forwards between TAP devices; the last byte of a hardware address is the number of its port."""

    def __init__(self, delay_seconds: float, bits_per_second: float, ports: Sequence[str]) -> None:
        self._delay = delay_seconds
        self._seconds_per_byte = 8 / bits_per_second
        self._files = [_tap(name) for name in ports]
        self._plugged_in = list(self._files)
        self._sent_at, self._taken_at = [0.0] * len(ports), [0.0] * len(ports)
        self._order = itertools.count()
        self._under_way: list[tuple[float, int, int, bytes]] = []

    def run(self) -> None:
        """Forward; does not return."""
        while True:
            wait = max(0.0, self._under_way[0][0] - time.monotonic()) if self._under_way else None
            readable, _, _ = select.select(self._plugged_in, [], [], wait)
            for file in readable:
                self._take_all(self._files.index(file))
            while self._under_way and self._under_way[0][0] <= time.monotonic():
                _, _, port, frame = heapq.heappop(self._under_way)
                self._hand_over(port, frame)

    def _take_all(self, port: int) -> None:
        while True:
            try:
                frame = os.read(self._files[port], _LARGEST)
            except BlockingIOError:
                return
            except OSError:  # its host is gone, and the device with it
                self._plugged_in.remove(self._files[port])
                return
            self._sent_at[port] = left = max(self._sent_at[port], time.monotonic()) + self._seconds(frame)
            is_for_many = frame[_HEADER_BYTES] & _MANY
            receiver = frame[_LAST_OF_RECEIVER]
            others = set(range(len(self._files))) - {port}
            for other in others if is_for_many else others & {receiver}:
                self._taken_at[other] = taken = max(left, self._taken_at[other] + self._seconds(frame))
                entry = (taken + self._delay, next(self._order), other, frame)
                heapq.heappush(self._under_way, entry)

    def _seconds(self, frame: bytes) -> float:
        return len(frame) * self._seconds_per_byte

    def _hand_over(self, port: int, frame: bytes) -> None:
        try:
            os.write(self._files[port], frame)
        except OSError:  # nobody is there: the frame is lost, as on any cable
            return


def _tap(name: str) -> int:
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    flags = _TAP | _NO_INFORMATION | _OFFLOAD_HEADER
    fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    fcntl.ioctl(file, _TUNSETOFFLOAD, _CHECKSUMS_AND_LARGE_FRAMES)
    return file


def main(delay_seconds: str, bits_per_second: str, *ports: str) -> None:
    """Be the program."""
    with suppress(PermissionError):
        os.nice(-20)  # frames that a busy machine forwards late are no property of the link
    forwarder = Forwarder(float(delay_seconds), float(bits_per_second), ports)
    print("ready", flush=True)
    forwarder.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
